# Runs the doctor, preflight.py and torchrun. Each run_*.sh for NPUs or GPUs only contains settings. It sets
#   CONFIG DEVICE                      the configuration file; npu, cuda or cpu
#   RANKS_PER_NODE                     the number of processes per machine
#   LAYOUT                             tp4_ep16: 4 ranks split an attention matrix, 16 split the experts of a layer
#   EXTRA                              more section.key=value pairs
#   GIB                                memory of a device for the plan, if it differs from the plan's default
#   NODES                              the number of machines, if there are several
# and then sources this file, which goes to the root of the checkout and starts the run.
# In the environment, DOCTOR=off starts without the doctor, and RESTARTS=1 lets torchrun restart lost processes once (docs/checks.md).

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
MODEL=${MODEL:-}             # folder of the Hugging Face model, as downloaded; "": model.path of the configuration
TRAIN=${TRAIN:-}             # questions, .jsonl or .parquet; "": data.train_path of the configuration
TEST=${TEST:-}               # held-out questions; "": data.test_path of the configuration
OUT=${OUT-out}               # runs, checkpoints, logs; "": train.out_dir of the configuration
PYTHON=${PYTHON:-python3}    # has requirements/npu.txt and MindSpeed (docs/npu.md), or requirements/cuda.txt
RENDEZVOUS=${RENDEZVOUS:-}   # for several machines: host:port of the first one, the same on all; the port must be free
INTERFACE=${INTERFACE:-}     # this machine's network interface to the others, e.g. eth0; "": chosen by the libraries
ADDRESS=${ADDRESS:-}         # this machine's address there, e.g. 192.0.2.1; "": the address of INTERFACE, or chosen
# ---------------------------------------------------------------------------------------------------------------------

cd "$(dirname "$0")"
NODES=${NODES:-1}

if [ "${RESTARTS:-0}" != 0 ]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # otherwise a restarted process reads the addresses of ended ones
fi

if [ "$NODES" != 1 ] && [ -n "$INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME="$INTERFACE"   # otherwise gloo chooses the interface of the host's name
    export HCCL_SOCKET_IFNAME="=$INTERFACE"  # the = stands for the whole name, not its beginning; without a name, HCCL chooses one
fi
if [ "$NODES" != 1 ] && [ -n "$ADDRESS" ]; then
    export HCCL_IF_IP="$ADDRESS"             # HCCL prefers it to the interface
fi

case $DEVICE in   # at the top level, as CANN's scripts expect
    npu) source launch/npu_env.sh ;;
    cuda) source launch/cuda_env.sh ;;
    cpu) export OMP_NUM_THREADS=1 ;;         # the processes share the cores
esac

# Prints the head of the script, and a text for all scripts.
usage() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "./${0##*/}"
    printf '\n  bash %s [--plan-only | --groups] [section.key=value ...]\n' "${0##*/}"
    cat <<'END'

Without an option, the doctor checks the machine, preflight.py checks the layout, and then the training starts.
--plan-only prints the exports, the commands and the plan of preflight.py, and starts nothing.
--groups tests and times every process group instead of training.

The output of each rank is in $OUT/logs. To resume from the last checkpoint, start the same command again. docs/checks.md
explains the exit codes; the exit code is also 1 if the doctor refuses this machine, or the plan refuses the layout.

You can set these environment variables: LAYOUT (the line LAYOUT= of the script names the layouts that fit); CONFIG (another
configuration; run_16npu_r3_aqn.sh has only its own); MODEL, TRAIN and TEST (paths; by default those of the configuration); OUT
(folder of runs and logs); PYTHON; and others that the head of launch/launch.sh lists.
END
    exit
}

# Prints, as commands, the variables that npu_env.sh or cuda_env.sh, the script and this file have set and unset.
print_environment() {
    local name files=("./${0##*/}" launch/launch.sh)
    [ "$DEVICE" = cpu ] || files=("launch/${DEVICE}_env.sh" "${files[@]}")
    sed -n 's/^ *export \([A-Z_]*\)=.*/\1/p' "${files[@]}" | while read -r name; do
        if [ -n "${!name+set}" ]; then printf 'export %s=%q\n' "$name" "${!name}"; fi
    done
    sed -n 's/^ *\(unset [A-Z_ ]*[A-Z_]\) *#.*/\1/p' "${files[@]}"
}

