#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B, GRPO with LoRA and AQN noise, on 8 dies of an Ascend server. EP 8 does not
# divide its 60 experts; EP 1, 2 and 4 do.
#
#   bash run_8npu_qwen15.sh [--plan-only] [section.key=value ...]     --help says more; not run on an NPU yet

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
MODEL=${MODEL-models/Qwen1.5-MoE-A2.7B-Chat}  # folder of the Hugging Face model, as downloaded
TRAIN=${TRAIN-data/gsm8k/train.jsonl}         # GSM8K: .jsonl or .parquet
TEST=${TEST-data/gsm8k/test.jsonl}            # its held-out questions
OUT=${OUT-out}                                # runs, checkpoints, logs
LAYOUT=${LAYOUT:-tp4_ep4}                     # or tp4_ep2, tp2_ep2, tp2_ep4
PYTHON=${PYTHON:-python3}                     # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
CONFIG=configs/qwen15_moe.yaml DEVICE=npu NODES=1 RANKS_PER_NODE=8 EXTRA=()
source launch/launch.sh
launch "$@"
