#!/usr/bin/env bash
# Trains OLMoE-1B-7B with GRPO and LoRA on one GPU of 80 GB. docs/gpu.md names other models. --help says more; not run on a GPU yet.

CONFIG=${CONFIG:-configs/olmoe.yaml} DEVICE=cuda RANKS_PER_NODE=1
GIB=${GIB:-80}    # memory of the GPU, for the plan
LAYOUT=tp1_ep1    # the only layout of a single GPU
EXTRA=(device=cuda rollout.tensor=1 rollout.expert_parallel=false rollout.enforce_eager=false)   # graphs are vLLM's default
source "$(dirname "$0")/launch/launch.sh"