launch() {
    local plan_only=no given=() program=(train_grpo.py) argument
    for argument in "$@"; do
        case $argument in
            --plan-only) plan_only=yes ;;
            --groups) program=(preflight.py --groups) ;;
            --help | -h) usage ;;
            *=*) given+=("$argument") ;;
            *) echo "error: $argument: unknown argument; give section.key=value, --plan-only, --groups or --help" >&2; exit 2 ;;
        esac
    done
    [ "$NODES" = 1 ] || [[ $RENDEZVOUS =~ ^.+:[0-9]{1,5}$ ]] ||
        { echo "error: RENDEZVOUS: ${RENDEZVOUS:-not set}; set it to host:port of the first machine, the same on both, e.g. node1:29400" >&2; exit 2; }
    [[ $LAYOUT =~ ^tp([0-9]+)_ep([0-9]+)$ ]] ||
        { echo "error: LAYOUT: $LAYOUT is no layout; write it as tp<ranks>_ep<ranks>, e.g. tp4_ep16" >&2; exit 2; }

    local tensor=${BASH_REMATCH[1]} expert=${BASH_REMATCH[2]} ranks=$((NODES * RANKS_PER_NODE))
    local overrides=("parallel.tensor=$tensor" "parallel.expert=$expert")
    if grep -Eqs '^ +expert_parallel: *true' "$CONFIG" && { [ "$tensor" != 4 ] || [ "$expert" != "$ranks" ]; }; then
        # vLLM's shards would differ from the trainer's, so whole tensors are pushed. More experts per rank leave less room.
        overrides+=("rollout.expert_parallel=false" "model.recompute=true")
    fi
    [ -z "$MODEL" ] || overrides+=("model.path=$MODEL")
    [ -z "$TRAIN" ] || overrides+=("data.train_path=$TRAIN")
    [ -z "$TEST" ] || overrides+=("data.test_path=$TEST")
    [ -z "$OUT" ] || overrides+=("train.out_dir=$OUT")
    overrides+=("${EXTRA[@]}")
    # With :=, a key that this run does not read causes a note instead of an error: the command line may choose another engine.
    overrides=("${overrides[@]/=/:=}" "${given[@]}")   # the last value of a key counts, so the command line comes last

    # launch/first_code.py is torchrun that ends with the exit code of the first rank that failed, without a traceback.
    # With --tee, the output of every rank goes to its own file in $OUT/logs/<launch>/attempt_0/<rank>/ and, after [rank], to the
    # terminal. A restart resumes from the last checkpoint, like a second start of the same command.
    local torchrun=("$PYTHON" launch/first_code.py --nnodes="$NODES" --nproc_per_node="$RANKS_PER_NODE"
        --role=rank --log-dir="${OUT:-out}/logs" --tee=3 --max-restarts="${RESTARTS:-0}")
    if [ "$NODES" = 1 ]; then
        torchrun+=(--standalone --local-addr=localhost)   # otherwise a host name that cannot be resolved hangs the start
    else
        torchrun+=(--rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS" --rdzv-id=grpo)
        if [ "${RENDEZVOUS%%:*}" = localhost ]; then torchrun+=(--local-addr=localhost)
        elif [ -n "$ADDRESS" ]; then torchrun+=(--local-addr="$ADDRESS"); fi
        # torchrun keeps the store on the machine of RENDEZVOUS, but may not recognise this machine by that address.
        [ "${RENDEZVOUS%:*}" != "$ADDRESS" ] || torchrun+=(--rdzv-conf=is_host=1)
    fi
    torchrun+=("${program[@]}" "$CONFIG" "${overrides[@]}")

    export NODES   # for the doctor
    local doctor=("$PYTHON" preflight.py --doctor "$CONFIG" "${overrides[@]}" --ranks "$RANKS_PER_NODE")
    local plan=("$PYTHON" preflight.py "$CONFIG" "${overrides[@]}" ${GIB:+--device-gib "$GIB"} --ranks "$ranks" --ranks-per-node "$RANKS_PER_NODE")
    if [ "$plan_only" = yes ]; then
        print_environment
        printf '%q ' "${doctor[@]}"; echo
        printf '%q ' "${plan[@]}"; echo
        printf '%q ' "${torchrun[@]}"; echo
    fi
    if ! "$PYTHON" -c 'import pydantic, tqdm, yaml' 2>/dev/null; then
        local todo="choose a Python that has them (docs/npu.md)"
        [ "$plan_only" = no ] || todo="for the plan, pip install --no-deps -r requirements/report.txt, or choose a Python that has them, e.g. PYTHON=.venv/bin/python"
        echo "error: PYTHON: $PYTHON lacks the packages of requirements/; $todo" >&2
        exit 2
    fi
    [ "$plan_only" = no ] || exec "${plan[@]}"
    if [ "${DOCTOR:-on}" != off ]; then
        local code=0
        "${doctor[@]}" || code=$?
        [ "$code" != 2 ] || exit 2   # unusable input, which the doctor has named
        [ "$code" = 0 ] ||
            { echo "error: not started; mend what the lines that begin with fail name, or start without the doctor: DOCTOR=off" >&2; exit 1; }
    fi
    "${plan[@]}"            # refuses a layout that does not fit, and names layouts that fit
    exec "${torchrun[@]}"   # exec: signals reach torchrun, which ends its processes
}

launch "$@"
