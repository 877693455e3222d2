"""What checks/self_test.py checks beside the updates: schedules, questions, answers, noise and evaluations.

Every formula is written apart from the trainer's. Evaluations are compared with checks/self_test_reference.py.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import aqn
import data_gsm8k
import learner
from aqn import NormNoise
from checks.self_test_reference import Named, State, advantages_of, forward, merged, rows_of, unknown
from engines.interface import Completion
from knobs import GENERATED, AqnConfig, Config, OptimConfig
from rollout import Rollout

GAP = {"fp32": 2e-3, "bf16": 0.1}  # nats a token
SAME = {"fp32": 1e-5, "bf16": 3e-3}  # largest relative difference of a merged weight, by rounding
BOUND = 5.0  # standard errors
LEAST = 5.0  # variance of the log-probs of all sampled tokens, from which their sum is compared with the entropy
ENDS = 2048  # of a longer run the first and the last so many steps are judged, and about as many between them
GSM8K = 7473  # its training questions; the files need not be here


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


def schedules(cfg: Config, findings: Findings) -> None:
    """Judge learning rate, noise and order of the questions over the steps of ``cfg``."""
    steps, key = cfg.train.steps, cfg.aqn.model_dump(include={"sigma_start", "sigma_end", "num_stages", "schedule"})
    judged = sorted({*range(steps)[:ENDS], *range(steps)[-ENDS:], *range(steps)[:: max(1, steps // ENDS)]})
    curves: dict[str, tuple[str, Callable[[int], float], Callable[[int], float]]] = {
        "rate": (
            "optim.decay",
            lambda s: learner.learning_rate(cfg.optim, s, steps),
            lambda s: rate(cfg.optim, s, steps),
        ),
        "sigma": ("aqn.schedule", lambda s: aqn.sigma_at(s, steps, **key), lambda s: sigma(cfg.aqn, s, steps)),
    }
    findings.add("order", *order(cfg))
    if cfg.aqn.schedule == "off":
        del curves["sigma"]
    else:
        findings.add("noise", *noise(cfg, judged[:: -(-len(judged) // 256)]))
    for name, (decides, real, own) in curves.items():
        if decides not in unknown(cfg):
            values = [(step, real(step), own(step)) for step in judged]
            largest = max(expected for *_, expected in values)
            wrong = [f"step {s + 1}: {x:.4g}, expected {y:.4g}" for s, x, y in values if abs(x - y) > 1e-9 * largest]
            text = f"{len(judged)} of the run's {steps} steps are as expected"
            findings.add(name, not wrong, f"{len(wrong)} steps differ; {wrong[0]}" if wrong else text)


def order(cfg: Config) -> tuple[bool, str]:
    """Is each question asked once in an epoch, shuffled, in another order in each epoch and seed, by the step alone?

    Judged for 64 to 8,192 questions, in the first steps (at most 1,024) and in the last epoch of the run.
    """
    count, end = cfg.rollout.prompts_per_step, cfg.train.steps
    n = max(64, min(cfg.data.num_train or (GENERATED if cfg.data.source == "arithmetic" else GSM8K), 8192, 256 * count))
    count = min(count, n)

    def asked(steps: Iterable[int], seed: int = cfg.train.seed) -> list[int]:
        questions = data_gsm8k.Questions(cast(Any, range(n)), seed)
        return [cast(Any, place) for step in steps for place in questions.pick(step, count)]

    judged, last = range(min(1024, max(end, -(-2 * n // count)))), (end * count - 1) // n * n  # the last epoch's first
    places = asked(judged)
    epochs = [places[i : i + n] for i in range(0, len(places), n)]
    parts = [*epochs, asked(range(last // count, end))[last % count :]]
    pairs = (
        (epochs[0], range(n)),
        (epochs[0][1:], epochs[0][:-1]),
        epochs[:2],
        (epochs[0], asked(judged, cfg.train.seed + 1)[:n]),
    )
    faults = {
        "a question is asked twice in an epoch": any(len(set(part)) < len(part) for part in parts),
        "an order is like that of the file, of another epoch or of another seed": any(
            abs(np.corrcoef(*pair)[0, 1]) > BOUND / n**0.5 for pair in pairs
        )
        or len(set(map(tuple, epochs))) < len(epochs),
        "what a step asks depends on the steps before it": any(
            asked([step]) != places[step * count :][:count] for step in (judged[-1], 0)
        ),
    }
    return not any(faults.values()), "; ".join(text for text, is_fault in faults.items() if is_fault) or (
        f"{n} questions in {len(judged)} steps, and in the last epoch of {end} steps"
    )


def noise(cfg: Config, judged: list[int]) -> tuple[bool, str]:
    """Do steps, norms and seeds have different noise of std sigma, and the same ones the same noise?"""
    size, clean = 0.01, {name: torch.ones(256) for name in ("a.norm.weight", "b.norm.weight")}

    def drawn(steps: list[int], seed: int) -> Tensor:
        plan = dict.fromkeys(clean, NormNoise())
        streams = [aqn.perturb(clean.items(), plan, clean, sigma=size, seed=seed, step=step) for step in steps]
        return torch.stack([x - 1 for stream in streams for _, x in stream])

    every, seed = drawn(judged, cfg.train.seed), cfg.train.seed
    rows = torch.cat([every, drawn(judged[-1:], seed + 1)])
    same, std = len(rows) - len(rows.unique(dim=0)), every.square().mean().sqrt().item()
    good = (
        not same and drawn(judged[-1:], seed).equal(every[-2:]) and abs(std / size - 1) < BOUND / every.numel() ** 0.5
    )
    return good, f"{same} of {len(rows)} norms and steps have the noise of another one; std {std:.4g}, sigma {size:g}"


# ------------------------------------------------------------------------------------------------ the tiny run


class Watch:
    """Judges what the tiny run asks of its engine and gives to it: questions, answers, rewards, noise, evaluations.

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
        self.calls: list[tuple[list[list[int]], dict[str, Any], list[list[Completion]]]] = []  # of the last evaluation
        self.asked: list[str] = []  # the questions of all steps so far
        self.saved: State | None = None
        self.noises: set[bytes] = set()

    def load_weights(self, real: Callable, engine: Any, pairs: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(pairs)  # the model is tiny
        self.held |= {name: x.detach().cpu().double() for name, x in pairs}
        real(engine, pairs)

    def load_adapter(self, real: Callable, engine: Any, factors: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (a, b) in factors.items():
            scale = self.cfg.lora.alpha / (self.cfg.lora.expert_rank if ".experts." in name else self.cfg.lora.rank)
            self.held[name] = self.base[name] + scale * (b.double() @ a.double()).detach().cpu()
        real(engine, factors)

    def sample(self, real: Callable, engine: Any, prompts: list[list[int]], **asked: Any) -> list[list[Completion]]:
        answers = real(engine, prompts, **asked)
        self.calls.append((prompts, asked, answers))
        return answers

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
        text = f"step {step + 1}: std {std:.3g}, sigma {size:.3g}, {len(self.noises)} different patterns so far"
        self.findings.add("noise", good, text)

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
        bad, earned = self._graded(texts, completions, self.answers)
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

    def _graded(
        self, texts: list[str], groups: list[list[Completion]], golds: dict[str, str]
    ) -> tuple[int, list[float | None]]:
        """The number of answers with a wrong end, and what each earns; None if methods differ on what a number is."""
        bad, earned = 0, []
        for text, one in ((text, one) for text, group in zip(texts, groups, strict=True) for one in group):
            stopped, tokens = one.finish_reason == "stop", one.tokens
            too_early = len(tokens) < self.cfg.rollout.max_new_tokens and not stopped
            bad += too_early or (tokens[-1] in self.stops) != stopped or not self.stops.isdisjoint(tokens[:-1])
            answer = self.tokenizer.decode(tokens[:-1] if stopped else tokens)
            right = float(re.findall("[0-9]+", answer)[-1:] == [golds.get(text)])
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
        good = not lost and optimizer_steps == saved.steps == now.steps
        text = (
            f"{len(lost)} tensors are not those of the save; optimizer steps {optimizer_steps}, {now.steps} were made"
        )
        self.findings.add("resume", good, text)

    def evaluate(self, real: Callable, run: Any, after_steps: int) -> None:
        """Run.evaluate, compared with the float64 model. NotAsExpected if they differ, except before the first step.

        The first step follows in any case: its rewards and ends of answers may show the cause.
        """
        self.calls.clear()
        real(run, after_steps)
        logged = run.log.evaluations()[-1]
        faults = self._evaluation_faults(learner_state(run.learner, 0).factors, logged)
        fault = next((text for is_fault, text in faults if is_fault), "")
        self.findings.add("evaluation", not fault, f"after {after_steps} steps: {fault or 'as expected'}")
        if fault and after_steps:
            raise NotAsExpected

    def _evaluation_faults(self, factors: Named, logged: dict[str, float]) -> Iterator[tuple[bool, str]]:
        """(Is it a fault?, what it is) for all that is checked of the last evaluation."""
        cfg, base, k, weights = self.cfg, self.base, self.cfg.eval.samples, merged(self.base, factors, self.cfg.lora)
        lines = [json.loads(line) for line in Path(str(cfg.data.test_path)).read_text().splitlines()]
        golds = {
            line["question"]: line["answer"].removeprefix("#### ") for line in lines[: cfg.eval.num_questions or None]
        }
        for name, x in weights.items():
            apart, most = (
                ((self.held[name] - x).norm() / x.norm()).item(),
                0 if x is base[name] else SAME[cfg.model.dtype],
            )
            yield apart > most, f"the engine has another policy than the trainer: {name} differs by {apart:.2g}"
        prompts = [prompt for asked, _, _ in self.calls for prompt in asked]
        answers = [group for _, _, groups in self.calls for group in groups]
        seeds = {seed for _, asked, _ in self.calls for seed in asked["seeds"]}
        sizes = {len(group) for group in answers}
        yield sizes != {1 + k}, f"{sizes} answers to a question; needed: a greedy one and {k}"
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        kinds = ("greedy", slice(1), 1.0), ("sampled", slice(1, None), cfg.eval.temperature)
        for kind, part, temperature in kinds[: 1 + bool(k)]:
            groups = [group[part] for group in answers]
            yield texts != list(golds), f"{kind}: {texts} are asked; needed: {list(golds)}"
            bad, earned = self._graded(texts, groups, golds)
            yield (
                bad > 0 or len(seeds) < len(texts),
                f"{kind}: {len(seeds)} seeds; {bad} answers do not end where they should",
            )
            rows = rows_of(cast(Any, SimpleNamespace(prompts=prompts)), [one for group in groups for one in group])
            logp, own = forward(weights, self.settings, rows.tokens, temperature)[3][:, :-1], rows.own[:, 1:]
            picked, mean = logp.gather(-1, rows.tokens[:, 1:, None])[..., 0], (logp.exp() * logp).sum(-1)
            apart = (picked - rows.sampled_logp[:, 1:])[own].abs().mean().item() * min(1, temperature)
            yield apart > GAP[cfg.model.dtype], f"{kind}: {apart:.2g} nats a token from the float64 model"
            if kind == "greedy":
                below = (logp.amax(-1) - picked)[own].mean().item()
                yield below > GAP[cfg.model.dtype], f"greedy: {below:.2g} nats a token below the likeliest tokens"
            else:
                variance = ((logp.exp() * logp.square()).sum(-1) - mean.square())[own].sum().item()
                z = (picked - mean)[own].sum().item() / max(variance, LEAST) ** 0.5
                yield abs(z) > BOUND, f"sampled: {z:.1f} standard errors from temperature {temperature:g}"
            figures = logged["eval/num_questions"], logged["eval/samples"], logged[f"eval/{kind}_accuracy"]
            low, high = (sum(unclear if x is None else x for x in earned) / len(earned) for unclear in (0.0, 1.0))
            right = figures[:2] == (len(golds), k) and low - 1e-6 <= figures[2] <= high + 1e-6
            yield not right, f"{kind}: {figures} are logged; needed: {len(golds)}, {k}, and {low:.3g} to {high:.3g}"


def learner_state(learner: learner.Learner, steps: int) -> State:
    """Factors and moments of the learner in float64. ``steps``: the optimizer steps that it should have made."""
    whole = learner.state()[0]
    factors, moments = ({k: x.make().detach().cpu().double() for k, x in whole[kind].items()}
                        for kind in ("adapter", "optimizer"))  # fmt: skip
    first, second = ({k: moments[f"{k}.{moment}"] for k in factors} for moment in ("exp_avg", "exp_avg_sq"))
    return State(factors, first, second, steps)
