"""What checks/self_test.py checks beside the updates: questions, answers, rewards, advantages, noise and resume.

Every formula is written apart from the trainer's.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import data_gsm8k
import learner
from checks.self_test_reference import Named, State, advantages_of, unknown
from engines.interface import Completion
from knobs import AqnConfig, Config, OptimConfig
from rollout import Rollout

GAP = {"fp32": 2e-3, "bf16": 0.1}  # nats a token
BOUND = 5.0  # standard errors


class NotAsExpected(Exception):
    """A check has failed; the findings say which one."""


class Interrupted(Exception):
    """The tiny run has ended after its first checkpoint."""


class Findings(dict[str, tuple[bool, str]]):
    """Name of a check -> (is it good?, what was measured: at the last time, or at the first failure)."""

    def add(self, name: str, good: bool, measured: str) -> None:
        if self.get(name, (True, ""))[0]:
            self[name] = (bool(good), measured)

    def good(self) -> bool:
        return all(good for good, _ in self.values())


# ------------------------------------------------------------------------------------------------ the configuration


def rate(optim: OptimConfig, step: int, steps: int) -> float:
    """AdamW's learning rate at ``step`` (from 0): equal steps up to lr, then down to min_lr_ratio x lr at the end."""
    if step < optim.warmup_steps:
        return optim.lr / optim.warmup_steps * (step + 1)
    done = (step - optim.warmup_steps) / max(1, steps - 1 - optim.warmup_steps)
    height = {"constant": 1.0, "linear": 1 - done, "cosine": math.cos(done * math.pi / 2) ** 2}[optim.decay]
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * height)


