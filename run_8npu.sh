#!/usr/bin/env bash
# Trains Qwen3-30B-A3B with GRPO and LoRA on 8 dies of an Ascend server. --help says more; not run on an NPU yet.

CONFIG=${CONFIG:-configs/qwen3.yaml} DEVICE=npu RANKS_PER_NODE=8
LAYOUT=${LAYOUT:-tp4_ep8}   # one rank holds each expert; or use tp4_ep4, tp2_ep8
EXTRA=()
source "$(dirname "$0")/launch/launch.sh"
