#!/usr/bin/env bash
# GRPO with LoRA on SmolLM2-135M-Instruct as a mixture of experts, on the CPU of this machine. The script makes the environment
# and the model if they are absent, trains, and prints the accuracy before and after.
#
#   bash run_smol.sh [section.key=value ...]                 e.g.  bash run_smol.sh name=smol1 train.seed=1
#   GSM8K=test.jsonl bash run_smol.sh [section.key=value ...]      also measures both models on the first questions of that file
#
# Every key is documented in knobs.py and set in configs/smol.yaml. Exit codes: docs/checks.md.
# The settings below can be given in the environment too:  NPROC=1 bash run_smol.sh

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
PYTHON=${PYTHON:-python3}                  # 3.11, 3.12 or 3.13; makes the environment
NPROC=${NPROC:-2}                          # processes; one core each is best
MODEL=${MODEL:-models/smollm2_moe}         # the model's folder, 0.9 GB; relative to the repository's folder
VENV=${VENV:-.venv}                        # the environment's folder, 1.4 GB
GSM8K=${GSM8K:-}                           # a .jsonl or .parquet file of GSM8K; empty: only the questions of the training's kind
GSM8K_QUESTIONS=${GSM8K_QUESTIONS:-64}     # the first ones of the file, with greedy answers of at most 128 tokens
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}    # where torch without CUDA comes from, or a mirror
# ---------------------------------------------------------------------------------------------------------------------

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit
fi
case $GSM8K in "" | /*) ;; *) GSM8K=$PWD/$GSM8K ;; esac   # the folder changes in the next line
cd "$(dirname "$0")"

source launch/setup_cpu.sh
set_variables
set_up cpu smol

# launch/first_code.py is torchrun that ends without a traceback. exec, where it stands before this: signals reach it, and it
# ends its processes. --local-addr: otherwise it hangs if the host name cannot be resolved.
on_ranks=("$VENV/bin/python" launch/first_code.py --standalone --local-addr=localhost --nproc_per_node="$NPROC")

measure() {  # $1: folder of a model
    "${on_ranks[@]}" evaluate.py configs/smol.yaml model.path="$1" data.source=gsm8k data.train_path="$GSM8K" \
        data.test_path="$GSM8K" data.max_prompt_tokens=896 rollout.max_new_tokens=128 \
        eval.num_questions="$GSM8K_QUESTIONS" eval.samples=0 | tail -n 1   # after the notes
}

"$VENV/bin/python" weights/smol_model.py "$MODEL"
set -- model.path="$MODEL" "$@"
"$VENV/bin/python" train_grpo.py configs/smol.yaml "$@" --check --ranks "$NPROC" >/dev/null   # bad input ends here, before torchrun starts
if [ -z "$GSM8K" ]; then
    exec "${on_ranks[@]}" train_grpo.py configs/smol.yaml "$@"
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
before=$(measure "$MODEL")
"${on_ranks[@]}" train_grpo.py configs/smol.yaml "$@" | tee "$scratch/log"
run=$(sed -n 's/^run folder: //p' "$scratch/log" | head -n 1)
"$VENV/bin/python" export.py "$run" --merged "$scratch/model"
printf 'before: %s\nafter:  %s\n' "$before" "$(measure "$scratch/model")"
