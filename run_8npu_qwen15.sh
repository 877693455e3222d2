#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B, GRPO with LoRA and AQN noise, on 8 dies of an Ascend server. --help says more; not run on an NPU yet.
# EP 8 does not divide its 60 experts; EP 1, 2 and 4 do.

CONFIG=configs/qwen15_moe.yaml DEVICE=npu RANKS_PER_NODE=8
LAYOUT=${LAYOUT:-tp4_ep4}   # or tp4_ep2, tp2_ep2, tp2_ep4
EXTRA=()
source "$(dirname "$0")/launch/launch.sh"
