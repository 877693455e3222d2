"""The trainer's side of the benchmarks does the work that it reports, and bench_gap.py sees the errors that it plants.

The completions of TRL's first step, with their log-probs, are replaced by random ones with log-probs of transformers
and PEFT. The comparison with TRL itself needs a separate environment, so no test makes it. Of bench_gap.py only the
tiny shape runs here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_dry_run
import bench_floor
import bench_gap
import bench_step
import cases

from engines.interface import Completion

NEW_TOKENS = 20  # checks.sampling needs at least this many, and must be off in the benchmarks
CHANGES = {"rollout__max_new_tokens": NEW_TOKENS, "tiny_model__num_layers": 1}


def theirs(work: Path, prompts: list[list[int]]) -> dict:
    """Random completions; their log-probs by transformers and PEFT, and their loss by the formula."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, work / "adapter_all_r32_64")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 512, (len(prompts), NEW_TOKENS), generator=generator)
    advantages = torch.randn(len(prompts), generator=generator)

    @torch.no_grad()
    def logp() -> torch.Tensor:
        rows = []
        for prompt, answer in zip(prompts, tokens, strict=True):
            logits = model(input_ids=torch.tensor([prompt + answer.tolist()])).logits[0, len(prompt) - 1 : -1]
            rows.append(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0])
        return torch.stack(rows)

    policy = logp()
    with model.disable_adapter():
        base_logp = logp()
    x = base_logp - policy
    loss = (-advantages[:, None] + cases.KL_COEF * (x.exp() - x - 1)).mean()
    return {"prompts": prompts, "tokens": tokens.tolist(), "advantages": advantages.tolist(), "logp": policy.tolist(),
            "reference": base_logp.tolist(), "loss": loss.item()}  # fmt: skip


@pytest.mark.slow
def test_benchmarked_trainer_samples_every_token_and_computes_the_same_losses(tmp_path: Path) -> None:
    peer, ready = bench_step.ready_peer("all_r32_64", tmp_path, **CHANGES)
    assert len(ready["prompts"]) == cases.PROMPTS and ready["startup_cpu_s"] > 0
    (tmp_path / "record.json").write_text(json.dumps(theirs(tmp_path, ready["prompts"])))
    agreed = peer.ask(f"check {tmp_path / 'record.json'}")
    bench_step.check_equal_work("all_r32_64", agreed)
    with pytest.raises(AssertionError):
        bench_step.check_equal_work("all_r32_64", agreed | {"loss": agreed["loss"] + 1e-3})
    for _ in range(6):  # checks.sampling would stop the run after four steps
        record = peer.ask("step")
        assert record["new_tokens"] == cases.PROMPTS * cases.GROUP * NEW_TOKENS
        assert record["logp_gap"] < bench_step.LOGP_BOUND
        # Advantages sum to 0 in each group of equal lengths, so the loss is the penalty alone.
        assert record["loss"] == pytest.approx(cases.KL_COEF * record["kl"], abs=1e-6) and record["kl"] > 1e-4
        assert 0 < record["phases"]["generate"] < record["cpu_s"]
    peer.close()


