#!/usr/bin/env bash
# Runs the tests. The first call makes the environment with requirements/cpu.txt, test.txt, cpu-vllm.txt and smol.txt. The first
# call with --ci or --all installs trackers.txt into a separate folder. The first call with --all installs serve.txt, a newer
# Megatron and torch_npu into three more.
#
#   bash run_tests.sh [--ci | --all] [pytest arguments]  e.g.  bash run_tests.sh -m "not slow" tests/rooms/method/test_grpo.py
#
# Without an option, one case of every property runs. --ci adds the tests of each push: more layouts, torchrun, fakes of an NPU,
# and real packages. --all adds the tests for a night: 16 ranks, all pairs of options, and all planted faults for all checks.
# Two processes share the test files; all files that import vLLM run in the same process. With -n 0, one process runs
# everything; pytest's options --pdb and -s need this. The slowest ten tests are printed at the end.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
PYTHON=${PYTHON:-python3}                  # 3.11, 3.12 or 3.13; makes the environment
VENV=${VENV:-.venv}                        # folder of the environment, 2.4 GB
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}    # source of torch without CUDA; a mirror also works
NEW_MEGATRON_DIR=${NEW_MEGATRON_DIR:-.cache/megatron-core-0.19.2} # the newest Megatron, for the parity tests, 21 MB
TRACKERS_DIR=${TRACKERS_DIR:-.cache/trackers} # the packages of train.trackers, 160 MB
SERVE_DIR=${SERVE_DIR:-.cache/serve}          # the packages of a vLLM server, 4 MB
TORCH_NPU_DIR=${TORCH_NPU_DIR-.cache/torch_npu-2.13.0} # torch_npu that fits the torch of cpu.txt; empty: none
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
source launch/setup_cpu.sh
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    print_head
    exit
fi

export NEW_MEGATRON_DIR               # the parity tests import it instead of the installed version
export TRACKERS_DIR                   # the trackers of tests/rooms/runlog/test_trackers.py have it on their path
export SERVE_DIR                      # the server of tests/machines/test_programs.py has it on its path
export TORCH_NPU_DIR                  # the npu_schema tests import it, each in a separate process

set_variables
set_up cpu test vllm smol

# Installs with pip into another folder, and renames it when it is complete.
install_aside() {  # $1: folder; the rest: options of pip, and the package
    if [ -d "$1" ]; then return; fi
    local unfinished=$1.$$
    mkdir -p "$unfinished"
    pip_install --target "$unfinished" "${@:2}" || pip_failed "${*: -1} into $1"
    mv "$unfinished" "$1"
}

# Only tests of these tiers import these packages.
if [[ " $* " = *" --ci "* || " $* " = *" --all "* ]]; then
    install_aside "$TRACKERS_DIR" --requirement requirements/trackers.txt
fi

if [[ " $* " = *" --all "* ]]; then
    install_aside "$SERVE_DIR" --requirement requirements/serve.txt

    # The wheel is tagged for Python 3.12, but the tests import only plain Python files of it, which 3.11 runs as well. Megatron
    # imports triton, a download of 198 MB for kernels that no CPU runs; hardware/device.py says what replaces it.
    install_aside "$NEW_MEGATRON_DIR" --ignore-requires-python --python-version 3.12 --only-binary=:all: megatron-core==0.19.2

    # Only these machines have wheels of torch_npu (44 MB to download, 126 MB on disk). On others, the tests are skipped.
    case "$(uname -s) $(uname -m)" in
        "Linux x86_64" | "Linux aarch64")
            if [ -n "$TORCH_NPU_DIR" ]; then install_aside "$TORCH_NPU_DIR" --only-binary=:all: torch-npu==2.13.0; fi ;;
    esac
fi

exec "$VENV/bin/python" -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder --durations=10 "$@"
