#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B, GRPO with LoRA and AQN noise, on 6 dies of an Ascend server. EP 2, 3 and 6
# divide its 60 experts, but only TP 2 divides both its 16 heads and 6 ranks; vLLM splits the heads in 2 as well.
#
#   bash run_6npu.sh [--plan-only] [section.key=value ...]     --help says more; not run on an NPU yet

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
MODEL=${MODEL-models/Qwen1.5-MoE-A2.7B-Chat}  # folder of the Hugging Face model, as downloaded
TRAIN=${TRAIN-data/gsm8k/train.jsonl}         # GSM8K: .jsonl or .parquet
TEST=${TEST-data/gsm8k/test.jsonl}            # its held-out questions
OUT=${OUT-out}                                # runs, checkpoints, logs
LAYOUT=${LAYOUT:-tp2_ep3}                     # or tp2_ep2, tp2_ep6, tp1_ep3
PYTHON=${PYTHON:-python3}                     # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
CONFIG=configs/qwen15_moe.yaml DEVICE=npu NODES=1 RANKS_PER_NODE=6 EXTRA=(rollout.tensor=2)
source launch/launch.sh
launch "$@"
