"""The trainer's side of the benchmarks does the work that it reports, and bench_gap.py sees a sampler that differs.

The completions of TRL's first step, with their log-probs, are replaced by random ones with log-probs of transformers
and PEFT. The comparison with TRL itself needs a separate environment, so no test makes it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_cases as cases
import bench_step

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
        inputs = [torch.tensor([prompt + answer.tolist()]) for prompt, answer in zip(prompts, tokens, strict=True)]
        found = [model(input_ids=row).logits[0, -NEW_TOKENS - 1 : -1].log_softmax(-1) for row in inputs]
        return torch.stack(found).gather(2, tokens[..., None])[..., 0]

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
    for _ in range(5):  # checks.sampling would stop the run after four steps
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
        [sys.executable, "-c", program], cwd=bench_step.HERE, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


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
@pytest.mark.full
@pytest.mark.vllm
def test_vllms_gap_is_that_of_its_kernels(tmp_path: Path) -> None:
    *_, fp32, bf16 = measured("bench_gap", tmp_path / "gap.json", "--vllm", "--steps", "2")
    assert fp32["engine"] == bf16["engine"] == "vllm"
    assert 0 < fp32["gap"] < 1e-5 and 1e-3 < bf16["gap"] < 1e-2


@pytest.mark.slow
def test_the_phases_beside_the_roofline_are_those_of_the_step(tmp_path: Path) -> None:
    """No phase is left out on either side, and at the measured rates of this machine none is faster."""
    options = ["loss.kl=none", "rollout.max_new_tokens=24", "--steps", "3"]
    *phases, step = measured("bench_floor", tmp_path / "floor.json", *untrained(tmp_path), *options)
    assert [row["phase"] for row in phases] == ["sync", "generate", "update"]
    assert all(row["times the roofline"] > 1 for row in phases), phases
    assert step["roofline s"] == pytest.approx(sum(row["roofline s"] for row in phases))
    assert step["s"] == pytest.approx(sum(row["s"] for row in phases), rel=0.2)  # of medians
