# Doctor, plan and torchrun, for the run_*.sh scripts of accelerators, which source it and call:   launch "$@"
# They set
#   CONFIG NODES RANKS_PER_NODE        which run, on how many machines, with how many processes on each
#   LAYOUT                             tp4_ep16: 4 ranks split an attention matrix, 16 the experts of a layer
#   MODEL TRAIN TEST OUT               paths; "" leaves the configuration's
#   EXTRA                              further section.key=value of this script
#   ENVIRONMENT                        the files that export variables, to print them
#   RENDEZVOUS                         several machines: host:port of the first one
#   PYTHON                             the interpreter
# From the environment: DOCTOR=off starts in spite of the doctor, RESTARTS=1 lets torchrun start lost processes again.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else a restarted process meets the addresses of dead ones in torchrun's store

usage() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit "$1"
}

# What `source npu_env.sh` has set and unset, as commands.
print_environment() {
    local name
    sed -n 's/^ *export \([A-Z_]*\)=.*/\1/p' "${ENVIRONMENT[@]}" launch.sh | while read -r name; do
        if [ -n "${!name+set}" ]; then printf 'export %s=%q\n' "$name" "${!name}"; fi
    done
    sed -n 's/^ *\(unset [A-Z_ ]*[A-Z_]\) *#.*/\1/p' "${ENVIRONMENT[@]}"
}

launch() {
    local plan_only=no given=() argument
    for argument in "$@"; do
        case $argument in
            --plan-only) plan_only=yes ;;
            --help | -h) usage 0 ;;
            *=*) given+=("$argument") ;;
            *) echo "error: $argument: expected section.key=value, --plan-only or --help" >&2; exit 2 ;;
        esac
    done
    [[ $LAYOUT =~ ^tp([0-9]+)_ep([0-9]+)$ ]] ||
        { echo "error: LAYOUT: $LAYOUT: expected tp<ranks>_ep<ranks>, e.g. tp4_ep16" >&2; exit 2; }

    local tensor=${BASH_REMATCH[1]} expert=${BASH_REMATCH[2]} ranks=$((NODES * RANKS_PER_NODE))
    local overrides=("parallel.tensor=$tensor" "parallel.expert=$expert")
    if [ "$CONFIG" = configs/qwen3.yaml ] && { [ "$tensor" != 4 ] || [ "$expert" != "$ranks" ]; }; then
        overrides+=("rollout.expert_parallel=false")   # vLLM would hold other shards than the trainer: whole tensors travel
    fi
    [ -z "$MODEL" ] || overrides+=("model.path=$MODEL")
    [ -z "$TRAIN" ] || overrides+=("data.train_path=$TRAIN" "data.test_path=$TEST")
    [ -z "$OUT" ] || overrides+=("train.out_dir=$OUT")
    overrides+=("${EXTRA[@]}" "${given[@]}")   # the last of a key counts: the command line's own come last

    # --tee: every rank's output is in a file of its own, $OUT/logs/<launch>/attempt_0/<rank>/, and on the terminal, after
    # its [rank]. A restart resumes from the last checkpoint, as the same command does when it is given again.
    local torchrun=("$PYTHON" -m torch.distributed.run --nnodes="$NODES" --nproc_per_node="$RANKS_PER_NODE"
        --role=rank --log-dir="${OUT:-out}/logs" --tee=3 --max-restarts="${RESTARTS:-0}")
    if [ "$NODES" = 1 ]; then
        torchrun+=(--standalone --local-addr=localhost)   # else a host name that nobody resolves would hang the start
    else
        torchrun+=(--rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS" --rdzv-id=grpo)
        [ "${RENDEZVOUS%%:*}" != localhost ] || torchrun+=(--local-addr=localhost)
    fi
    torchrun+=(train_grpo.py "$CONFIG" "${overrides[@]}")

    local doctor=("$PYTHON" preflight.py --doctor "$CONFIG" "${overrides[@]}" --ranks "$RANKS_PER_NODE")
    local plan=("$PYTHON" preflight.py "$CONFIG" "${overrides[@]}" --ranks "$ranks" --ranks-per-node "$RANKS_PER_NODE")
    if [ "$plan_only" = yes ]; then
        print_environment
        printf '%q ' "${doctor[@]}"; echo
        printf '%q ' "${plan[@]}"; echo
        printf '%q ' "${torchrun[@]}"; echo
        exit 0
    fi
    if [ "${DOCTOR:-on}" != off ]; then
        local code=0
        "${doctor[@]}" || code=$?
        [ "$code" != 2 ] || exit 2   # unusable input, which it has named
        [ "$code" = 0 ] ||
            { echo "error: not started, see the lines that begin with fail (DOCTOR=off starts in spite of them)" >&2; exit 1; }
    fi
    "${plan[@]}"            # refuses a layout that does not fit, and says which do
    exec "${torchrun[@]}"   # exec: signals reach torchrun, which ends its processes
}
