#!/usr/bin/env bash
# GRPO with LoRA on SmolLM2-135M-Instruct as a mixture of experts, on the CPU of this machine; accuracy before and after.
#
#   bash run_smol.sh [--vllm] [section.key=value ...]       e.g.  bash run_smol.sh name=smol1 train.seed=1
#   GSM8K=test.jsonl bash run_smol.sh [...]                 also measures both models on questions of a .jsonl or .parquet file

CONFIG=${CONFIG:-configs/smol.yaml} LISTS=(cpu smol) SMOL=${MODEL:-models/smollm2_moe}
source "$(dirname "$0")/launch/cpu.sh"
