#!/usr/bin/env bash
# Trains Qwen3-30B-A3B with GRPO and LoRA on 12 dies of an Ascend 910C server. --help says more; not run on an NPU yet.
# TP and EP can be 1, 2 or 4, because 3 and 12 divide neither the 32 attention heads nor the 128 experts, and 8 does not divide 12.

CONFIG=${CONFIG:-configs/qwen3.yaml} DEVICE=npu RANKS_PER_NODE=12
LAYOUT=${LAYOUT:-tp4_ep4}   # three ranks hold each expert; or use tp1_ep4, tp2_ep4
EXTRA=()
source "$(dirname "$0")/launch/launch.sh"
