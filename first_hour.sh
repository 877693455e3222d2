#!/usr/bin/env bash
# Checks a new machine in about an hour: nine stages, from the doctor to three steps of the real run, and one report. Each stage
# says what it shows and, if it fails, what to do. --help prints the stages.
#
#   bash first_hour.sh CONFIG [--report FILE] [section.key=value ...]       e.g.  bash first_hour.sh configs/qwen3.yaml
#   RANKS=8 bash first_hour.sh configs/qwen3.yaml parallel.expert=8         on 8 dies of the server
#   PYTHON=.venv/bin/python bash first_hour.sh configs/tiny_cpu.yaml        on a laptop, with run_cpu.sh's environment
#
# To continue, start the same command again: it repeats a stage that has passed only if arguments, configuration, code, packages or
# variables have changed. Logs, results and report.json (or FILE) are in train.out_dir, first_hour-<name of the configuration>.
# Remove this folder to start from the beginning. Paths are relative to the repository's folder. It checks one machine, with Linux.
# The exit code is 0 if all stages passed, 1 if a stage failed, and 2 if the input cannot be used. It has run on a CPU, not on an
# NPU yet.

set -euo pipefail

# --- yours to change -------------------------------------------------------------------------------------------------
RANKS=${RANKS:-}                        # number of processes; "": all devices of this machine, or on a CPU the smallest number that the layout allows
MINUTES=${MINUTES:-}                    # time limit of every stage; "": the limits that --help prints
GIB=${GIB:-}                            # memory of a device for the plan; "": the plan's default
PYTHON=${PYTHON:-python3}               # has requirements/npu.txt and MindSpeed (docs/npu.md)
# ---------------------------------------------------------------------------------------------------------------------

# Runs all stages. A stage has a name, a limit in minutes, the earlier stages that it needs, what it shows, what to do if it fails,
# and a command.
stages() {
    stage doctor 5 "" "Versions, devices, ports, limits, variables and disk suit the run." \
        "Follow the end of each line that begins with fail (docs/npu.md has a table of errors)." \
        "$PYTHON" preflight.py --doctor "${run[@]}" --ranks "$ranks"
    stage plan 1 "" "The layout is possible on these ranks, and the run fits into the memory of a device." \
        "Use one of the nearest layouts that fit, which the log lists, or another number of RANKS." \
        "$PYTHON" preflight.py "${run[@]}" --ranks "$ranks" --ranks-per-node "$ranks" ${GIB:+--device-gib "$GIB"}
    stage groups 15 "plan" "All ranks meet, and every collective over every process group gives the right answer." \
        "After a time-out, check HCCL's ports, HCCL_CONNECT_TIMEOUT, and whether a rank died. After a wrong answer, check the versions of driver and CANN." \
        "${all_ranks[@]}" preflight.py --groups "${run[@]}"
    stage operators 30 "plan" "At the model's sizes, every operator equals its formula in fp64 up to rounding." \
        "If one rank is wrong, check its device. If all are wrong, check the versions (doctor) and the call in hardware/kernels.py." \
        "${all_ranks[@]}" preflight.py --operators "${run[@]}"
    stage layers 30 "groups" "Trainer and engine have the same log-probs on two layers, after every adapter has changed." \
        "Find out which of these helps: rollout.expert_parallel=false, rollout.enforce_eager=true, rollout.engine=torch." \
        "${all_ranks[@]}" preflight.py --layers "${run[@]}" --folder "$folder/layers"
    stage self-test 15 "groups" "In every layout of $tested ranks, tiny models have the gradients and steps of transformers and torch." \
        "Read the FAILED lines: each names a test and a layout. docs/checks.md says how to see more." \
        "${torchrun[@]}" --nproc_per_node="$tested" preflight.py --self-test "${run[@]}"
    # shellcheck disable=SC2016  # the inner bash expands these variables
    stage learning 30 "self-test" "One rank trains the tiny model of configs/tiny_cpu.yaml to at least 60 % right answers." \
        "Read the accuracies in the log. If all earlier stages passed, compare metrics.jsonl with that of a CPU (run_cpu.sh)." \
        bash -c '"$0" train_grpo.py configs/tiny_cpu.yaml "$@" | tee /dev/stderr | grep -E "accuracy .* -> ([6-9].|100)\."' \
        "$PYTHON" device="$device" parallel.expert=1 train.out_dir="$folder/learning"
    stage steps 90 "groups layers" "Three steps of the real run work, with an evaluation before and after." \
        "Follow the run's own error. If memory ran out, reduce rollout.kv_cache_mib or optim.tokens_per_micro_batch." \
        "${all_ranks[@]}" train_grpo.py "${steps[@]}" train.out_dir="$folder/steps"
    stage graphs 90 "steps" "The same steps work with graphs, if the engine has any. The run does not need this stage." \
        "Keep rollout.enforce_eager: true. Everything else works." \
        "${all_ranks[@]}" train_grpo.py "${steps[@]}" train.out_dir="$folder/graphs" rollout.enforce_eager=false
}

