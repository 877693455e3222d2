# Sets the environment variables of a run on NVIDIA GPUs, and keeps existing values. run_8gpu.sh sources this file. The exports and
# their reasons come from the table in facts/variables.py, as for npu_env.sh.

export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"  # Megatron requires 1 with tensor parallelism
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"  # a rank that fails ends the other ranks
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"                # threads that read and cast weights; 8 ranks share the cores
unset VLLM_DP_SIZE VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT   # they would override vLLM's arguments
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"  # the tokenizer's threads do not survive a fork
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"                  # models are local folders; a wrong path must not start a download
ulimit -n 65536 2>/dev/null || true                           # the doctor reports a limit that stays too low
