#!/usr/bin/env bash
# The tests, in the environment of run_cpu.sh plus requirements/test.txt and, for the tests of vLLM, cpu-vllm.txt.
#
#   bash run_tests.sh [pytest arguments]          e.g.  bash run_tests.sh -m "not slow" tests/test_grpo.py
#
# Two processes share the test files; with -n 0 there is one, which pytest's --pdb and -s need.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
PYTHON=${PYTHON:-python3}                  # 3.11, 3.12 or 3.13; makes the environment
VENV=${VENV:-.venv}                        # the environment's folder, 2.5 GB
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}    # where torch without CUDA comes from, or a mirror
MEGATRON_0_12_DIR=${MEGATRON_0_12_DIR:-.cache/megatron-core-0.12.1} # the older Megatron of the parity tests
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"

export MEGATRON_0_12_DIR              # the parity tests put it before the installed version
export OMP_NUM_THREADS=1              # many tests start 2 to 16 processes on few cores
export TOKENIZERS_PARALLELISM=false   # the tokenizer's threads do not survive the fork of a worker, and warn about it
export HF_HUB_OFFLINE=1               # no test may need a network
unset PYTHONPATH PYTHONHOME           # set by CANN and some editors; packages from there would hide the pinned ones

source ./setup_cpu.sh
set_up cpu test vllm

# Aside and then renamed: a folder of that name is always complete. The wheel says 3.11, what it holds for us is plain Python.
if [ ! -d "$MEGATRON_0_12_DIR" ]; then
    aside=$MEGATRON_0_12_DIR.$$
    mkdir -p "$aside"
    pip_install --target "$aside" --python-version 3.11 --only-binary=:all: megatron-core==0.12.1 ||
        pip_failed "megatron-core 0.12.1 into $MEGATRON_0_12_DIR"
    mv "$aside" "$MEGATRON_0_12_DIR"
fi

exec "$VENV/bin/python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
