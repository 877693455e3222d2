#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on 2 dies: one 910C card. The trainer holds the experts in int4; vLLM has what the codes
# stand for, in bf16. Weights and engine leave room for a small key-value cache, so a step takes long.
#
#   bash run_2npu.sh [--plan-only] [section.key=value ...]     --help says more; not run on an NPU yet

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
MODEL=${MODEL-models/Qwen3-30B-A3B-Instruct-2507}  # folder of the Hugging Face model, as downloaded
TRAIN=${TRAIN-data/gsm8k/train.jsonl}              # GSM8K: .jsonl or .parquet
TEST=${TEST-data/gsm8k/test.jsonl}                 # its held-out questions
OUT=${OUT-out}                                     # runs, checkpoints, logs
LAYOUT=${LAYOUT:-tp2_ep2}                          # the only one: vLLM has the same
PYTHON=${PYTHON:-python3}                          # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
CONFIG=configs/qwen3.yaml DEVICE=npu NODES=1 RANKS_PER_NODE=2
EXTRA=(rollout.tensor=2 rollout.expert_parallel=true model.quantisation=int4 lora.expert_rank=16 rollout.kv_cache_mib=4096)
source launch/launch.sh
launch "$@"
