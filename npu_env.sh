# The environment of a run on Ascend NPUs, each variable with its reason. Sourced by the run_*npu*.sh scripts; a value that
# is set already stays. Not run on an NPU yet. The exports and reasons are those of the table in environment.py, which also
# names the source of each; tests/test_environment.py compares the two.

if [ -z "${ASCEND_HOME_PATH:-}" ]; then   # CANN's own scripts read variables that are not set
    set +u
    for folder in /usr/local/Ascend/cann /usr/local/Ascend/ascend-toolkit; do   # from CANN 8.5 on, and before
        # shellcheck disable=SC1091
        if [ -f "$folder/set_env.sh" ]; then source "$folder/set_env.sh"; break; fi
    done
    # shellcheck disable=SC1091
    if [ -f /usr/local/Ascend/nnal/atb/set_env.sh ]; then source /usr/local/Ascend/nnal/atb/set_env.sh; fi
    set -u
fi

# How long ranks wait for each other. The order: train.stall_seconds < these < parallel.timeout_seconds.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"   # seconds; the default of 120 passes while 60 GB are read
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"         # seconds in one collective; its message names the peer

# What HCCL opens and takes. Two jobs on one machine need ranges of their own.
export HCCL_HOST_SOCKET_PORT_RANGE="${HCCL_HOST_SOCKET_PORT_RANGE:-60000-60050}"   # the default has 32, too few for 16 ranks
export HCCL_NPU_SOCKET_PORT_RANGE="${HCCL_NPU_SOCKET_PORT_RANGE:-61000-61050}"     # trainer and vLLM share each die
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-200}"                  # MB, twice a communicator; vLLM's MC2 takes its window from it

# Launching kernels.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"            # 2 is faster, but excludes graph capture (enforce_eager: false)
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"            # each rank launches from cores near its die
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"   # Megatron asks for it with tensor parallelism
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"                # reading and casting weights; 16 ranks share the cores

# vLLM. vllm-ascend 0.23 turns expandable segments on by itself where nothing is said. torch_npu refuses to start with both
# names of the allocator's variable.
if [ -z "${PYTORCH_ALLOC_CONF:-}" ]; then
    export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:False}"   # vLLM's memory pools exclude expandable segments
fi
export VLLM_ASCEND_ENABLE_NZ="${VLLM_ASCEND_ENABLE_NZ:-0}"    # weights are pushed in the plain layout
unset VLLM_DP_SIZE VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT   # would override vLLM's arguments

export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"   # the tokenizer's threads do not survive a fork
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"                  # models are local folders: a wrong path is an error, no download

for library in /usr/lib/*-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2; do
    if [ -f "$library" ] && [ -z "${LD_PRELOAD:-}" ]; then
        export LD_PRELOAD="$library"      # gives host memory back to the system, which glibc's allocator does late
    fi
done

ulimit -n 65536 2>/dev/null || true       # sockets of 16 ranks; the doctor says when it stays too low
