# The environment of a run on NVIDIA GPUs, each variable with its reason. Sourced by run_8gpu.sh; a value that is set already
# stays. Not run on a GPU yet. The table is in environment.py, as for npu_env.sh.

export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"   # Megatron asks for it with tensor parallelism
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"   # a rank that fails ends the others
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"                # reading and casting weights; 8 ranks share the cores
unset VLLM_DP_SIZE VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT   # would override vLLM's arguments
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"   # the tokenizer's threads do not survive a fork
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"                  # models are local folders: a wrong path is an error, no download
ulimit -n 65536 2>/dev/null || true                           # the doctor says when it stays too low