def sigma(noise: AqnConfig, step: int, steps: int) -> float:
    """The std of the noise at ``step`` (from 0): 0 in the first stage, then a geometric series; see aqn.sigma_at."""
    if noise.schedule in ("off", "constant"):
        return noise.sigma_start if noise.schedule == "constant" else 0.0
    stages, is_qerl = noise.num_stages, noise.schedule == "qerl"
    first = (lambda k: -(-k * steps // stages)) if is_qerl else (lambda k: k * max(1, steps // stages))  # of stage k
    stage = bisect.bisect_right(range(1, stages), step, key=first)
    share = (stage - 1) / max(1, stages - 1 - is_qerl)
    return noise.sigma_start ** (1 - share) * noise.sigma_end**share if stage else 0.0


# ------------------------------------------------------------------------------------------------ the tiny run


class Watch:
    """Judges what the tiny run asks of its engine and gives to it: questions, answers, rewards, noise.

    Its methods stand in for the product's, and get the real one as their first argument.
    """

    def __init__(self, cfg: Config, answers: dict[str, str], findings: Findings) -> None:
        model = Path(cfg.model.path)
        self.cfg, self.answers, self.findings = cfg, answers, findings
        self.tokenizer = data_gsm8k.load_tokenizer(str(model))
        self.settings = json.loads((model / "config.json").read_text())
        self.stops = set(json.loads((model / "generation_config.json").read_text())["eos_token_id"])
        self.base = {name: x.double() for name, x in load_file(model / "model.safetensors").items()}
        self.held: Named = {}  # the weights of the engine
        self.asked: list[str] = []  # the questions of all steps so far
        self.saved: State | None = None
        self.noises: set[bytes] = set()

    def load_weights(self, real: Callable, engine: Any, pairs: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(pairs)  # the model is tiny
        self.held |= {name: x.detach().cpu().double() for name, x in pairs}
        real(engine, pairs)

    def check_noise(self, step: int) -> None:
        """The norms of the engine must have the noise of this step, other noise than in the steps before."""
        size = sigma(self.cfg.aqn, step, self.cfg.train.steps)
        noise_of_norms = torch.cat([self.held[name] - x for name, x in self.base.items() if x.dim() == 1])
        std, before = noise_of_norms[noise_of_norms != 0].square().mean().sqrt().item(), len(self.noises)
        self.noises.add(noise_of_norms.numpy().tobytes())
        close = (
            self.cfg.model.dtype == "bf16"
            or abs(std - size) < BOUND * size / max(1, len(noise_of_norms[noise_of_norms != 0])) ** 0.5
        )
        good = close and len(self.noises) > before if size else not noise_of_norms.any()
        self.findings.add(
            "noise",
            good,
            f"step {step + 1}: std {std:.3g}, sigma {size:.3g}, {len(self.noises)} different patterns so far",
        )

    def check_inputs(
        self, batch: Rollout, completions: list[list[Completion]], advantages: Tensor, step: int
    ) -> Tensor:
        """Check questions, ends of answers, rewards and advantages. Returns the right advantages, (S,)."""
        add, n, when = self.findings.add, len(self.answers), f"step {step + 1}:"
        texts = self.asked[-len(batch.prompts) :]
        epochs = [self.asked[i : i + n] for i in range(0, len(self.asked), n)]
        known, twice = (
            sum(text in self.answers for text in texts),
            sum(len(epoch) - len(set(epoch)) for epoch in epochs),
        )
        whole = [tuple(self.answers), *(tuple(epoch) for epoch in epochs if len(epoch) == n)]
        same = len(whole) - len(set(whole))
        add(
            "questions",
            known == len(texts) and not twice and not same,
            f"{when} {known} of {len(texts)} are training questions; {twice} were asked twice in an epoch; {same} "
            "epochs have the order of the file or of another epoch",
        )
        bad, earned = self._graded(texts, completions)
        right = [x == y for x, y in zip(batch.rewards.flatten().tolist(), earned, strict=True) if y is not None]
        add("answers", not bad, f"{when} {bad} of {len(earned)} do not end where they should")
        add("rewards", all(right), f"{when} {right.count(False)} of {len(right)} are not what the answer earns")
        if "loss.advantage" in unknown(self.cfg):
            return advantages.cpu().double()
        by_group = [advantages_of(group, self.cfg.loss.advantage) for group in batch.rewards.tolist()]
        expected = torch.tensor(by_group, dtype=torch.float64).flatten()
        apart = (advantages.cpu().double() - expected).abs().max().item()
        add("advantages", apart < 1e-3, f"{when} largest difference {apart:.1g}, at most 1e-3")
        return expected

    def _graded(self, texts: list[str], groups: list[list[Completion]]) -> tuple[int, list[float | None]]:
        """The number of answers with a wrong end, and what each earns; None if methods differ on what a number is."""
        bad, earned = 0, []
        for text, one in ((text, one) for text, group in zip(texts, groups, strict=True) for one in group):
            stopped, tokens = one.finish_reason == "stop", one.tokens
            too_early = len(tokens) < self.cfg.rollout.max_new_tokens and not stopped
            bad += too_early or (tokens[-1] in self.stops) != stopped or not self.stops.isdisjoint(tokens[:-1])
            answer = self.tokenizer.decode(tokens[:-1] if stopped else tokens)
            right = float(re.findall("[0-9]+", answer)[-1:] == [self.answers.get(text)])
            earned.append(None if re.search(r"[-.,]", answer) else right)
        return bad, earned

    def save(self, real: Callable, run: Any, after_steps: int) -> None:
        """Run.save. The first time the run is ended there, as by a kill."""
        real(run, after_steps)
        if not self.saved:
            self.saved = learner_state(run.learner, run.learner.optimizer_steps)
            raise Interrupted

    def check_resume(self, saved: State, now: State, optimizer_steps: int) -> None:
        """A resumed run must go on with the state that was in memory when it was saved."""
        kinds = (saved.factors, now.factors), (saved.first, now.first), (saved.second, now.second)
        lost = [name for then, resumed in kinds for name, x in then.items() if not x.equal(resumed[name])]
        self.findings.add(
            "resume",
            not lost and optimizer_steps == saved.steps == now.steps,
            f"{len(lost)} tensors are not those of the save; optimizer steps {optimizer_steps}, {now.steps} were made",
        )


def learner_state(learner: learner.Learner, steps: int) -> State:
    """Factors and moments of the learner in float64. ``steps``: the optimizer steps that it should have made."""
    whole = learner.state()[0]
    factors, moments = ({k: x.make().detach().cpu().double() for k, x in whole[kind].items()}
                        for kind in ("adapter", "optimizer"))  # fmt: skip
    first, second = ({k: moments[f"{k}.{moment}"] for k in factors} for moment in ("exp_avg", "exp_avg_sq"))
    return State(factors, first, second, steps)
