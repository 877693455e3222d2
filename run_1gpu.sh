#!/usr/bin/env bash
# OLMoE-1B-7B, GRPO with LoRA, on one GPU of 80 GB.
#
#   bash run_1gpu.sh [--plan-only] [section.key=value ...]     --help says more; not run on a GPU yet
#
# Qwen1.5-MoE-A2.7B on 80 GB, with a smaller cache; Qwen3-30B-A3B on an H200, whose frozen experts trainer and vLLM then share:
#   CONFIG=configs/qwen15_moe.yaml MODEL=models/Qwen1.5-MoE-A2.7B-Chat bash run_1gpu.sh rollout.kv_cache_mib=9216
#   CONFIG=configs/qwen3.yaml MODEL=models/Qwen3-30B-A3B-Instruct-2507 GIB=139 bash run_1gpu.sh rollout.sync=adapter
#
# Without vLLM, with the embedded sampler. It keeps keys and values of up to 512 rows at their full length, so a step has fewer:
#   bash run_1gpu.sh rollout.engine=torch rollout.prompts_per_step=16 optim.prompts_per_update=4

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
CONFIG=${CONFIG:-configs/olmoe.yaml}
MODEL=${MODEL-models/OLMoE-1B-7B-0924-Instruct}    # folder of the Hugging Face model, as downloaded
TRAIN=${TRAIN-data/gsm8k/train.jsonl}              # GSM8K: .jsonl or .parquet
TEST=${TEST-data/gsm8k/test.jsonl}                 # its held-out questions
OUT=${OUT-out}                                     # runs, checkpoints, logs
GIB=${GIB:-80}                                     # memory of the GPU, for the plan
LAYOUT=tp1_ep1                                     # the only one of a single GPU
PYTHON=${PYTHON:-python3}                          # with requirements/cuda.txt
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
DEVICE=cuda NODES=1 RANKS_PER_NODE=1 EXTRA=("device=cuda" "rollout.tensor=1" "rollout.expert_parallel=false")
source launch/launch.sh
launch "$@"
