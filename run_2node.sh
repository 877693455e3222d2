#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on two machines of 8 or 16 dies each (docs/npu.md). Start it on both, with the same settings:
#
#   RENDEZVOUS=<first machine>:29400 bash run_2node.sh [--plan-only | --groups] [section.key=value ...]
#
# INTERFACE and ADDRESS are each machine's own. --groups proves and times every process group over both machines; do it
# first. The two torchruns connect at RENDEZVOUS; if one machine is lost, the run on the other one ends within seconds. To try it on
# one machine without any device, in two terminals:
#
#   DEVICE=cpu bash run_2node.sh name=two train.steps=5
#
# With RESTARTS=1 on both machines torchrun resumes after a lost process. --help says more. Two CPU processes are tested
# (tests/test_two_nodes.py); no NPUs yet.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
DEVICE=${DEVICE:-npu}                              # or cpu: two processes of the tiny model
RENDEZVOUS=${RENDEZVOUS:-}                         # host:port of the first machine, the same on both; the port must be free
RANKS_PER_NODE=${RANKS_PER_NODE:-16}               # or 8
INTERFACE=${INTERFACE:-}                           # this machine's network interface to the other one, e.g. eth0; "": chosen by the libraries
ADDRESS=${ADDRESS:-}                               # this machine's address there, e.g. 192.0.2.1; "": that of INTERFACE, or chosen
MODEL=${MODEL-models/Qwen3-30B-A3B-Instruct-2507}  # folder of the Hugging Face model, as downloaded; on both machines
TRAIN=${TRAIN-data/gsm8k/train.jsonl}              # GSM8K: .jsonl or .parquet; on both machines
TEST=${TEST-data/gsm8k/test.jsonl}                 # its held-out questions
OUT=${OUT-out}                                     # runs, checkpoints, logs; both machines must share this folder to resume
LAYOUT=${LAYOUT:-tp4_ep$((2 * RANKS_PER_NODE))}    # tp4_ep32 on 2 x 16: experts over all dies take the least memory, are pushed locally; or tp4_ep16, tp4_ep8
SAMPLERS=${SAMPLERS:-0}                            # the last so many ranks only sample, one step ahead (run_2node_apart.sh); 0: all do both
PYTHON=${PYTHON:-python3}                          # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
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
    [ "$SAMPLERS" = 0 ] || SAMPLERS=1
    CONFIG=configs/tiny_cpu.yaml RANKS_PER_NODE=1 LAYOUT=tp1_ep$((2 - SAMPLERS)) MODEL="" TRAIN="" EXTRA=(device=cpu)
    [ "$SAMPLERS" = 0 ] || EXTRA+=(loss.importance=token)
    export OMP_NUM_THREADS=1                 # the processes share the cores
elif [ -z "$RENDEZVOUS" ]; then
    echo "error: RENDEZVOUS: not given; needed: host:port of the first machine, the same on both, e.g. node1:29400" >&2
    exit 2
fi
source launch/launch.sh
launch "$@"
