#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on 8 GPUs of 80 GB. --help says more; not run on a GPU yet.

CONFIG=configs/qwen3.yaml DEVICE=cuda RANKS_PER_NODE=8
LAYOUT=${LAYOUT:-tp4_ep8}   # by the plan the fastest with room; or tp1_ep8, tp2_ep8, tp4_ep4
EXTRA=(device=cuda rollout.expert_parallel=false rollout.enforce_eager=false)   # with graphs, as vLLM samples by default
source "$(dirname "$0")/launch/launch.sh"
