#!/usr/bin/env bash
# Trains Qwen3-30B-A3B with GRPO and LoRA on 2 dies (one 910C card). The trainer holds the experts in int4, and vLLM holds the same
# values in bf16. This leaves room for a small key-value cache only, so a step takes long. --help says more; not run on an NPU yet.

CONFIG=${CONFIG:-configs/qwen3.yaml} DEVICE=npu RANKS_PER_NODE=2
LAYOUT=${LAYOUT:-tp2_ep2}   # the only layout: vLLM has the same one
EXTRA=(rollout.tensor=2 rollout.expert_parallel=true model.quantisation=int4 lora.expert_rank=16 rollout.kv_cache_mib=4096)
source "$(dirname "$0")/launch/launch.sh"
