"""The trainer's side of the benchmarks does the work that it reports, and its sampler agrees with it.

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
import bench_floor
import bench_step

from config import to_yaml

NEW_TOKENS = 20  # checks.sampling needs at least this many, and must be off in the benchmarks
MOVED = {
    "lora__rank": 64,  # x 128 inputs: with a bf16 matrix of at most 4,096 elements, the kernel depends on the rows
    "loss__entropy_coef": 0.1,  # the gradient, because a model with random weights has no right answer
    "optim__lr": 0.02,  # Adam's first update makes every element of B as large as this
}
CHANGES = {"rollout__max_new_tokens": NEW_TOKENS, "tiny_model__num_layers": 1}


@pytest.mark.slow
@pytest.mark.ci
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


def untrained(folder: Path) -> list[str]:
    """A configuration with changes that leave out the warm start of its model."""
    return ["configs/tiny_cpu.yaml", "parallel.expert=1", "tiny_model.warm_start_steps=0", f"model.path={folder}/model"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_embedded_sampler_has_no_gap_unless_its_weights_are_rounded(dtype: str, tmp_path: Path) -> None:
    """The second step counts: before the first update the adapters do nothing."""
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(to_yaml(cases.config(cases.CASES["all_r32_64"], tmp_path, 2, **MOVED)))
    settings = [
        *bench_floor.SETTINGS,
        f"model.dtype={dtype}",
        "checks.warn=[logp_gap, unparsable, truncated]",
        "train.steps=2",
    ]
    _, sound = bench_floor.train(str(tiny), settings)
    assert sound["rollout/logp_gap_mean"] < 1e-6 and sound["rollout/logp_gap_max"] < 1e-5
    config, *changes = untrained(tmp_path / "other")
    _, rounded = bench_floor.train(config, [*changes, *settings, "rollout.round_bits=4"])
    assert rounded["rollout/logp_gap_max"] > rounded["rollout/logp_gap_mean"] > 1e-3


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.nightly
def test_the_phases_beside_the_roofline_are_those_of_the_step(tmp_path: Path) -> None:
    """No phase is left out on either side. Of two steps one counts, so the medians are the seconds of that step."""
    out = tmp_path / "floor.json"
    options = ["loss.kl=none", "rollout.max_new_tokens=24", "--steps", "2", "--out", str(out)]
    command = [sys.executable, str(bench_step.HERE / "bench_floor.py"), *untrained(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text())
    *phases, step = record["table"]
    names = ["sync", "generate", "update"]
    assert [row["phase"] for row in phases] == names
    (counted,) = record["measured"]["steps"]
    timed = {key for key in counted if key.startswith("timing/") and key.endswith("_s")}
    assert timed == {f"timing/{name}_s" for name in (*names, "step")}
    assert step["roofline s"] == pytest.approx(sum(row["roofline s"] for row in phases))
    assert sum(row["s"] for row in phases) <= step["s"] + 0.001
