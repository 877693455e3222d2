# Makes the environment and the model if they are absent, and trains on the CPU of this machine. run_cpu.sh and run_smol.sh only
# contain settings. Each sets
#   CONFIG                             the configuration file, relative to the repository's folder
#   LISTS                              the lists that set_up of launch/setup_cpu.sh installs
#   SMOL                               the folder of SmolLM2 as a mixture of experts; empty: the model of the configuration
# and then sources this file, which goes to the root of the checkout and starts the run.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
PYTHON=${PYTHON:-python3}                  # 3.11, 3.12 or 3.13; makes the environment
NPROC=${NPROC:-2}                          # number of processes; one core for each is best
RESTARTS=${RESTARTS:-0}                    # how often torchrun starts lost processes again; they resume from the last checkpoint
VENV=${VENV:-.venv}                        # folder of the environment, 1.3 GB; 1.9 GB with vLLM
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}    # source of torch without CUDA; a mirror also works
GSM8K_QUESTIONS=${GSM8K_QUESTIONS:-64}     # for run_smol.sh with GSM8K: how many of the file's first questions
# ---------------------------------------------------------------------------------------------------------------------

case ${GSM8K:-} in "" | /*) ;; *) GSM8K=$PWD/$GSM8K ;; esac   # the folder changes in the next line
cd "$(dirname "$0")"
source launch/setup_cpu.sh

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    print_head
    cat <<'END'

--vllm, as the first argument, samples with vLLM, and installs it first. knobs.py documents every key, and the configuration
sets the values. To resume from the last checkpoint, start the same command again. docs/checks.md explains the exit codes.

You can set these environment variables: CONFIG (a configuration file), NPROC (the number of processes), and others that the
head of launch/cpu.sh lists.
END
    exit
fi

set_variables
if [ "${1:-}" = --vllm ]; then
    shift
    if [ "$CONFIG" = configs/tiny_cpu.yaml ]; then   # vLLM's attention on a CPU needs heads larger than 16
        set -- model.path=models/tiny_qwen3_moe_heads32 tiny_model.head_dim=32 "$@"
    fi
    set -- rollout.engine=vllm "$@"
    LISTS+=(vllm)
fi
set_up "${LISTS[@]}"
if [ -n "$SMOL" ]; then
    "$VENV/bin/python" weights/smol_model.py "$SMOL"
    set -- model.path="$SMOL" "$@"
fi

# launch/first_code.py is torchrun that ends without a traceback. Without --local-addr, it hangs on a laptop whose host name cannot
# be resolved.
on_ranks=("$VENV/bin/python" launch/first_code.py --standalone --local-addr=localhost --nproc_per_node="$NPROC")
training=("${on_ranks[@]}" --max-restarts="$RESTARTS" train_grpo.py "$CONFIG" "$@")
if [ "$RESTARTS" != 0 ]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # otherwise a restarted process reads the addresses of ended ones
fi

measure() {  # measures the greedy answers, of at most 128 tokens, of the model in folder $1
    "${on_ranks[@]}" evaluate.py "$CONFIG" model.path="$1" data.source=gsm8k data.train_path="$GSM8K" \
        data.test_path="$GSM8K" data.max_prompt_tokens=896 rollout.max_new_tokens=128 \
        eval.num_questions="$GSM8K_QUESTIONS" eval.samples=0 | tail -n 1   # leaves the notes out
}

"$VENV/bin/python" train_grpo.py "$CONFIG" "$@" --check --ranks "$NPROC" >/dev/null   # bad input ends here, before torchrun starts
if [ -z "$SMOL" ] || [ -z "${GSM8K:-}" ]; then
    exec "${training[@]}"   # exec: signals reach torchrun, which ends its processes
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
before=$(measure "$SMOL")
"${training[@]}" | tee "$scratch/log"
run=$(sed -n 's/^run folder: //p' "$scratch/log" | head -n 1)
"$VENV/bin/python" export.py "$run" --merged "$scratch/model"
printf 'before: %s\nafter:  %s\n' "$before" "$(measure "$scratch/model")"
