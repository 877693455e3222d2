#!/usr/bin/env bash
# Trains as run_16npu.sh does, with routing replay (R3) and noise on the sampler's norms (AQN). --help says more; not run on an NPU yet.

CONFIG=configs/qwen3.yaml DEVICE=npu RANKS_PER_NODE=16
LAYOUT=${LAYOUT:-tp4_ep16}   # one rank holds each expert; with tp4_ep4 four ranks, with tp2_ep8 two
EXTRA=(name=qwen3_30b_a3b_r3_aqn replay.mode=r3 aqn.schedule=qerl)
source "$(dirname "$0")/launch/launch.sh"
