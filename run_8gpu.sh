#!/usr/bin/env bash
# Trains Qwen3-30B-A3B with GRPO and LoRA on 8 GPUs of 80 GB. --help says more; not run on a GPU yet.

CONFIG=${CONFIG:-configs/qwen3.yaml} DEVICE=cuda RANKS_PER_NODE=8
LAYOUT=${LAYOUT:-tp4_ep8}   # by the plan, the fastest that leaves room; or use tp1_ep8, tp2_ep8, tp4_ep4
EXTRA=(device=cuda rollout.expert_parallel=false rollout.enforce_eager=false)   # graphs are vLLM's default
source "$(dirname "$0")/launch/launch.sh"
