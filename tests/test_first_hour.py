"""checks/first_hour.py: the report of a sound machine, faults named by their stage, resuming, limits, bad input.

Ranks are forked (hour.py). The slow test starts the real script. On an NPU: test_npu.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hour
import pytest
import torch
import torch.distributed as dist
import training
import world
from launched import ROOT, started
from planted import without_update
from planting import instead
from pytest import MonkeyPatch

from checks import first_hour, first_hour_stages, groups
from checks.first_hour_stages import STAGES, Job
from config import load_config, to_yaml
from hardware import kernels

NAMES = [stage.name for stage in STAGES]
SIZES = {
    "tiny_model__architecture": "qwen3_moe", "tiny_model__vocab_size": 320, "tiny_model__hidden_size": 32,
    "tiny_model__num_layers": 2, "tiny_model__num_heads": 4, "tiny_model__num_kv_heads": 2, "tiny_model__head_dim": 8,
    "tiny_model__num_experts": 8, "tiny_model__expert_width": 32, "tiny_model__warm_start_steps": 0,
    "checks__unparsable": "off",
}  # fmt: skip


def write_config(folder: Path) -> Path:
    cfg = training.in_layout(training.config(folder / "model", folder / "out", **SIZES), "EP2")
    (folder / "run.yaml").write_text(to_yaml(cfg))
    return folder / "run.yaml"


def the_hour(folder: Path, *arguments: str) -> tuple[int, dict[str, dict]]:
    """The exit code, and the results by stage."""
    code = first_hour.main([str(folder / "run.yaml"), "--report", str(folder / "report.json"), *arguments])
    report = json.loads((folder / "report.json").read_text())
    assert report["passed"] == (code == 0) and [stage["name"] for stage in report["stages"]] == NAMES
    return code, {stage["name"]: stage for stage in report["stages"]}


def status(stages: dict[str, dict]) -> dict[str, str]:
    return {name: stage["status"] for name, stage in stages.items()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[int, dict[str, dict], Path]:
    folder = tmp_path_factory.mktemp("sound")
    write_config(folder)
    training.import_before_the_fork()
    world._import_megatron()
    with MonkeyPatch.context() as patch:
        patch.setattr(first_hour, "execute", hour.forked)
        return *the_hour(folder), folder


# ------------------------------------------------------------------------------------------------ a sound machine


def test_a_sound_machine_passes_every_stage(sound) -> None:
    code, stages, _ = sound
    expected = dict.fromkeys(NAMES, "pass") | {"graphs": "skipped"}
    assert status(stages) == expected, {n: s["reason"] for n, s in stages.items()}
    assert stages["graphs"]["reason"] == "has nothing to try: torch on cpu has no graphs"
    assert code == 0 and all(stage["seconds"] >= 0 and stage["proves"] and stage["todo"] for stage in stages.values())
    figures = {name: stage["figures"] for name, stage in stages.items()}
    assert figures["doctor"]["fail"] == 0 and figures["doctor"]["ok"] > 3
    answered = {(row["group"], row["collective"]) for row in figures["groups"]}
    kinds = ("all-reduce", "all-gather", "all-to-all", "barrier")
    assert answered == {(group, kind) for group in ("expert", "data", "world") for kind in kinds}
    assert {row["dtype"] for row in figures["operators"]} == {"fp32", "bf16"} and len(figures["operators"]) == 22
    assert figures["layers"]["gap_mean"] < 1e-4 and figures["layers"]["layers"] == 2
    steps = figures["steps"]
    assert steps["steps"] == 3 and steps["step_seconds"] > 0 and steps["peak_rss_gib"] > 0.1
    assert json.loads((Path(steps["run"]) / "run.json").read_text())["name"] == "tiny"
    # 9 is num_test of the configuration.
    assert "train.steps=3 eval.every=0 eval.num_questions=9 " in stages["steps"]["command"]


def test_a_second_start_repeats_nothing_and_says_so(sound, monkeypatch, capsys) -> None:
    monkeypatch.setattr(first_hour, "execute", lambda *args: pytest.fail("repeated"))
    code, stages = the_hour(sound[2])
    assert code == 0 and all(stage["kept"] for name, stage in stages.items() if name != "graphs")
    said = capsys.readouterr().out
    assert "kept: passed on" in said and f"rm -r {sound[2]}/out/first_hour-tiny" in said


def test_graphs_that_fail_do_not_fail_the_hour(sound, monkeypatch, capsys) -> None:
    """The other stages are kept from the hour before. The folder of the steps stays."""
    stages = tuple(s._replace(unneeded=lambda job: "") if s.name == "graphs" else s for s in STAGES)
    monkeypatch.setattr(first_hour, "STAGES", stages)
    monkeypatch.setattr(first_hour, "execute", lambda command, log, *more: log.write_text("error: no capture\n"))
    code, found = the_hour(sound[2])
    assert code == 0 and found["graphs"]["status"] == "fail" and found["graphs"]["reason"] == "error: no capture"
    assert (
        found["graphs"]["command"].endswith("rollout.enforce_eager=false") and "/graphs" in found["graphs"]["command"]
    )
    assert Path(found["steps"]["figures"]["run"]).exists()
    said = capsys.readouterr().out
    assert "result: all passed that the run needs; failed: graphs" in said
    assert "do:  Keep rollout.enforce_eager: true" in said


def test_another_configuration_is_another_hour(sound, monkeypatch) -> None:
    monkeypatch.setattr(first_hour, "execute", lambda command, log, *more: log.write_text("error: not this time\n"))
    code, stages = the_hour(sound[2], "optim.lr=1e-3")
    assert code == 1 and stages["groups"]["reason"] == "error: not this time"
    assert "optim.lr=1e-3" in stages["groups"]["command"]
    assert status(stages)["layers"] == status(stages)["steps"] == "skipped"
    assert stages["steps"]["reason"] == "needs groups and layers, which have not passed"


# ------------------------------------------------------------------------------------------------ planted faults


def reduce_wrongly(real: Callable, tensor: torch.Tensor, *args, group=None, **kwargs) -> None:
    """Rank 1 gets a wrong answer from every all-reduce over the expert group."""
    real(tensor, *args, group=group, **kwargs)
    mine = group not in (None, dist.group.WORLD) and group.group_desc.startswith("EXPERT_MODEL")
    if mine and dist.get_rank() == 1:
        tensor[2] += 1


def test_faults_are_named_by_their_stages_and_what_needs_them_is_skipped(tmp_path, monkeypatch, capsys) -> None:
    write_config(tmp_path)
    monkeypatch.setattr(first_hour, "execute", hour.forked)
    with monkeypatch.context() as patch:
        instead(groups.dist, "all_reduce", reduce_wrongly)(patch)
        instead(kernels, "rotary", lambda real, x, cos, sin: real(x, cos, -sin))(patch)
        code, stages = the_hour(tmp_path)
    assert code == 1 and list(status(stages).values()) == ["pass", "fail", "fail", *["skipped"] * 4]
    assert stages["groups"]["reason"].startswith("expert, all-reduce: WRONG in ranks [0, 1]: element 2 is 4, not 3")
    assert stages["operators"]["reason"].startswith("rotary in ")
    said = capsys.readouterr().out
    assert "2 groups     FAIL" in said and "4 layers     skipped" in said
    assert "result: failed: groups, operators; skipped: layers, self-test, steps, graphs" in said

    without_update("model.layers.0.mlp.experts.6")(monkeypatch)
    code, stages = the_hour(tmp_path)
    assert code == 1 and list(status(stages).values()) == ["pass", "pass", "pass", "fail", "pass", "skipped", "skipped"]
    assert stages["doctor"]["kept"] and "kept" not in stages["groups"]
    assert "stand out by their median, first: 6 of layer 0 (" in stages["layers"]["reason"]


def test_a_machine_without_what_the_device_needs_fails_in_the_doctor(tmp_path, monkeypatch) -> None:
    """configs/qwen3.yaml is for NPUs. The doctor names the missing software and data files."""
    for variable in ("ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    job = a_job(tmp_path, "qwen3.yaml", ranks=16)
    with open(tmp_path / "lock", "w") as lock:
        result = first_hour.run_stage(STAGES[0], job, 60, lock)
    assert result["status"] == "fail" and {"CANN", "data"} <= set(result["reason"].split(", ")), result["reason"]
    assert any(line.startswith("fail  data: ") for line in result["lines"])


def a_job(folder: Path, config: str, ranks: int, *overrides: str) -> Job:
    path = str(ROOT / "configs" / config)
    cfg = load_config(path, overrides)
    return Job(path, overrides, cfg, ranks, cfg.device, folder)


def write_run(job: Job, *peaks: float, phase: str = "update", folder: str = "run", **last: object) -> Path:
    """The files of a run whose steps used these GiB of the device; ``last``: of its last metrics."""
    run = job.folder / folder / "tiny-1"
    run.mkdir(parents=True)
    timing = [{"step": i, "timing/step_s": 9.0 + i, "perf/peak_rss_gib": 2.0, "perf/peak_device_gib": gib,
               "perf/peak_device_phase": phase} for i, gib in enumerate(peaks)]  # fmt: skip
    metrics = [{"step": i, "rollout/logp_gap_mean": 0.01 * i} for i in range(len(peaks))]
    for name, rows in (("timing", timing), ("metrics", [*metrics[:-1], metrics[-1] | last])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.folder / "log").touch()
    return run


def outcome(job: Job, *peaks: float, **more: object) -> object:
    """What steps_outcome says of such a run."""
    write_run(job, *peaks, **more)
    return first_hour_stages.steps_outcome(job, job.folder / "log", 0)


@pytest.mark.parametrize(
    ("seconds", "gap", "take"), [(3.0, 0.02, True), (3.0, 0.05, False), (13.0, 0.02, False)], ids=str
)
def test_graphs_are_taken_if_they_are_faster_and_the_log_probs_agree(tmp_path, seconds, gap, take) -> None:
    """Answers of 100 tokens in 12 s without graphs, 120 ms a token, and a gap of 0.02; one of three texts differs."""
    job = a_job(tmp_path, "qwen3.yaml", 16, "model.path=none/Qwen3-30B-A3B-Instruct-2507")
    for folder, sampling, texts, own_gap in (("run", 12.0, "abc", 0.02), ("graphs", seconds, "abd", gap)):
        run = write_run(job, 20.0, 21.0, 22.0, folder=folder)
        timing = [
            json.loads(line) | {"timing/generate_s": sampling}
            for line in (run / "timing.jsonl").read_text().splitlines()
        ]
        own = [{"step": step, "response_length/max": 100, "rollout/logp_gap_mean": own_gap} for step in range(3)]
        shown = [{"step": step, "completion": f"{text}{step}"} for step in (1, 2) for text in texts]
        for name, rows in {"timing": timing, "metrics": own, "completions": shown}.items():
            (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = first_hour_stages.graphs_outcome(job, tmp_path / "log", 0)
    assert not found.wrong and found.figures["token_ms"] == pytest.approx(seconds * 10)
    assert found.lines[0].startswith(f"a token takes {seconds * 10:.3g} ms with graphs, 120 ms without")
    assert found.lines[1] == "1 of 3 completions of the first step differ"
    assert found.lines[-1].endswith(f"enforce_eager: {'false' if take else 'true'}")
    assert found.figures["timing"]["timing/generate_s"] == seconds  # for preflight.py --calibrate


def test_graphs_are_tried_where_an_engine_has_them_and_the_run_has_not(tmp_path) -> None:
    assert first_hour_stages.without_graphs(a_job(tmp_path, "qwen3.yaml", 16)) == ""
    with_graphs = a_job(tmp_path, "qwen3.yaml", 16, "rollout.enforce_eager=false")
    assert "decoded with graphs" in first_hour_stages.without_graphs(with_graphs)


def test_memory_beyond_the_plan_and_metrics_that_are_not_finite_fail_the_steps(tmp_path) -> None:
    job = a_job(tmp_path / "within", "qwen3.yaml", 16, "model.path=none/Qwen3-30B-A3B-Instruct-2507")
    memory = job.verdict().memory
    limit = memory.peak / 2**30
    found = outcome(job, 20.0, limit - 0.1, 20.0)
    assert not found.wrong and found.figures["step_seconds"] == 10.0 and found.figures["logp_gap_mean"] == 0.02
    assert found.lines[-1].startswith(f"device memory: at most {limit - 0.1:.2f} GiB in update; planned: ")
    found = outcome(job._replace(folder=tmp_path / "more"), 20.0, 20.0, limit + 0.1, phase="sync")
    planned = memory.phases[memory.fullest] / 2**30
    assert found.wrong == (
        f"{limit + 0.1:.2f} GiB of device memory in sync, planned: {planned:.2f}, {limit:.2f} with its margin"
    )
    tiny = a_job(tmp_path / "tiny", "tiny_cpu.yaml", 2)
    assert outcome(tiny, 1.0, 1.0, 1.0, nonfinite=["actor/loss"]).wrong == "not finite: actor/loss"


def test_a_layout_that_the_plan_refuses_is_not_started(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(first_hour, "execute", lambda *args: pytest.fail("started"))
    job = a_job(tmp_path, "qwen3.yaml", 16, "model.path=none/Qwen3-30B-A3B-Instruct-2507", "rollout.kv_cache_mib=60000")
    result = first_hour.run_stage(STAGES[5], job, 60, None)
    assert result["status"] == "fail" and "preflight.py refuses this run" in result["reason"]
    assert "memory: " in result["reason"]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "step 1/3\nstopped: checks.logp_gap: 0.3 nats\n  look at: weights\nTraceback\nx.ChildFailedError: \n",
            "stopped: checks.logp_gap: 0.3 nats; look at: weights",
        ),
        (
            "Traceback (most recent call last):\n  File x\nRuntimeError: EI0006: time\ntorch.x.ChildFailedError: a\n",
            "RuntimeError: EI0006: time",
        ),
        ("", "exit code 1: no output"),
    ],
)
def test_a_failing_step_is_told_by_the_runs_own_line(log, reason, tmp_path) -> None:
    (tmp_path / "log").write_text(log)
    job = a_job(tmp_path, "tiny_cpu.yaml", 2)
    assert first_hour_stages.steps_outcome(job, tmp_path / "log", 1).wrong == reason


# ------------------------------------------------------------------------------------------------ killed, hung


TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_stage_that_does_not_end_is_ended_with_its_processes_and_says_so(tmp_path) -> None:
    stage = STAGES[0]._replace(command=lambda job: [sys.executable, "-c", TREE])
    job = a_job(tmp_path, "tiny_cpu.yaml", 2)
    with open(tmp_path / "lock", "w") as lock:
        result = first_hour.run_stage(stage, job, 3, lock)
    child = (tmp_path / "1-doctor.log").read_text().strip()
    assert result["status"] == "fail"
    assert result["reason"] == f"ended after 0.05 minutes, its limit; in its log: {child}"
    deadline, stat = time.monotonic() + 60, Path(f"/proc/{child}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["FOLDER/run.yaml", "optim.rate=1"], "optim.rate: unknown key"),
        (["FOLDER/run.yaml", "--ranks", "3"], "3 ranks (RANKS=N for another number): parallel.expert: 2 does not"),
        (["FOLDER/run.yaml", "--ranks", "9" * 28], "needed: whole numbers of 1 or more"),
        (["FOLDER/run.yaml", "--report", "FOLDER/run.yaml"], "run.yaml: not valid JSON"),
        (["FOLDER/run.yaml", "--minutes", "5 5"], "MINUTES: found '5 5'; needed: 7 numbers above 0, one a stage"),
        (["FOLDER/run.yaml", "train.out_dir=FOLDER/run.yaml"], "needed: a place to write"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(first_hour, "execute", lambda *args: pytest.fail("started"))
    write_config(tmp_path)
    code = first_hour.main([argument.replace("FOLDER", str(tmp_path)) for argument in arguments])
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1 and words in said, said


def test_ranks_are_the_devices_that_are_shown(monkeypatch) -> None:
    cfg = load_config(ROOT / "configs" / "qwen3.yaml")
    assert first_hour.default_ranks(load_config(ROOT / "configs" / "tiny_16.yaml"), "cpu") == 16
    monkeypatch.setattr(first_hour.Machine, "device_nodes", lambda self, name: [0] * 8 * (name == "davinci"))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    assert first_hour.default_ranks(cfg, "npu") == 4
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
    assert first_hour.default_ranks(cfg, "npu") == 8


# ------------------------------------------------------------------------------------------------ real processes


@pytest.mark.slow
@pytest.mark.full
def test_the_script_is_killed_in_its_fourth_stage_and_finishes_when_started_again(tmp_path, monkeypatch) -> None:
    write_config(tmp_path)
    monkeypatch.setenv("PYTHON", sys.executable)
    command, folder = ("bash", "first_hour.sh", tmp_path / "run.yaml"), tmp_path / "out" / "first_hour-tiny"
    with started(*command, log=tmp_path / "first") as first:
        first.until((folder / "two_layers" / "config.json").exists)
        first.process.kill()
        first.process.wait()
        with started(*command, log=tmp_path / "second") as second:
            assert second.wait(500) == 0, second.text
        assert not first.living()
    for name in ("doctor", "groups", "operators"):
        assert f"{name}: pass (kept from an earlier start)" in second.text
    assert "result: all passed" in second.text
    assert json.loads((folder / "report.json").read_text())["passed"] and not (folder / "two_layers").exists()
