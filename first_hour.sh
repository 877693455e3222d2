#!/usr/bin/env bash
# The first hour on a new machine: eight stages, from the doctor to three steps of the real run, and one report. Each stage
# says what it proves and, if it fails, what to do. --help prints the stages.
#
#   bash first_hour.sh CONFIG [--report FILE] [section.key=value ...]       e.g.  bash first_hour.sh configs/qwen3.yaml
#   RANKS=8 bash first_hour.sh configs/qwen3.yaml parallel.expert=8         on 8 dies of the server
#   PYTHON=.venv/bin/python bash first_hour.sh configs/tiny_cpu.yaml        on a laptop, with run_cpu.sh's environment
#
# After a failure the same command continues: a stage that has passed is not repeated unless arguments, configuration, code,
# packages or variables have changed. Logs, results and report.json (or FILE) are in train.out_dir,
# first_hour-<name of the configuration>; remove that folder to start from the beginning. Paths are relative to the
# repository's folder. One machine only, with Linux. Exit code: 0 all passed, 1 a stage failed, 2 unusable input. Run on a
# CPU; not run on an NPU yet.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
RANKS=${RANKS:-}                        # processes; "": all devices of this machine, or on a CPU the smallest number that the layout allows
MINUTES=${MINUTES:-}                    # time limits of the stages in their order; "": those that --help prints
GIB=${GIB:-}                            # memory of a device for the plan; "": the plan's own figure
PYTHON=${PYTHON:-python3}               # with requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

# A stage: its name, limit in minutes, earlier stages that it needs, what it proves, what to do when it fails, its command.
stages() {
    stage doctor 5 "" \
        "Versions, devices, ports, limits, variables, disk, model and data files are what the run needs." \
        "Each line that begins with fail ends with what to do (docs/npu.md has a table of errors)." \
        "$PYTHON" preflight.py --doctor "${run[@]}" --ranks "$ranks"
    stage plan 1 "" \
        "The layout is possible on these ranks, and the run fits into the memory of a device." \
        "The log lists the nearest layouts that fit: take one of them, or another number of RANKS." \
        "$PYTHON" preflight.py "${run[@]}" --ranks "$ranks" --ranks-per-node "$ranks" ${GIB:+--device-gib "$GIB"}
    stage groups 15 "plan" \
        "All ranks meet, and every collective over every process group of the layout gives the right answer." \
        "Time-out: HCCL's ports, HCCL_CONNECT_TIMEOUT, or a rank that died. Wrong answer: versions of driver and CANN." \
        "${torchrun[@]}" preflight.py --groups "${run[@]}"
    stage operators 30 "plan" \
        "Every operator at the model's sizes on a rank, in bf16 and fp32, equals its formula in fp64 up to rounding." \
        "Wrong on one rank: its device. Wrong on all: versions (the doctor), or its call in hardware/kernels.py." \
        "${torchrun[@]}" preflight.py --operators "${run[@]}"
    stage layers 30 "groups" \
        "Two layers of the model's sizes give trainer and engine the same log-probs after every adapter has changed." \
        "Try rollout.expert_parallel=false, rollout.enforce_eager=true or rollout.engine=torch: which one helps?" \
        "${torchrun[@]}" preflight.py --layers "${run[@]}" --folder "$folder/layers"
    stage self-test 15 "groups" \
        "Two ranks make the same update of a tiny model as a reference. (One rank: the model learns.)" \
        "The line names a layout and a check; the log says what to look at. model.dtype=fp32 compares more closely." \
        "${self_test[@]}"
    stage steps 90 "groups layers" \
        "Three steps of the real run work, with an evaluation of few questions before and after them." \
        "The line is the run's own error. Out of memory: a smaller rollout.kv_cache_mib or optim.tokens_per_micro_batch." \
        "${torchrun[@]}" train_grpo.py "${steps[@]}" train.out_dir="$folder/steps"
    [ "$graphs" = yes ] || skip="nothing to try: the engine has no graphs, or the steps had them"
    stage graphs 90 "steps" \
        "The same steps work with graphs (rollout.enforce_eager=false). The run does not need this stage." \
        "Keep rollout.enforce_eager: true. Nothing else is wrong." \
        "${torchrun[@]}" train_grpo.py "${steps[@]}" train.out_dir="$folder/graphs" rollout.enforce_eager=false
}

