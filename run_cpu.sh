#!/usr/bin/env bash
# Trains a tiny mixture-of-experts model with GRPO and LoRA on the CPU of this machine, and prints the accuracy before and after.
#
#   bash run_cpu.sh [--vllm] [section.key=value ...]       e.g.  NPROC=1 bash run_cpu.sh train.seed=2 rollout.group_size=16

CONFIG=${CONFIG:-configs/tiny_cpu.yaml} LISTS=(cpu) SMOL=""
source "$(dirname "$0")/launch/cpu.sh"
