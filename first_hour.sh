#!/usr/bin/env bash
# The first hour on a new machine: seven stages, from the doctor to three steps of the real run, and one report. Each stage
# says what it proves and, if it fails, what to do. --help prints the stages.
#
#   bash first_hour.sh CONFIG [--report FILE] [section.key=value ...]       e.g.  bash first_hour.sh configs/qwen3.yaml
#   RANKS=8 bash first_hour.sh configs/qwen3.yaml parallel.expert=8         on 8 dies of the server
#   PYTHON=.venv/bin/python bash first_hour.sh configs/tiny_cpu.yaml        on a laptop, with run_cpu.sh's environment
#
# After a failure the same command continues: a stage that has passed is not repeated unless configuration, code, packages,
# variables or files have changed. Logs, results and report.json (or FILE) are in train.out_dir,
# first_hour-<name of the configuration>; remove that folder to start from the beginning. Paths are relative to the
# repository's folder. One machine only. Exit code: 0 all passed, 1 a stage failed, 2 unusable input. Run on a CPU and on a
# simulated NPU; not run on an NPU yet.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
RANKS=${RANKS:-}                        # processes; "": all devices of this machine, or on a CPU the smallest number that the layout allows
MINUTES=${MINUTES:-}                    # time limits of the stages in their order; "": those that --help prints
PYTHON=${PYTHON:-python3}               # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
"$PYTHON" -c 'import pydantic, tqdm, yaml' 2>/dev/null ||
    { echo "error: PYTHON: $PYTHON lacks the packages of requirements/; needed: one that has them (docs/npu.md)" >&2; exit 2; }
hour=("$PYTHON" -m checks.first_hour "$@" --ranks "$RANKS" --minutes "$MINUTES")
case ${1:-} in --help | -h) exec "${hour[@]}" ;; esac
device=$("${hour[@]}" --device)   # unusable input ends here, with one line
case $device in
    npu) source ./npu_env.sh ;;
    cuda) source ./cuda_env.sh ;;
    cpu)
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"   # the processes share the cores; more threads are slower
        export TOKENIZERS_PARALLELISM=false              # the tokenizer's threads do not survive a fork
        export HF_HUB_OFFLINE=1                          # models are local folders; a wrong path must not start a download
        ;;
esac
exec "${hour[@]}"                 # exec: signals reach this process, which ends the processes that it started
