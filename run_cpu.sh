#!/usr/bin/env bash
# GRPO with LoRA on a tiny Mixture-of-Experts model, on this machine's CPU: makes the environment and the model when they
# are absent, trains, and prints the accuracy before and after.
#
#   bash run_cpu.sh [section.key=value ...]       e.g.  bash run_cpu.sh train.seed=2 rollout.group_size=16
#   bash run_cpu.sh --vllm [section.key=value ...]      with vLLM as the sampler, not the embedded one; installs it first
#
# Every key is documented in knobs.py and set in configs/tiny_cpu.yaml. Exit code: 0 done, 2 unusable input, 1 otherwise.
# The settings below can be given in the environment too:  NPROC=1 bash run_cpu.sh

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
PYTHON=${PYTHON:-python3}                  # 3.11, 3.12 or 3.13; makes the environment
NPROC=${NPROC:-2}                          # processes; a core each is best
CONFIG=${CONFIG:-configs/tiny_cpu.yaml}    # seen from the repository's folder
VENV=${VENV:-.venv}                        # the environment's folder, 1.6 GB; 2.2 GB with vLLM
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}    # where torch without CUDA comes from, or a mirror
# ---------------------------------------------------------------------------------------------------------------------

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit
fi
cd "$(dirname "$0")"

export OMP_NUM_THREADS=1              # NPROC processes share the cores; more threads slow them down and change the last bits
export TOKENIZERS_PARALLELISM=false   # the tokenizer's threads do not survive the fork of a worker, and warn about it
export HF_HUB_OFFLINE=1               # models are local folders: a mistyped path is an error, not a download
unset PYTHONPATH PYTHONHOME           # set by CANN and some editors; packages from there would hide the pinned ones

source ./setup_cpu.sh
if [ "${1:-}" = --vllm ]; then
    shift
    if [ "$CONFIG" = configs/tiny_cpu.yaml ]; then   # its heads of 16 are too small for vLLM's attention on a CPU
        set -- model.path=models/tiny_qwen3_moe_heads32 tiny_model.head_dim=32 "$@"
    fi
    set -- rollout.engine=vllm "$@"
    set_up cpu vllm
else
    set_up cpu
fi

"$VENV/bin/python" train_grpo.py "$CONFIG" "$@" --check --ranks "$NPROC"   # bad input: one line, before any process starts
# --local-addr: a laptop whose host name nobody resolves would otherwise hang at the start. exec: signals reach torchrun,
# which ends its processes.
exec "$VENV/bin/python" -m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node="$NPROC" \
    train_grpo.py "$CONFIG" "$@"
