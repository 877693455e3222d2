"""The trainer's side of the benchmarks does the work that it reports: token counts, log-probs and losses.

The completions of TRL's first step, with their log-probs, are replaced by random ones with log-probs of transformers
and PEFT. The comparison with TRL itself needs a separate environment, so no test makes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_step
import cases

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
