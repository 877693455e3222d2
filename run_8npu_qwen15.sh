#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B, GRPO with LoRA and AQN noise, on 8 dies of an Ascend server. EP 8 does not
# divide its 60 experts; EP 1, 2 and 4 do.
#
#   bash run_8npu_qwen15.sh [--plan-only] [section.key=value ...]     --plan-only: print exports and commands, start nothing
#
# The doctor checks the machine first, and preflight.py the layout. The output of each rank is in $OUT/logs. The same command,
# started again, resumes from the last checkpoint. Exit code: 1 refused or failed, 2 unusable input. Not run on an NPU yet.

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
CONFIG=configs/qwen15_moe.yaml NODES=1 RANKS_PER_NODE=8 RENDEZVOUS="" EXTRA=() ENVIRONMENT=(npu_env.sh)
source ./npu_env.sh
source ./launch.sh
launch "$@"
