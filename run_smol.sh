#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct, written as a mixture of experts, with GRPO and LoRA on the CPU of this machine, and prints the
# accuracy before and after.
#
#   bash run_smol.sh [--vllm] [section.key=value ...]       e.g.  bash run_smol.sh name=smol1 train.seed=1
#   GSM8K=test.jsonl bash run_smol.sh [...]                 also measures the model before and after on a .jsonl or .parquet file of questions

CONFIG=${CONFIG:-configs/smol.yaml} LISTS=(cpu smol) SMOL=${MODEL:-models/smollm2_moe}
source "$(dirname "$0")/launch/cpu.sh"
