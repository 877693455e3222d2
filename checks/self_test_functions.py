"""What the self-test can judge of functions that a configuration names (FILE.py:NAME): that they repeat themselves, and
treat the completions of a question alike. Whether they reward the right thing, it cannot know.
"""

import torch

import data_gsm8k
import grpo
from checks.self_test_schedules import Findings
from inputs import functions
from inputs.scoring import Call, Scorer
from knobs import Config

SAME = "gives the same for the same rows in any order"
APART = "depends on the order of its rows, or on chance"
ROWS = 8  # training questions whose gold answers are scored twice


def judge_functions(cfg: Config, findings: Findings) -> None:
    """Add a finding for each function of ``cfg``. InputError if one of them fails."""
    if cfg.reward.function:
        rows = data_gsm8k.read(cfg.data, "train")[0][:ROWS]
        calls = [Call(row.answer, row.gold, row.columns) for row in rows]
        scorer = Scorer(cfg.reward)
        first, again = scorer(calls), scorer(calls[::-1])[::-1]
        scorer.close()
        same = "scores answers equally in two calls" if first == again else "scores an answer differently in two calls"
        findings.add("reward.function", first == again, f"{cfg.reward.function} {same}; what it rewards is not judged")
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(4).roll(1), torch.arange(6).roll(1)
    if callable(advantage := functions.advantage(cfg.loss.advantage)):
        rewards = torch.randint(0, 3, (4, 6), generator=generator) / 2
        found, again = advantage(rewards), advantage(rewards)
        turned = advantage(rewards[rows][:, columns])
        alike = torch.equal(found, again) and torch.allclose(turned, found[rows][:, columns], atol=1e-5)
        findings.add("loss.advantage", alike, f"{cfg.loss.advantage}: {SAME if alike else APART}")
    if callable(loss := functions.token_loss(cfg.loss.kind)):
        logp, old, advantages = (torch.randn(4, 6, generator=generator) for _ in range(3))
        mask = (torch.arange(6) < torch.tensor([[6], [3], [1], [5]])).float()

        def losses(order: torch.Tensor) -> torch.Tensor:
            own, before, better = ((x * mask)[order] for x in (logp, old, advantages))
            return loss(grpo.LossInputs(own, before, better, mask[order], 0.2, 0.2, 3.0))[0] * mask[order]

        plain = losses(torch.arange(4))
        alike = torch.equal(plain, losses(torch.arange(4))) and torch.allclose(losses(rows), plain[rows], atol=1e-5)
        findings.add("loss.kind", alike, f"{cfg.loss.kind}: {SAME if alike else APART}")