def test_the_measured_trainer_imports_nothing_that_only_the_benchmark_needs() -> None:
    """Its peak memory is compared with TRL's; pandas with pyarrow would add 67 MiB that no training run has."""
    program = "import sys, our_side; print(sorted({'pandas', 'pyarrow', 'matplotlib', 'scipy'} & sys.modules.keys()))"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(bench_step.__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[]\n"


# ------------------------------------------------------------------------------------------------ the gap by its causes


def measured_gaps(engine: str, folder: Path) -> dict[str, dict[str, dict]]:
    """dtype -> cause -> the row that bench_gap.py prints for the tiny shape."""
    command = [sys.executable, bench_gap.__file__, "--engine", engine, "--shape", "tiny", "--out", str(folder / "gap")]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found: dict[str, dict[str, dict]] = {"fp32": {}, "bf16": {}}
    for row in json.loads((folder / "gap").read_text())["table"]:
        assert row["engine"] == engine and row["shape"] == "tiny"
        found[row["dtype"]][row["cause"]] = row
    return found


def check_controls(by_cause: dict[str, dict]) -> None:
    """Every planted error is larger than the gap without it, and the lost update alone singles out its expert."""
    none, lost = by_cause["none"], ("an expert's update lost", "an expert's large update lost")
    planted = [row for name, row in by_cause.items() if name != "none" and name not in lost]
    assert len(planted) == len(by_cause) - 3 >= 8
    for row in planted:
        assert row["at least"] > 1.3 * none["high"], row["cause"]
    assert none["found"] == ""
    assert all(by_cause[name]["found"].startswith("expert 1 of layer 0 ") for name in lost)
    assert by_cause[lost[1]]["gap"] > 3 * by_cause[lost[0]]["gap"] > 6 * none["gap"]


@pytest.mark.slow
def test_the_causes_of_the_embedded_samplers_gap(tmp_path: Path) -> None:
    """In bf16 the sampler rounds as the trainer, so each cause that rounds otherwise is seen."""
    found = measured_gaps("embedded", tmp_path)
    for rows in found.values():
        check_controls(rows)
    assert found["bf16"]["none"]["gap"] < 1e-6 and found["fp32"]["none"]["gap"] < 1e-6
    for cause in ("trainer with factors apart", "experts weighted last", "the other cache's attention",
                  "router in bf16", "head in fp32"):  # fmt: skip
        assert found["bf16"][cause]["low"] > 3e-4, cause
    for cause in ("router in bf16", "head in bf16"):
        assert found["fp32"][cause]["low"] > 1e-4, cause
    for rows in found.values():
        for cause in ("trainer row by row", "sampler prompt by prompt", "routes replayed"):
            assert rows[cause]["gap"] < 1e-6, cause


@pytest.mark.slow
@pytest.mark.vllm
def test_the_causes_of_vllms_gap(tmp_path: Path) -> None:
    """In fp32 only a cause in bf16 is seen; in bf16 replay removes the tokens whose experts almost tie."""
    found = measured_gaps("vllm", tmp_path)
    for rows in found.values():
        check_controls(rows)
    seen = {cause for cause, row in found["fp32"].items() if row["low"] > 1e-5}
    assert seen == {"trainer's router in bf16", "trainer's head in bf16", "an expert's update lost",
                    "an expert's large update lost"}  # fmt: skip
    rows = found["bf16"]
    assert 1e-3 < rows["none"]["gap"] < 1e-2
    assert rows["routes replayed"]["largest"] < rows["none"]["largest"] / 2
    used, not_used = (rows[f"long prompts, prefix cache {word}"] for word in ("used", "not used"))
    assert used["gap"] == pytest.approx(not_used["gap"], rel=0.1)


def test_figures_of_a_gap_by_hand() -> None:
    """Rows of two tokens and one: the gap is of tokens, the interval of rows, whose means are 0.1 and 0.4."""
    rows = [([1], Completion([5, 6], [-1.0, -2.0], "stop")), ([2], Completion([7], [-3.0], "stop"))]
    found = bench_gap.figures(rows, [torch.tensor([-1.0, -1.8]), torch.tensor([-3.4])])
    half = 1.96 * 0.15  # the standard error of two values is half of their difference
    assert found["gap"] == pytest.approx(0.2) and found["equal"] == pytest.approx(1 / 3)
    assert (found["low"], found["high"]) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    assert found["largest"] == pytest.approx(0.4)


def test_dry_runs_of_every_layout_and_their_largest_differences() -> None:
    found = bench_dry_run.layouts()
    assert len(found) == 21 and not any("8gpu" in name for name in found)
    wanted = ["configs/qwen3.yaml", "parallel.tensor=4", "parallel.expert=16", "--ranks", "16"]
    assert found["run_16npu.sh tp4_ep16"] == wanted
    big = 2.0**30
    compared = [
        {"unit": "GiB", "planned": big, "found": 1.02 * big, "agrees": True},
        {"unit": "GiB", "planned": big, "found": 0.8 * big, "agrees": False},
        {"unit": "MiB sent", "planned": 1.0, "found": 9.0, "agrees": True},  # too small to count
    ]
    run = {"compared": compared, "phases": {"load": {"peak_bytes": 3 * 2**29}}, "seconds": 60.0, "rss_gib": 0.5}
    row = bench_dry_run.row("one", run)
    assert (row["bytes"], row["operations"], row["sent"], row["apart"]) == ("20.0%", "0.0%", "0.0%", 1)
    assert row["fullest GiB"] == 1.5


@pytest.mark.slow
def test_the_phases_beside_the_roofline_are_those_of_the_step(tmp_path: Path) -> None:
    """No phase is left out on either side, and at the measured rates of this machine none is faster."""
    command = [sys.executable, bench_floor.__file__, "configs/tiny_cpu.yaml", "parallel.expert=1", "loss.kl=none"]
    command += ["tiny_model.warm_start_steps=0", f"model.path={tmp_path}/model", "rollout.max_new_tokens=24"]
    command += ["--steps", "4", "--out", str(tmp_path / "floor.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    *phases, step = json.loads((tmp_path / "floor.json").read_text())["table"]
    assert [row["phase"] for row in phases] == ["sync", "generate", "update"]
    assert all(row["times the roofline"] > 1 for row in phases), phases
    assert step["roofline s"] == pytest.approx(sum(row["roofline s"] for row in phases))
    assert step["s"] == pytest.approx(sum(row["s"] for row in phases), rel=0.2)  # of medians
