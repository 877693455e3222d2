"""The trainer's side of the benchmarks does the work that it reports, and bench_gap.py sees a sampler that differs.

bench_step.py itself compares losses and log-probs with TRL's in each of its runs. TRL needs a separate environment, so
no test makes that comparison.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_cases as cases
import bench_step

NEW_TOKENS = 20  # checks.sampling needs at least this many, and must be off in the benchmarks
CHANGES = {"rollout__max_new_tokens": NEW_TOKENS, "tiny_model__num_layers": 1}


@pytest.mark.slow
def test_benchmarked_trainer_samples_every_token_and_computes_the_loss_of_its_settings(tmp_path: Path) -> None:
    peer, ready = bench_step.ready_peer("all_r32_64", tmp_path, **CHANGES)
    assert len(ready["prompts"]) == cases.PROMPTS and ready["startup_cpu_s"] > 0
    for _ in range(5):  # checks.sampling would stop the run after four steps
        record = peer.ask("step")
        assert record["new_tokens"] == cases.PROMPTS * cases.GROUP * NEW_TOKENS
        assert record["logp_gap"] < bench_step.LOGP_BOUND
        # Advantages sum to 0 in each group of equal lengths, so the loss is the penalty alone.
        assert record["loss"] == pytest.approx(cases.KL_COEF * record["kl"], abs=1e-6) and record["kl"] > 1e-4
        assert 0 < record["phases"]["generate"] < record["cpu_s"]
    peer.close()


def measured(name: str, out: Path, *arguments: str) -> list[dict]:
    """The table of a benchmark, which runs as a command."""
    command = [sys.executable, str(bench_step.HERE / f"{name}.py"), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())["table"]


def untrained(folder: Path) -> list[str]:
    """A configuration with changes that leave out the warm start of its model."""
    return ["configs/tiny_cpu.yaml", "parallel.expert=1", "tiny_model.warm_start_steps=0", f"model.path={folder}/model"]


@pytest.mark.slow
@pytest.mark.full
def test_the_embedded_sampler_has_no_gap_unless_its_weights_are_rounded(tmp_path: Path) -> None:
    sound = measured("bench_gap", tmp_path / "gap.json", "--steps", "2")
    changes = [*untrained(tmp_path), "rollout.round_bits=4", "--steps", "2"]
    rounded = measured("bench_gap", tmp_path / "rounded.json", *changes)
    for rows in (sound, rounded):
        assert [(row["engine"], row["dtype"]) for row in rows] == [("torch", "fp32"), ("torch", "bf16")]
    assert all(row["gap"] < 1e-6 and row["largest"] < 1e-5 for row in sound), sound
    assert all(row["largest"] > row["gap"] > 1e-3 for row in rounded), rounded


@pytest.mark.slow
def test_the_phases_beside_the_roofline_are_those_of_the_step(tmp_path: Path) -> None:
    """No phase is left out on either side, and at the measured rates of this machine none is faster."""
    options = ["loss.kl=none", "rollout.max_new_tokens=24", "--steps", "3"]
    *phases, step = measured("bench_floor", tmp_path / "floor.json", *untrained(tmp_path), *options)
    assert [row["phase"] for row in phases] == ["sync", "generate", "update"]
    assert all(row["times the roofline"] > 1 for row in phases), phases
    assert step["roofline s"] == pytest.approx(sum(row["roofline s"] for row in phases))
    assert step["s"] == pytest.approx(sum(row["s"] for row in phases), rel=0.2)  # of medians
