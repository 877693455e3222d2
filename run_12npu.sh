#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on 12 dies of an Ascend 910C server.
#
# 12 ranks allow few layouts: 3 and 12 divide neither the 32 attention heads nor the 128 experts, and 8 does not divide 12.
# TP 1, 2 or 4 and EP 1, 2 or 4 are possible; with EP 4 three ranks hold each expert. docs/npu.md says why a server with 16
# dies may show only 12.
#
#   bash run_12npu.sh [--plan-only] [section.key=value ...]     --help says more; not run on an NPU yet

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
MODEL=${MODEL-models/Qwen3-30B-A3B-Instruct-2507}  # folder of the Hugging Face model, as downloaded
TRAIN=${TRAIN-data/gsm8k/train.jsonl}              # GSM8K: .jsonl or .parquet
TEST=${TEST-data/gsm8k/test.jsonl}                 # its held-out questions
OUT=${OUT-out}                                     # runs, checkpoints, logs
LAYOUT=${LAYOUT:-tp4_ep4}                          # or tp1_ep4, tp2_ep4
PYTHON=${PYTHON:-python3}                          # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
CONFIG=configs/qwen3.yaml DEVICE=npu NODES=1 RANKS_PER_NODE=12 EXTRA=()
source launch/launch.sh
launch "$@"
