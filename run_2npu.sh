#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on 2 dies: one 910C card. The trainer holds the experts in int4, vLLM the same values in bf16.
# The key-value cache that fits beside them is small, so a step takes long. --help says more; not run on an NPU yet.

CONFIG=configs/qwen3.yaml DEVICE=npu RANKS_PER_NODE=2
LAYOUT=${LAYOUT:-tp2_ep2}   # the only one: vLLM has the same
EXTRA=(rollout.tensor=2 rollout.expert_parallel=true model.quantisation=int4 lora.expert_rank=16 rollout.kv_cache_mib=4096)
source "$(dirname "$0")/launch/launch.sh"
