#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on two machines of 8 or 16 dies each (docs/npu.md). Start it on both, with the same settings:
#
#   RENDEZVOUS=<first machine>:29400 bash run_2node.sh [--plan-only | --groups] [section.key=value ...]
#   DEVICE=cpu bash run_2node.sh name=two train.steps=5                 on one machine without any device, in two terminals
#
# Do --groups first: it proves and times every process group over both machines. If one machine is lost, the run on the other
# one ends within seconds; with RESTARTS=1 on both machines torchrun resumes after a lost process. Both machines need the model
# and the data, and must share the folder OUT to resume. Two CPU processes are tested (tests/runs/test_launch.py); no NPUs yet.

CONFIG=configs/qwen3.yaml DEVICE=${DEVICE:-npu} RANKS_PER_NODE=${RANKS_PER_NODE:-16} NODES=2
LAYOUT=${LAYOUT:-tp4_ep$((2 * RANKS_PER_NODE))}    # tp4_ep32 takes the least memory; or tp4_ep16, tp4_ep8
EXTRA=()
if [ "$DEVICE" = cpu ]; then   # two processes of the tiny model
    CONFIG=configs/tiny_cpu.yaml RANKS_PER_NODE=1 LAYOUT=tp1_ep2 EXTRA=(device=cpu) RENDEZVOUS=${RENDEZVOUS:-localhost:29400}
fi
source "$(dirname "$0")/launch/launch.sh"
