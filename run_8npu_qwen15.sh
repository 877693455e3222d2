#!/usr/bin/env bash
# Trains Qwen1.5-MoE-A2.7B with GRPO, LoRA and AQN noise on 8 dies of an Ascend server. --help says more; not run on an NPU yet.
# EP is 4: 8 does not divide its 60 experts, and with 1 or 2 a die would hold too many of them (model.recompute=true allows 2).

CONFIG=${CONFIG:-configs/qwen15_moe.yaml} DEVICE=npu RANKS_PER_NODE=8
LAYOUT=${LAYOUT:-tp4_ep4}   # or use tp2_ep4
EXTRA=()
source "$(dirname "$0")/launch/launch.sh"
