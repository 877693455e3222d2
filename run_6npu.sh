#!/usr/bin/env bash
# Trains Qwen1.5-MoE-A2.7B with GRPO, LoRA and AQN noise on 6 dies of an Ascend server. --help says more; not run on an NPU yet.
# EP can be 2, 3 or 6, which divide its 60 experts. Only TP 2 divides both its 16 heads and 6 ranks; vLLM also splits the heads in 2.

CONFIG=${CONFIG:-configs/qwen15_moe.yaml} DEVICE=npu RANKS_PER_NODE=6
LAYOUT=${LAYOUT:-tp2_ep3}   # or use tp2_ep2, tp2_ep6, tp1_ep3
EXTRA=(rollout.tensor=2 model.recompute=true)   # six dies cannot hold the activations of all layers
source "$(dirname "$0")/launch/launch.sh"
