#!/usr/bin/env bash
# GRPO with LoRA on a tiny Mixture-of-Experts model, on the CPU of this machine. Prints the accuracy before and after.
#
#   bash run_cpu.sh [--vllm] [section.key=value ...]       e.g.  NPROC=1 bash run_cpu.sh train.seed=2 rollout.group_size=16

CONFIG=${CONFIG:-configs/tiny_cpu.yaml} LISTS=(cpu) SMOL=""
source "$(dirname "$0")/launch/cpu.sh"
