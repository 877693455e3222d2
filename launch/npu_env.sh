# Sets the environment variables of a run on Ascend NPUs, and keeps existing values. The run_*npu*.sh scripts source this file.
# It has not been run on an NPU yet. The exports and their reasons come from the table in facts/variables.py, which also names
# their sources; tests/rules/test_scripts.py compares the two.

nounset=$(shopt -po nounset || true)
set +u   # CANN's own scripts read variables that are not set
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    for folder in /usr/local/Ascend/cann /usr/local/Ascend/ascend-toolkit; do   # the first from CANN 8.5 on, the second before
        # shellcheck disable=SC1091
        if [ -f "$folder/set_env.sh" ]; then source "$folder/set_env.sh"; break; fi
    done
fi
if [ -z "${ATB_HOME_PATH:-}" ] && [ -f /usr/local/Ascend/nnal/atb/set_env.sh ]; then   # a shell can have CANN without ATB
    # shellcheck disable=SC1091
    source /usr/local/Ascend/nnal/atb/set_env.sh
fi
eval "$nounset"   # a shell of the user's stays as it was

# The time that ranks wait for each other. This order must hold: train.stall_seconds < these < parallel.timeout_seconds.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"   # seconds; reading 60 GB takes longer than the default of 120
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"         # seconds of one collective; its error names the missing rank

# The ports and the memory of HCCL. Two jobs on one machine need different port ranges.
export HCCL_HOST_SOCKET_PORT_RANGE="${HCCL_HOST_SOCKET_PORT_RANGE:-60000-60050}"  # the default has 32 ports, too few for 16 ranks
export HCCL_NPU_SOCKET_PORT_RANGE="${HCCL_NPU_SOCKET_PORT_RANGE:-61000-61050}"  # each die needs ports for the trainer and for vLLM
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-200}"                  # MB, two buffers a communicator; also the window of vLLM's MC2

# The way in which kernels are launched.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"            # 2 is faster, but cannot go with graph capture (enforce_eager: false)
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"            # each rank launches its kernels from cores near its die
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"  # Megatron requires 1 with tensor parallelism
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"                # threads that read and cast weights; 16 ranks share the cores

# For vLLM: vllm-ascend 0.23 turns expandable segments on if neither name of the allocator's variable is set. torch_npu does not
# start if both names are set.
if [ -z "${PYTORCH_ALLOC_CONF:-}" ]; then
    export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:False}"  # vLLM's memory pools exclude expandable segments
fi
export VLLM_ASCEND_ENABLE_NZ="${VLLM_ASCEND_ENABLE_NZ:-0}"    # 1 tiles the weights, but a push writes plain ones
unset VLLM_DP_SIZE VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT   # they would override vLLM's arguments

export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"  # the tokenizer's threads do not survive a fork
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"                  # models are local folders; a wrong path must not start a download

for library in /usr/lib/*-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2; do
    if [ -f "$library" ] && [ -z "${LD_PRELOAD:-}" ]; then
        export LD_PRELOAD="$library"      # jemalloc returns host memory to the system sooner than glibc's allocator
    fi
done

ulimit -n 65536 2>/dev/null || true       # 16 ranks open many sockets; the doctor reports a limit that stays too low