# Runs a stage, unless it has passed before, or an earlier stage that it needs has not passed.
stage() {
    local name=$1 minutes=${MINUTES:-$2} needs=$3 todo=$5 log=$folder/$1.log begin=$SECONDS status=pass why="" needed by_hand
    echo "$name (limit $minutes min): $4"
    shift 5
    [ "$explain" = no ] || return 0
    printf -v by_hand '%q ' "$@"
    for needed in $needs; do
        [[ $passed == *" $needed "* ]] || why="needs $needed, which has not passed"
    done
    [ "$name $graphs" != "graphs no" ] || why="nothing to try: the engine has no graphs, or the steps already used them"
    if [ -n "$why" ]; then
        status=skipped
    elif [ "$state" = "$(cat "$folder/$name.passed" 2>/dev/null)" ]; then
        why="passed in an earlier start"
    else
        rm -rf "${folder:?}/$name" "$folder/$name.passed"
        # timeout ends all processes of the stage, and setpriv ends the stage if this script is killed. A trap interrupts `wait`.
        setpriv --pdeathsig TERM timeout --kill-after=45 "${minutes}m" "$@" >"$log" 2>&1 &
        if wait $!; then
            echo "$state" >"$folder/$name.passed"
        elif [[ $? =~ ^(124|137)$ ]]; then
            status=fail why="ended after its limit of $minutes minutes; the last line of its log: $(tail -n 1 "$log")"
        else
            status=fail why=$(grep -m 1 -A 3 -E "$ERROR" "$log" || tail -n 1 "$log")
        fi
    fi
    echo "    $status, $((SECONDS - begin)) s${why:+: ${why//$'\n'/$'\n    '}}"
    if [ "$status" = pass ]; then
        passed+="$name "
    elif [ "$status" = fail ]; then
        failed+=" $name"
        printf '    do:  %s\n    log: %s\n    by hand: %s\n' "$todo" "$log" "$by_hand"
    fi
    results+=("$name" "$status" "$why" "$((SECONDS - begin))" "$log" "${by_hand% }")
}

refuse() {
    echo "error: $*" >&2
    exit 2
}

ERROR='^(rank [0-9]+: )?(error|stopped): |^(fail|FAIL)  |^verdict: refused|WRONG|^[A-Za-z_.]*(Error|Exception): '
config="" report="" overrides=() explain=no
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) explain=yes ;;
        --report)
            report=${2:-}
            [ -n "$report" ] || refuse "--report: no file name; give one: --report FILE"
            shift
            ;;
        *=*) overrides+=("$1") ;;
        -*) refuse "$1: unknown option; give CONFIG, section.key=value, --report FILE or --help" ;;
        *) config=$1 ;;
    esac
    shift
done
cd "$(dirname "$0")"
ranks=1 graphs=yes folder="" run=() steps=() all_ranks=() torchrun=() device="" tested="up to 16"
if [ "$explain" = yes ]; then
    sed -n '2,/^$/ s/^# \{0,1\}//p' first_hour.sh
    stages
    exit
fi

[ -n "$config" ] || refuse "CONFIG: missing; give a YAML file, e.g. configs/qwen3.yaml"
[[ $RANKS =~ ^[0-9]*$ ]] || refuse "RANKS: '$RANKS' is no whole number; give one, e.g. RANKS=8"
[[ $MINUTES =~ ^([0-9]+(\.[0-9]+)?)?$ ]] || refuse "MINUTES: '$MINUTES' is no number; give one, e.g. MINUTES=30"
"$PYTHON" -c 'import pydantic, tqdm, yaml' 2>/dev/null ||
    refuse "PYTHON: $PYTHON lacks the packages of requirements/; choose a Python that has them (docs/npu.md)"
