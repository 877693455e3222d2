"""The trainer's side of the benchmarks does the work that it reports, and its sampler agrees with it.

bench_step.py itself compares losses and log-probs with TRL's in each of its runs. TRL needs a separate environment, so
no test makes that comparison.
"""

from pathlib import Path

import bench_cases as cases
import bench_step
import pytest

NEW_TOKENS = 20  # checks.sampling needs at least this many, and must be off in the benchmarks
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
