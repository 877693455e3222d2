"""Does the code that is installed here learn? Trains a tiny model by the method of a configuration, in under a minute.

    python preflight.py --self-test [CONFIG] [section.key=value ...]

The trainer's own run (train_grpo.start) on a random model and toy questions. Three of its updates are compared with a
second implementation in float64 (plan/self_test_reference.py); then the run must reach a known reward. Exit code 0: it
learned, 1: it did not, 2: input that cannot be used. docs/self_test.md: what was measured, and what this does not see.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import aqn
import data_gsm8k
import hf_config
import reward_gsm8k
import startup
import tiny_model
import train_grpo
import weights_hf
from config import load_config
from config_rules import OTHER_RULES
from engines.interface import Completion
from input_files import InputError
from knobs import Config
from learner import Learner, StepTimer
from plan.self_test_reference import Named, State, advantages_of, forward, merged, rows_of, updated
from rollout import Rollout
from tripwires import Tripped

OBSERVED, LATER = (0, 1), 9  # steps whose updates are repeated in float64; in the later one the KL penalty also alone
STEPS, LAST, LEVEL = 50, 10, 0.3  # mean reward of the last steps; a sound run may settle on one answer: 0.5
PROMPTS, GROUP, NEW_TOKENS = 16, 16, 6
STOPS = 64  # tokens that end an answer, of 259
SEED = 0
ANSWERS = (("a", "3"), ("b", "7"))  # to a question that ends so
LARGER = ("lm_head.weight", "model.embed_tokens.weight")
WHOLE = {"fp32": 0.05, "bf16": 0.7}  # largest relative difference of a whole gradient; docs/self_test.md: what was seen
PIECE = {"fp32": 0.9, "bf16": 0.02}  # smallest share that a tensor, or an expert's part of one, has of what is expected
NORM = {"fp32": 0.01, "bf16": 0.25}  # relative difference of the gradient's norm
GAP = {"fp32": 2e-3, "bf16": 0.1}  # nats a token
# Tripwires of a run for which the self-test has a check of its own, or which a toy task would set off.
OWN_CHECKS = ("reward_constant", "unparsable", "truncated", "sampling", "impossible", "gradient_spike", "entropy")
LOOK_AT = {
    "questions": "data_gsm8k.Questions.pick; which file each split is read from",
    "answers": "data_gsm8k.stop_token_ids, and how the sampler ends an answer (torch_sampler.py)",
    "rewards": "reward_gsm8k.py, startup.scorer, and the order in which rollout.sample gathers",
    "advantages": "grpo.group_advantages",
    "sampler": "weights_hf.export (the merge, alpha / R), weight_sync.py, torch_decoder.py; kernels.py on this device",
    "gradient": "learner.py (loss, masks, counts), grpo.py, lora_megatron.py, packing.py, backward of kernels.py",
    "AdamW": "Learner._step: moments, step count, learning rate, weight decay",
    "KL": "Learner._reference_logp (adapters off?), grpo.kl, the sign and coefficient in Learner._loss",
    "learning": "the log named below; run again with model.dtype=fp32, and with the loss of configs/tiny_cpu.yaml",
}

# ------------------------------------------------------------------------------------------------ the tiny run


def tiny_run(cfg: Config, folder: Path) -> Config:
    """The method of ``cfg`` on the tiny model and the toy questions in ``folder``, on one rank."""
    updates = max(n for n in (1, 2, 4) if n <= cfg.rollout.prompts_per_step // cfg.optim.prompts_per_update or n == 1)
    kept = cfg.model_dump(mode="json")
    roles = [target for target in kept["aqn"]["targets"] if target in ("attention", "experts", "router")]
    tree = {
        "name": "self_test",
        "device": kept["device"],
        "model": kept["model"] | {"path": str(folder / "model")},
        "data": {
            "source": "gsm8k", "train_path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl"),
            "max_prompt_tokens": 16, "prompt_template": "{question}",
        },
        "rollout": {
            "prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": NEW_TOKENS,
            **{key: kept["rollout"][key] for key in ("temperature", "top_p", "top_k")},
        },
        "reward": {"method": "verl_flexible"},
        "lora": {"targets": kept["lora"]["targets"], "rank": 16, "alpha": 32.0, "expert_rank": 8},
        "loss": kept["loss"],
        "optim": {
            "lr": 3e-3, "warmup_steps": 0, "prompts_per_update": PROMPTS // updates,
            **{key: kept["optim"][key] for key in ("betas", "eps", "weight_decay", "max_grad_norm")},
        },
        "aqn": kept["aqn"] | {"targets": roles or ["attention", "experts"]},
        "replay": kept["replay"],
        "checks": dict.fromkeys(OWN_CHECKS, "off")
        | {f"logp_gap_{dtype}": 1.0 for dtype in GAP},
        "eval": {"samples": 0, "num_questions": 8},
        "train": {
            "steps": STEPS, "out_dir": str(folder / "out"), "checkpoint_every": 0, "resume": "never",
            "seed": SEED, "deterministic": kept["train"]["deterministic"],
        },
    }  # fmt: skip
    return Config.model_validate(tree)


def write_inputs(cfg: Config, folder: Path) -> dict[str, str]:
    """A random model of ``cfg``'s kind, and toy questions; returns the training questions with their answers.

    A question is a letter and a digit, which say nothing, and an a or a b: the answers are 3 and 7.
    """
    model = folder / "model"
    kind = hf_config.planned(cfg)[0].model_type
    tiny = {"architecture": kind, "vocab_size": 259, "num_experts": 4, "expert_width": 32, "shared_expert_width": 32}
    settings = hf_config.tiny_settings(Config.model_validate({
        "model": {"path": str(model)}, "tiny_model": tiny, "data": {"source": "arithmetic"}, "train": {"steps": 1},
    }))  # fmt: skip
    tiny_model.build_tokenizer([], settings["vocab_size"], model)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]  # a prompt is the bare question
    stops = [settings["eos_token_id"], *range(settings["vocab_size"] - STOPS, settings["vocab_size"])]
    for name, content in (
        ("config.json", settings),
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", {"eos_token_id": stops, "pad_token_id": 0}),
    ):
        (model / name).write_text(json.dumps(content))
    generator, w = torch.Generator().manual_seed(SEED), {}
    for name, shape in weights_hf.tensor_shapes(hf_config.read(model)).items():
        noise, scale = torch.randn(shape, generator=generator), 2 if name in LARGER else 1
        w[name] = 0.1 * noise + ("norm" in name) if len(shape) == 1 else scale * noise / shape[1] ** 0.5
    answers = {f"{letter}{digit} {which}": gold for letter in "uvwxyz" for digit in "0189" for which, gold in ANSWERS}
    questions = [json.dumps({"question": text, "answer": f"#### {gold}"}) for text, gold in answers.items()]
    (folder / "train.jsonl").write_text("\n".join(questions[:-8]) + "\n")
    (folder / "test.jsonl").write_text("\n".join(questions[-8:]) + "\n")
    # Both answers get the rows of likely first tokens in the head, so that some samples are right from the start.
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    prompts = torch.tensor([[vocabulary[c] for c in text.replace(" ", "\u0120")] for text in answers])
    likely = forward({n: x.double() for n, x in w.items()}, settings, prompts, 1.0)[3].exp().mean(0)
    likely[stops] = 0
    for place, (_, gold) in zip(likely.topk(2).indices.tolist(), ANSWERS, strict=True):
        w["lm_head.weight"][[place, vocabulary[gold]]] = w["lm_head.weight"][[vocabulary[gold], place]]
    w = {name: tensor.bfloat16().float() for name, tensor in w.items()}  # the same weights in either dtype
    save_file(w, model / "model.safetensors", metadata={"format": "pt"})
    return dict(list(answers.items())[:-8])


# ------------------------------------------------------------------------------------------------ judging a run


class NotAsExpected(Exception):
    """A check has failed; the findings say which."""


@dataclass
class Findings:
    """name of a check -> (whether it is good, what it saw: last, or where it failed first)."""

    checks: dict[str, tuple[bool, str]] = field(default_factory=dict)

    def add(self, name: str, good: bool, measured: str) -> None:
        if self.checks.get(name, (True, ""))[0]:
            self.checks[name] = (bool(good), measured)

    def good(self) -> bool:
        return all(good for good, _ in self.checks.values())


def compare(findings: Findings, name: str, step: int, found: Named, wanted: Named, dtype: str) -> None:
    """Two sets of tensors: the relative difference of the whole, and what the weakest piece has of its own."""
    pieces = {}
    for key, x in wanted.items():
        parts = enumerate(x) if x.dim() == 3 else [(None, x)]
        for e, part in parts:
            if (size := part.norm()) > 0.05 * x.norm():
                mine = found[key] if e is None else found[key][e]
                pieces[key + f"[{e}]" * (e is not None)] = ((mine * part).sum() / size**2).item()
    both = [found[key] - x for key, x in wanted.items()], list(wanted.values())
    squares = [torch.stack([x.square().sum() for x in side]).sum() for side in both]
    if not squares[1]:
        findings.add(name, not squares[0], f"step {step + 1}: 0 is expected, norm {squares[0].sqrt():.1g} was found")
        return
    apart, weakest = (squares[0] / squares[1]).sqrt().item(), min(pieces, key=pieces.get)
    findings.add(
        name,
        apart <= WHOLE[dtype] and pieces[weakest] >= PIECE[dtype],
        f"step {step + 1}: relative difference {apart:.1g}, at most {WHOLE[dtype]:g}; {weakest} has "
        f"{pieces[weakest]:.0%} of what is expected, at least {PIECE[dtype]:.0%}",
    )


class Observed(Learner):
    """The trainer's own learner, some of whose updates are computed again."""

    findings: Findings
    answers: dict[str, str]
    tokenizer: object
    state_before: State
    asked: frozenset = frozenset()

    def update(
        self, batch: Rollout, own: list[list[Completion]], advantages: Tensor, step: int, timer: StepTimer
    ) -> dict[str, float]:
        if step not in (*OBSERVED, LATER):
            return super().update(batch, own, advantages, step, timer)
        cfg, say = self.cfg, self.findings
        rows = rows_of(batch, [one for group in own for one in group])
        mine = self._inputs(batch, own, advantages, step)  # (S,)
        c = json.loads(Path(cfg.model.path, "config.json").read_text())
        base = {name: x.double() for name, x in load_file(Path(cfg.model.path, "model.safetensors")).items()}
        updates = PROMPTS // cfg.optim.prompts_per_update
        if step == 0 or step == LATER:
            self.state_before = self._state(step * updates)
        before = self.state_before  # in step 2 what step 1 left, so that what was lost in between is seen
        if step == 0:
            say.add("AdamW", not any(x.any() for x in before.first.values()), "moments before the first step are not 0")
        if cfg.aqn.schedule == "off":
            with torch.no_grad():
                logp = forward(merged(base, before.factors, cfg.lora), c, rows.tokens, cfg.rollout.temperature)[0]
            gap = ((logp - rows.sampled_logp)[rows.own]).abs().mean().item()
            text = f"step {step + 1}: {gap:.1g} nats a token from the float64 model, at most {GAP[cfg.model.dtype]:g}"
            say.add("sampler", gap <= GAP[cfg.model.dtype], text)
        penalised = (cfg.loss.kl != "none" and cfg.loss.kl_coef) or cfg.loss.entropy_coef
        if step == LATER and penalised:
            tensors, counts = self._tensors()
            super().update(
                batch, own, torch.zeros_like(advantages), step, StepTimer(timer.heartbeat, step, timer.device)
            )
            expected, _ = updated(cfg, c, base, before, batch, rows, 0 * mine)
            decay = cfg.optim.betas[0] ** updates
            alone = [{k: x - decay * before.first[k] for k, x in s.first.items()} for s in (self._state(0), expected)]
            compare(say, "KL", step, *alone, cfg.model.dtype)
            self.restore(tensors, counts)
        metrics = super().update(batch, own, advantages, step, timer)
        after = self._state(before.steps + updates)
        expected, norm = updated(cfg, c, base, before, batch, rows, mine)
        found = metrics["actor/grad_norm"]
        good = abs(found - norm) <= NORM[cfg.model.dtype] * norm
        say.add("gradient", good, f"step {step + 1}: norm {found:.3g}, expected {norm:.3g}")
        compare(say, "gradient", step, after.first, expected.first, cfg.model.dtype)
        compare(say, "AdamW", step, after.second, expected.second, cfg.model.dtype)
        moved = [{k: s.factors[k] - x for k, x in before.factors.items()} for s in (after, expected)]
        compare(say, "AdamW", step, *moved, cfg.model.dtype)
        self.state_before = after
        if not say.good():
            raise NotAsExpected
        return metrics

    def _inputs(self, batch: Rollout, own: list[list[Completion]], advantages: Tensor, step: int) -> Tensor:
        """Questions, where answers end, rewards and advantages, computed again; returns the advantages, (S,)."""
        say = self.findings
        texts = [self.tokenizer.decode(prompt) for prompt in batch.prompts]
        known = sum(text in self.answers for text in texts)
        new = len(set(texts) - self.asked) if step == 1 else len(set(texts))  # none of these steps begins a new epoch
        text = f"step {step + 1}: {known} of {PROMPTS} are training questions, {new} were not in the step before"
        say.add("questions", known == new == PROMPTS, text)
        self.asked = frozenset(texts)
        stops = set(json.loads(Path(self.cfg.model.path, "generation_config.json").read_text())["eos_token_id"])
        every = [one for group in own for one in group]
        ends = [([t in stops for t in one.tokens], one.finish_reason == "stop") for one in every]
        bad = sum(
            any(is_stop[:-1]) or is_stop[-1] != said or (len(is_stop) < NEW_TOKENS and not said)
            for is_stop, said in ends
        )
        say.add("answers", not bad, f"step {step + 1}: {bad} of {len(every)} do not end where they should")
        wrong = judged = 0
        for text, group, rewards in zip(texts, own, batch.rewards.tolist(), strict=True):
            for one, reward in zip(group, rewards, strict=True):
                answer = self.tokenizer.decode(one.tokens[: len(one.tokens) - (one.finish_reason == "stop")])
                if not re.search(r"[-.,]", answer):  # where methods differ on what is a number
                    numbers, judged = re.findall("[0-9]+", answer), judged + 1
                    wrong += reward != float(bool(numbers) and numbers[-1] == self.answers.get(text))
        say.add("rewards", wrong == 0, f"step {step + 1}: {wrong} of {judged} are not what the answer earns")
        by_group = [advantages_of(group, self.cfg.loss.advantage) for group in batch.rewards.tolist()]
        mine = torch.tensor(by_group, dtype=torch.float64).flatten()
        apart = (advantages.cpu().double() - mine).abs().max().item()
        say.add("advantages", apart < 1e-3, f"step {step + 1}: largest difference {apart:.1g}, at most 1e-3")
        return mine

    def _tensors(self) -> tuple[dict[str, Named], dict[str, int]]:
        whole, counts = self.state()
        return {kind: {k: x.make().detach().clone() for k, x in part.items()} for kind, part in whole.items()}, counts

    def _state(self, steps: int) -> State:
        tensors, _ = self._tensors()
        factors = {name: x.cpu().double() for name, x in tensors["adapter"].items()}
        moments = {name: x.cpu().double() for name, x in tensors["optimizer"].items()}
        first, second = ({k: moments[f"{k}.{moment}"] for k in factors} for moment in ("exp_avg", "exp_avg_sq"))
        return State(factors, first, second, steps)


