#!/usr/bin/env bash
# Trains Qwen3-30B-A3B with GRPO and LoRA on two machines of 8 or 16 dies each (docs/npu.md). Start it on both, with the same settings:
#
#   RENDEZVOUS=<first machine>:29400 bash run_2node.sh [--plan-only | --groups] [section.key=value ...]
#   DEVICE=cpu bash run_2node.sh name=two train.steps=5                 on one machine without any device, in two terminals
#
# Start with --groups: it tests and times every process group over both machines. If you lose one machine, the run on the other
# one ends within seconds. With RESTARTS=1 on both machines, torchrun resumes after a lost process. Both machines need the model
# and the data, and they must share the folder OUT to resume. It was tested with two CPU processes (tests/runs/test_launch.py),
# not with NPUs yet.

DEVICE=${DEVICE:-npu} RANKS_PER_NODE=${RANKS_PER_NODE:-16} NODES=2 EXTRA=()
refuse() {
    echo "error: $*" >&2
    exit 2
}
[[ $DEVICE =~ ^(npu|cpu)$ ]] || refuse "DEVICE: found '$DEVICE'; give npu or cpu"
[[ $RANKS_PER_NODE =~ ^[1-9][0-9]{0,2}$ ]] || refuse "RANKS_PER_NODE: found '$RANKS_PER_NODE'; give the number of dies of each machine, e.g. 8"
if [ "$DEVICE" = cpu ]; then   # two processes of the tiny model
    CONFIG=${CONFIG:-configs/tiny_cpu.yaml} RANKS_PER_NODE=1 LAYOUT=tp1_ep2 EXTRA=(device=cpu) RENDEZVOUS=${RENDEZVOUS:-localhost:29400}
fi
CONFIG=${CONFIG:-configs/qwen3.yaml}
LAYOUT=${LAYOUT:-tp4_ep$((2 * RANKS_PER_NODE))}    # tp4_ep32 needs the least memory; or use tp4_ep16, tp4_ep8
source "$(dirname "$0")/launch/launch.sh"
