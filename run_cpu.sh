#!/usr/bin/env bash
# GRPO with LoRA on a tiny Mixture-of-Experts model, on the CPU of this machine. The script makes the environment and the
# model if they are absent, trains, and prints the accuracy before and after.
#
#   bash run_cpu.sh [section.key=value ...]       e.g.  bash run_cpu.sh train.seed=2 rollout.group_size=16
#   bash run_cpu.sh --vllm [section.key=value ...]      with vLLM as the sampler; installs it first
#
# Every key is documented in knobs.py and set in configs/tiny_cpu.yaml. Exit codes: docs/checks.md.
# The settings below can be given in the environment too:  NPROC=1 bash run_cpu.sh

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
PYTHON=${PYTHON:-python3}                  # 3.11, 3.12 or 3.13; makes the environment
NPROC=${NPROC:-2}                          # processes; one core each is best
CONFIG=${CONFIG:-configs/tiny_cpu.yaml}    # relative to the repository's folder
RESTARTS=${RESTARTS:-0}                    # how often lost processes are started again; they resume from the last checkpoint
VENV=${VENV:-.venv}                        # the environment's folder, 1.3 GB; 1.9 GB with vLLM
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}    # where torch without CUDA comes from, or a mirror
# ---------------------------------------------------------------------------------------------------------------------

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit
fi
cd "$(dirname "$0")"

source launch/setup_cpu.sh
set_variables
if [ "${1:-}" = --vllm ]; then
    shift
    if [ "$CONFIG" = configs/tiny_cpu.yaml ]; then   # vLLM's attention on a CPU needs heads larger than 16
        set -- model.path=models/tiny_qwen3_moe_heads32 tiny_model.head_dim=32 "$@"
    fi
    set -- rollout.engine=vllm "$@"
    set_up cpu vllm
else
    set_up cpu
fi

"$VENV/bin/python" train_grpo.py "$CONFIG" "$@" --check --ranks "$NPROC" >/dev/null   # bad input ends here, before torchrun starts
# launch/first_code.py is torchrun that ends without a traceback. exec: signals reach it, and it ends its processes.
# --local-addr: otherwise it hangs on a laptop whose host name cannot be resolved.
if [ "$RESTARTS" != 0 ]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # otherwise a restarted process reads the addresses of ended ones
fi
exec "$VENV/bin/python" launch/first_code.py --standalone --local-addr=localhost --nproc_per_node="$NPROC" \
    --max-restarts="$RESTARTS" \
    train_grpo.py "$CONFIG" "$@"
