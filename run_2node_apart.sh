#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO with LoRA, on two machines of 16 dies each: the first one trains, the second one samples, one step ahead
# (rollout.ranks, docs/policy.md). Start it on both, with the settings of run_2node.sh:
#
#   RENDEZVOUS=<first machine>:29400 bash run_2node_apart.sh [--plan-only | --groups] [section.key=value ...]
#
# preflight.py CONFIG --ranks 32 --fastest says whether this takes less time than run_2node.sh, whose dies do both. To try it on one
# machine without any device, in two terminals:
#
#   DEVICE=cpu bash run_2node_apart.sh name=apart train.steps=5
#
# Ranks of a CPU are tested (tests/test_sampling_ranks.py), and this script by hand with DEVICE=cpu; no NPUs yet.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
RANKS_PER_NODE=${RANKS_PER_NODE:-16}            # or 8
SAMPLERS=${SAMPLERS:-$RANKS_PER_NODE}           # the last so many ranks only sample; run_2node.sh has the other settings
LAYOUT=${LAYOUT:-tp4_ep$RANKS_PER_NODE}         # of the trainers: tp4_ep16 on 2 x 16; or tp2_ep16, tp4_ep8
# ---------------------------------------------------------------------------------------------------------------------

source "$(dirname "$0")/run_2node.sh"
