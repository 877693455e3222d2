#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on 8 GPUs of 80 GB.
#
#   bash run_8gpu.sh [--plan-only] [section.key=value ...]     --help says more; not run on a GPU yet

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
MODEL=${MODEL-models/Qwen3-30B-A3B-Instruct-2507}  # folder of the Hugging Face model, as downloaded
TRAIN=${TRAIN-data/gsm8k/train.jsonl}              # GSM8K: .jsonl or .parquet
TEST=${TEST-data/gsm8k/test.jsonl}                 # its held-out questions
OUT=${OUT-out}                                     # runs, checkpoints, logs
LAYOUT=${LAYOUT:-tp4_ep8}                          # by the plan the fastest with room; or tp1_ep8, tp2_ep8, tp4_ep4
PYTHON=${PYTHON:-python3}                          # with requirements/cuda.txt
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
CONFIG=configs/qwen3.yaml DEVICE=cuda NODES=1 RANKS_PER_NODE=8 EXTRA=("device=cuda" "rollout.expert_parallel=false")
source launch/launch.sh
launch "$@"
