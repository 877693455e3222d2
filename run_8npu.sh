#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on 8 dies of an Ascend server.
#
#   bash run_8npu.sh [--plan-only] [section.key=value ...]     --help says more; not run on an NPU yet

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
MODEL=${MODEL-models/Qwen3-30B-A3B-Instruct-2507}  # folder of the Hugging Face model, as downloaded
TRAIN=${TRAIN-data/gsm8k/train.jsonl}              # GSM8K: .jsonl or .parquet
TEST=${TEST-data/gsm8k/test.jsonl}                 # its held-out questions
OUT=${OUT-out}                                     # runs, checkpoints, logs
LAYOUT=${LAYOUT:-tp4_ep8}                          # one rank holds each expert; or tp4_ep4, tp2_ep8
PYTHON=${PYTHON:-python3}                          # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
CONFIG=configs/qwen3.yaml DEVICE=npu NODES=1 RANKS_PER_NODE=8 EXTRA=("model.recompute=true")
source launch/launch.sh
launch "$@"
