#!/usr/bin/env bash
# The first hour on a new machine: five stages, from the doctor to three steps of the real run, and one report. Each says
# what it proves and, if it fails, what to do.
#
#   bash first_hour.sh CONFIG [--report FILE] [section.key=value ...]       e.g.  bash first_hour.sh configs/qwen3.yaml
#   RANKS=8 bash first_hour.sh configs/qwen3.yaml parallel.expert=8         on 8 dies of the server
#   PYTHON=.venv/bin/python bash first_hour.sh configs/tiny_cpu.yaml        on a laptop, with run_cpu.sh's environment
#
#   1 doctor      this machine against the configuration
#   2 groups      every process group proven and timed
#   3 operators   every operator of kernels.py against its formula, in bf16 and fp32, at the model's sizes on a rank
#   4 layers      two layers of real sizes: the sampler's log-probs against the trainer's, adapters moved
#   5 steps       three steps of the real run; device memory beside preflight's plan
#
# Killed or failed, the same command goes on where it was: a stage that has passed is not repeated unless configuration,
# code, packages, variables or files have changed. Logs, results and report.json (or FILE) are in train.out_dir,
# first_hour-<name of the configuration>; remove that folder to start from the beginning. Paths are seen from the
# repository's folder. One machine only. Exit code: 0 all passed, 1 a stage failed, 2 unusable input. Run on a CPU and on a
# stand-in for the NPU; not run on an NPU yet.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
RANKS=${RANKS:-}                        # processes; "": all devices of this machine, or on a CPU the fewest the layout takes
MINUTES=${MINUTES:-5 15 30 30 90}       # a stage that takes longer is ended and has failed, in the stages' order
PYTHON=${PYTHON:-python3}               # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

usage() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit "$1"
}
case ${1:-} in
    "") usage 2 >&2 ;;
    --help | -h) usage 0 ;;
esac
cd "$(dirname "$0")"

"$PYTHON" -c 'import pydantic, tqdm, yaml' 2>/dev/null ||
    { echo "error: PYTHON: $PYTHON lacks the packages of requirements/; needed: one that has them (docs/npu.md)" >&2; exit 2; }
hour=("$PYTHON" -m plan.first_hour "$@" --ranks "$RANKS" --minutes "$MINUTES")
device=$("${hour[@]}" --device)   # unusable input ends here, with its line
case $device in
    npu) source ./npu_env.sh ;;
    cuda) source ./cuda_env.sh ;;
    cpu)
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"   # the processes share the cores; more threads slow them down
        export TOKENIZERS_PARALLELISM=false              # the tokenizer's threads do not survive a fork
        export HF_HUB_OFFLINE=1                          # models are local folders: a mistyped path is no download
        ;;
esac
exec "${hour[@]}"                 # exec: signals reach it, and it ends what it has started
