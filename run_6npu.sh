#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B, GRPO with LoRA and AQN noise, on 6 dies of an Ascend server. --help says more; not run on an NPU yet.
# EP 2, 3 and 6 divide its 60 experts, but only TP 2 divides both its 16 heads and 6 ranks; vLLM splits the heads in 2, too.

CONFIG=configs/qwen15_moe.yaml DEVICE=npu RANKS_PER_NODE=6
LAYOUT=${LAYOUT:-tp2_ep3}   # or tp2_ep2, tp2_ep6, tp1_ep3
EXTRA=(rollout.tensor=2 model.recompute=true)   # with the activations of all layers six dies are too full
source "$(dirname "$0")/launch/launch.sh"
