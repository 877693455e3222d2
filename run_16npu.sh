#!/usr/bin/env bash
# Trains Qwen3-30B-A3B with GRPO and LoRA on the 16 dies of one Ascend 910C server. --help says more; not run on an NPU yet.

CONFIG=${CONFIG:-configs/qwen3.yaml} DEVICE=npu RANKS_PER_NODE=16
LAYOUT=${LAYOUT:-tp4_ep16}   # one rank holds each expert; with tp4_ep4 four ranks, with tp2_ep8 two
EXTRA=()
source "$(dirname "$0")/launch/launch.sh"