refuse() {
    echo "error: $*" >&2
    exit 2
}

# Prints why a command failed: the error lines of its log $1 with the indented lines below them, or else the last line.
cause() {
    local begins='^(rank [0-9]+: )?(error|stopped): |^(fail|FAIL)  |^verdict: refused|WRONG|^[A-Za-z_.]*(Error|Exception): '
    local lines last
    lines=$(awk -v begins="$begins" '$0 ~ begins { found = 1; print; next } !/^  / { found = 0 } found' "$1" |
        head -n 8) || true
    last=$(grep -a . "$1" | tail -n 1) || true
    printf '%s\n' "${lines:-${last:-no output}}"
}

# timeout passes the signal on to its process group, and torchrun to its ranks. A trap below calls it (SC2329).
# shellcheck disable=SC2329
interrupted() {
    trap '' INT TERM HUP
    [ -z "$running" ] || kill "$running" || true
    wait
    echo "interrupted: the same command continues with this stage" >&2
    exit 130
}

# Runs a stage, unless it has passed before, or an earlier stage that it needs has not passed. Its arguments: see stages.
stage() {
    number=$((number + 1))
    local name=$1 minutes=${limits[number - 1]:-$2} needs=$3 proves=$4 todo=$5 needed limit by_hand
    shift 5
    echo "$number/8 $name (limit $minutes min): $proves"
    [ "$explain" = no ] || return 0
    local log=$folder/$name.log begin=$SECONDS status=pass why=$skip
    printf -v by_hand '%q ' "$@"
    for needed in $needs; do
        [[ $passed == *" $needed "* ]] || why="needs $needed, which has not passed"
    done
    if [ -n "$why" ]; then
        status=skipped
    elif [ "$state" = "$(cat "$folder/$name.passed" 2>/dev/null)" ]; then
        why="kept from an earlier start"
    else
        rm -rf "${folder:?}/$name" "$folder/$name.passed"
        limit=$(awk -v minutes="$minutes" 'BEGIN { print int(minutes * 60) + 1 }')
        # setpriv ends the stage if this script is killed. bash handles Ctrl-C at once only in `wait`.
        setpriv --pdeathsig TERM timeout --kill-after=45 "$limit" "$@" >"$log" 2>&1 &
        running=$!
        wait "$running" || status=fail
        running=""
        [ "$status" = fail ] || echo "$state" >"$folder/$name.passed"
    fi
    local seconds=$((SECONDS - begin))
    if [ "$status" = fail ]; then
        why=$(cause "$log")
        [ "$seconds" -lt "$limit" ] || why="ended after $minutes minutes, its limit; in its log: $why"
        failed+="$name "
        [ "$name" = graphs ] || code=1
    fi
    [ "$status" != pass ] || passed+="$name "
    echo "    ${status/fail/FAIL}, $seconds s${why:+: ${why//$'\n'/$'\n    '}}"
    [ "$status" != fail ] || printf '    do:  %s\n    log: %s\n    by hand: %s\n' "$todo" "$log" "$by_hand"
    results+=("$name" "$status" "$why" "$seconds" "$log" "${by_hand% }")
}

config="" report="" overrides=() explain=no
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) explain=yes ;;
        --report)
            [ $# -gt 1 ] || refuse "--report: FILE is missing"
            report=$2
            shift
            ;;
        *=*) overrides+=("$1") ;;
        *)
            [[ -z $config && $1 != -* ]] || refuse "$1: expected CONFIG, section.key=value, --report FILE or --help"
            config=$1
            ;;
    esac
    shift
done
cd "$(dirname "$0")"
number=0 ranks=1 graphs=yes folder="" run=() steps=() torchrun=() self_test=()
read -ra limits <<<"$MINUTES"
if [ "$explain" = yes ]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' first_hour.sh
    echo
    stages
    exit
fi

[ -n "$config" ] || refuse "CONFIG: missing; needed: a YAML file, e.g. configs/qwen3.yaml"
[[ $RANKS =~ ^[0-9]*$ ]] || refuse "RANKS: found '$RANKS'; needed: a whole number"
[[ -z $MINUTES || " $MINUTES" =~ ^(\ +[0-9]+(\.[0-9]+)?){8}\ *$ ]] ||
    refuse "MINUTES: found '$MINUTES'; needed: 8 numbers, one a stage"