def judge(cfg: Config, folder: Path) -> Findings:
    """Train the method of ``cfg`` in ``folder``, empty so far, and say what was found. InputError as a run's."""
    findings, tiny = Findings(), tiny_run(cfg, folder)
    texts = "#### 18", "<think>18</think><answer>\\boxed{18}</answer>"  # base_acc reads the second form only
    right, wrong = ([reward_gsm8k.score(text, gold, cfg.reward.method) for text in texts] for gold in ("18", "81"))
    text = f"reward.method {cfg.reward.method}: 18 earns {max(right):g} where 18 is right, {max(wrong):g} where 81 is"
    findings.add("rewards", max(right) == 1 and max(wrong) == 0, text)
    if not findings.good():
        return findings
    answers = write_inputs(cfg, folder)
    learner = type("ObservedHere", (Observed,), {"findings": findings, "answers": answers})
    real = startup.Learner
    with open(folder / "log.txt", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        startup.Learner = learner
        try:
            learner.tokenizer = data_gsm8k.load_tokenizer(tiny.model.path)
            train_grpo.start(tiny)
        except NotAsExpected:
            return findings
        except (Tripped, aqn.AqnError) as error:
            findings.add("learning", False, f"the run stopped: {error}")
            return findings
        finally:
            startup.Learner = real
    (run,) = (folder / "out").iterdir()
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = sum(rewards[-LAST:]) / LAST
    text = f"reward {rewards[0]:.2f} in the first step, {last:.2f} in the last {LAST} of {STEPS}, at least {LEVEL}"
    if set(tiny.lora.targets) == {"router"}:  # four experts of a random model do not hold the answers
        text += ", not judged: routers alone cannot learn this"
    findings.add("learning", last >= LEVEL or "not judged" in text, text)
    return findings


# ------------------------------------------------------------------------------------------------ the command


def introduction(cfg: Config, source: str) -> str:
    """What is tested: the part of the configuration that counts, and what stands in for the rest."""
    loss, updates = cfg.loss, PROMPTS // tiny_run(cfg, Path(".")).optim.prompts_per_update
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core"))
    return (
        f"self-test of {source}: {versions}, device {cfg.device}, {cfg.model.dtype}\n"
        f"  kept: loss {loss.kind}, {loss.aggregate}, advantage {loss.advantage}, kl {loss.kl}, importance "
        f"{loss.importance} and its other keys; aqn {cfg.aqn.schedule}, replay {cfg.replay.mode}, lora.targets, "
        "AdamW's betas, eps, weight decay and clipping, temperature, top_p, top_k\n"
        f"  set here: a random model of 2 layers on one rank, {STEPS} steps of {PROMPTS} x {GROUP} answers, {updates} "
        f"update{'s' * (updates > 1)} a step, lr 3e-3, LoRA of rank 16 and 8 without dropout, the embedded sampler"
    )


def main(arguments: list[str]) -> int:
    """Exit code 0 it learned, 1 it did not, 2 input that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = str(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")
    parser.add_argument("config", nargs="?", default=default, help="default: configs/tiny_cpu.yaml, device auto")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # one rank, whoever starts it
    start, folder = time.perf_counter(), Path(tempfile.mkdtemp(prefix="self_test-"))
    overrides = args.overrides or (["device=auto"] if args.config == default else [])
    code = 2
    try:
        cfg = load_config(args.config, overrides, [], OTHER_RULES)
        print(introduction(cfg, Path(args.config).name), flush=True)
        findings = judge(cfg, folder)
        for name, (good, measured) in findings.checks.items():
            advice = "" if good else f"\n      look at: {LOOK_AT[name]}"
            print(f"{'ok  ' if good else 'FAIL'}  {name:11} {measured}{advice}")
        code = 0 if findings.good() else 1
        where = "" if code == 0 else f"; the run and its log are in {folder}"
        print(f"{'it learned' if code == 0 else 'it did not learn'}, {time.perf_counter() - start:.0f} s{where}")
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    except Exception:
        code = 1
        print(f"{traceback.format_exc()}it did not learn: the run ended with this error; its log is in {folder}")
    if code != 1:
        shutil.rmtree(folder)
    return code
