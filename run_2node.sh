#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on two machines of 8 or 16 dies each (docs/npu.md). Start it on both, with the same settings:
#
#   RENDEZVOUS=<first machine>:29400 bash run_2node.sh [--plan-only | --groups] [section.key=value ...]
#   SAMPLERS=16 RENDEZVOUS=<first machine>:29400 bash run_2node.sh      the second machine only samples, one step ahead
#   DEVICE=cpu bash run_2node.sh name=two train.steps=5                 on one machine without any device, in two terminals
#
# Do --groups first: it proves and times every process group over both machines. If one machine is lost, the run on the other
# one ends within seconds; with RESTARTS=1 on both machines torchrun resumes after a lost process. Both machines need the model
# and the data, and must share the folder OUT to resume. `preflight.py CONFIG --ranks 32 --fastest` says whether SAMPLERS saves
# time (docs/policy.md). Two CPU processes are tested (tests/runs/test_launch.py); no NPUs yet.

set -euo pipefail

# --- yours to change, beside what launch/launch.sh has ----------------------------------------------------------------
DEVICE=${DEVICE:-npu}                   # or cpu: two processes of the tiny model
RENDEZVOUS=${RENDEZVOUS:-}              # host:port of the first machine, the same on both; the port must be free
INTERFACE=${INTERFACE:-}                # this machine's network interface to the other one, e.g. eth0; "": chosen by the libraries
ADDRESS=${ADDRESS:-}                    # this machine's address there, e.g. 192.0.2.1; "": that of INTERFACE, or chosen
RANKS_PER_NODE=${RANKS_PER_NODE:-16}    # or 8
SAMPLERS=${SAMPLERS:-0}                 # the last so many ranks only sample; 0: all do both. With 16: tp4_ep16, tp2_ep16, tp4_ep8
# The default spreads the experts over all dies that train, which takes the least memory; without SAMPLERS a push is local.
LAYOUT=${LAYOUT:-tp4_ep$((2 * RANKS_PER_NODE - SAMPLERS))}    # tp4_ep32 on 2 x 16; or tp4_ep16, tp4_ep8
# ---------------------------------------------------------------------------------------------------------------------

CONFIG=configs/qwen3.yaml NODES=2 EXTRA=()
if [ -n "$INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME="$INTERFACE"   # otherwise gloo chooses the interface of the host's name
    export HCCL_SOCKET_IFNAME="=$INTERFACE"  # the whole name, otherwise a beginning; without it HCCL chooses one
fi
if [ -n "$ADDRESS" ]; then
    export HCCL_IF_IP="$ADDRESS"             # HCCL takes it before the interface
fi
if [ "$DEVICE" = cpu ]; then
    RENDEZVOUS=${RENDEZVOUS:-localhost:29400}
    CONFIG=configs/tiny_cpu.yaml RANKS_PER_NODE=1 LAYOUT=tp1_ep2 EXTRA=(device=cpu)
    if [ "$SAMPLERS" != 0 ]; then
        SAMPLERS=1 LAYOUT=tp1_ep1 EXTRA+=(loss.importance=token)
    fi
    export OMP_NUM_THREADS=1                 # the processes share the cores
fi
source "$(dirname "$0")/launch/launch.sh"