type flock setpriv timeout >/dev/null 2>&1 || refuse "flock, setpriv, timeout: not found; needed: Linux with these programs"
"$PYTHON" -c 'import pydantic, tqdm, yaml' 2>/dev/null ||
    refuse "PYTHON: $PYTHON lacks the packages of requirements/; needed: one that has them (docs/npu.md)"
run=("$config" "${overrides[@]}")
# A value of eval.num_questions on the command line counts, because it comes later.
steps=("$config" eval.num_questions=32 "${overrides[@]}" train.steps=3 eval.every=0 train.resume=never train.checkpoint_every=3)
where=$("$PYTHON" preflight.py --where "${steps[@]}" ${RANKS:+--ranks "$RANKS"}) || exit 2   # it has said why
IFS=$'\t' read -r device ranks graphs name out <<<"$where"
visible=""
case $device in
    npu)
        source ./npu_env.sh
        visible=${ASCEND_RT_VISIBLE_DEVICES:-$(compgen -G '/dev/davinci[0-9]*' || true)}
        ;;
    cuda)
        source ./cuda_env.sh
        visible=${CUDA_VISIBLE_DEVICES:-$(compgen -G '/dev/nvidia[0-9]*' || true)}
        ;;
    cpu)
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"   # the processes share the cores; more threads are slower
        export TOKENIZERS_PARALLELISM=false              # the tokenizer's threads do not survive a fork
        export HF_HUB_OFFLINE=1                          # models are local folders; a wrong path must not start a download
        ;;
esac
if [ -z "$RANKS" ] && [ -n "$visible" ]; then
    ranks=$(wc -w <<<"${visible//,/ }")
fi

folder=$out/first_hour-$name
report=${report:-$folder/report.json}
{ mkdir -p "$folder" && [ -w "$folder" ]; } 2>/dev/null ||
    refuse "train.out_dir: $folder cannot be written; needed: another folder"
[ ! -s "$report" ] || grep -q '"stages"' "$report" || refuse "--report: $report is another file; needed: a new name"
{ : >>"$report"; } 2>/dev/null || refuse "--report: $report cannot be written; needed: another name"
exec 9>"$folder/lock"   # a stage keeps the lock as long as it lives
if ! flock --nonblock 9; then
    echo "waiting: processes of an earlier start hold $folder"
    flock --wait 60 9 || refuse "$folder: another first hour is at work there; end it first"
fi

# parallel_setup.py is torchrun. Without localhost, a host name that cannot be resolved hangs the start.
launcher=("$PYTHON" parallel_setup.py --standalone --local-addr=localhost)
torchrun=("${launcher[@]}" --nproc_per_node="$ranks")
self_test=("$PYTHON" preflight.py --self-test "${run[@]}")
if [ "$ranks" -gt 1 ]; then
    self_test=("${launcher[@]}" --nproc_per_node=2 preflight.py --self-test "${run[@]}" --ranks 2)
fi
state=$({
    printf '%s\n' "${run[@]}" "$ranks" "$GIB"
    sha256sum "$config" ./*.py ./*/*.py ./*.sh
    "$PYTHON" -c 'import sys; sys.path.insert(0, "."); import run_record; print(run_record.environment(0))'
} | sha256sum)

echo "$config: $ranks ranks on $device; logs and results: $folder"
running="" passed=" " failed="" skip="" code=0 results=()
trap interrupted INT TERM HUP
stages
"$PYTHON" - "$code" "$config" "$ranks" "$device" "$folder" "${results[@]}" >"$report" <<'END'
import json
import sys

code, config, ranks, device, folder, *cells = sys.argv[1:]
names = ("name", "status", "reason", "seconds", "log", "command")
stages = [dict(zip(names, cells[i : i + 6])) for i in range(0, len(cells), 6)]
for stage in stages:
    stage["seconds"] = int(stage["seconds"])
report = {"passed": code == "0", "config": config, "ranks": int(ranks), "device": device, "folder": folder, "stages": stages}
print(json.dumps(report, indent=1))
END
verdict="failed: ${failed% }"
[ "$code" = 1 ] || verdict="all passed that the run needs${failed:+; $verdict}"
echo "result: $verdict. The report as JSON: $report"
printf 'The same command repeats only what has not passed or has changed. To start from the beginning: rm -r %q\n' "$folder"
exit "$code"