run=("$config" "${overrides[@]}")
# A value of eval.num_questions on the command line wins, because it comes later.
steps=("$config" eval.num_questions=32 "${overrides[@]}" train.steps=3 eval.every=0 train.resume=never train.checkpoint_every=3)
where=$("$PYTHON" preflight.py --where "${steps[@]}" ${RANKS:+--ranks "$RANKS"}) || exit 2   # it has printed the reason
IFS=$'\t' read -r device ranks graphs name out <<<"$where"
case $device in
    npu) source launch/npu_env.sh ;;
    cuda) source launch/cuda_env.sh ;;
    cpu) source launch/setup_cpu.sh && set_variables ;;
esac
visible=${ASCEND_RT_VISIBLE_DEVICES:-${CUDA_VISIBLE_DEVICES:-$(compgen -G "/dev/davinci[0-9]*" || compgen -G "/dev/nvidia[0-9]*" || true)}}
if [ "$device" != cpu ] && [ -z "$RANKS" ] && [ -n "$visible" ]; then
    ranks=$(wc -w <<<"${visible//,/ }")
fi
folder=$out/first_hour-$name
report=${report:-$folder/report.json}
[ ! -s "$report" ] || grep -q '"stages"' "$report" || refuse "--report: $report is another file; choose a new name"
mkdir -p "$folder" 2>/dev/null || refuse "train.out_dir: $folder cannot be made; choose another folder"
{ : >>"$report"; } 2>/dev/null || refuse "--report: $report cannot be written; choose another name"
exec 9>"$folder/lock"   # a stage keeps the lock as long as it runs
flock --wait 60 9 || refuse "$folder: another first_hour.sh uses this folder; end it first"

# launch/first_code.py is torchrun that ends without a traceback. Without localhost, it hangs if the host name cannot be resolved.
torchrun=("$PYTHON" launch/first_code.py --standalone --local-addr=localhost)
all_ranks=("${torchrun[@]}" --nproc_per_node="$ranks")
tested=1   # the self-test has layouts for 1, 2, 4, 8 and 16 ranks
while [ "$tested" -lt 16 ] && [ $((2 * tested)) -le "$ranks" ]; do tested=$((2 * tested)); done
state=$({
    printf '%s\n' "${run[@]}" "$ranks" "$GIB"
    sha256sum "$config" ./*.py ./*/*.py ./*.sh ./*/*.sh
    "$PYTHON" -c 'import sys; sys.path.insert(0, "."); from runlog import run_record; print(run_record.environment(0))'
} | sha256sum)

echo "$config: $ranks ranks on $device; logs and results: $folder"
passed=" " failed="" results=()
trap 'trap "" INT TERM HUP; kill $(jobs -p) 2>/dev/null; wait; echo "interrupted; to continue, start the same command again" >&2; exit 130' INT TERM HUP
stages
if [[ $passed == *" graphs "* ]]; then
    seconds() {   # prints the seconds per step that the plan expects with this override
        "$PYTHON" preflight.py "${run[@]}" "$1" --ranks "$ranks" --ranks-per-node "$ranks" ${GIB:+--device-gib "$GIB"} |
            sed -n 's/^estimated step: .*expected \([0-9.,]* s\).*/\1/p'
    }
    word=rollout.enforce_eager=false
    echo "graphs work here: add one argument to the run script, e.g. bash run_16npu.sh $word"
    echo "    by the plan, a step then takes $(seconds $word) instead of $(seconds rollout.enforce_eager=true)"
fi
"$PYTHON" - "$config" "$ranks" "$device" "$folder" "${results[@]}" >"$report" <<'END'
import json
import sys

config, ranks, device, folder, *cells = sys.argv[1:]
names = ("name", "status", "reason", "seconds", "log", "command")
stages = [dict(zip(names, cells[i : i + 6])) for i in range(0, len(cells), 6)]
for stage in stages:
    stage["seconds"] = int(stage["seconds"])
passed = all(stage["status"] != "fail" or stage["name"] == "graphs" for stage in stages)
report = {"passed": passed, "config": config, "ranks": int(ranks), "device": device, "folder": folder, "stages": stages}
print(json.dumps(report, indent=1))
END
echo "result: ${failed:+failed:}${failed:-all passed}. The report as JSON: $report"
[ -z "$failed" ] || [ "$failed" = " graphs" ]   # the exit code; the run does not need graphs
