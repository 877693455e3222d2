"""Does the installed code learn? Trains a tiny model by the method of a configuration, in less than a minute.

    python preflight.py --self-test [CONFIG] [section.key=value ...]            (the command: checks/self_test_ranks.py)

This is the trainer's own run (train_grpo.start) on a random model and toy questions. Three of its updates are compared
with a second implementation in float64 (checks/self_test_reference.py); then the run must reach a known reward.
docs/self_test.md says what was measured, which faults this test does not find, and what the exit codes mean.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

import aqn
import data_gsm8k
import grpo
import parallel_setup
import tiny_model
import train_grpo
from architecture import tensor_shapes
from checks.self_test_reference import Named, State, forward, merged, rows_of, unknown, updated
from checks.self_test_schedules import GAP, Findings, Interrupted, NotAsExpected, Watch, learner_state, rate
from engines.interface import Completion
from engines.torch_sampler import TorchSampler
from inputs import functions, hf_config
from inputs.scoring import Call, Scorer
from knobs import Config, TinyModelConfig
from learner import Learner
from rollout import Rollout
from run_record import read_lines
from runlog import StepTimer
from startup import Run
from tripwires import Tripped

FIRST, SECOND, LATER = OBSERVED = (0, 1, 9)  # steps whose updates are repeated in float64; before LATER is a resume
STEPS, LAST, LEVEL = 50, 10, 0.3  # least mean reward of the last steps; a sound run may also settle at 0.5
PROMPTS, GROUP, NEW_TOKENS = 16, 16, 6
MICRO_BATCH = 400  # tokens, so that even with 4 updates a step both of two ranks have two micro-batches or more
HELD_OUT = 8  # questions, of 48
STOPS = 64  # tokens that end an answer, of 259
SEED = 0
ANSWERS = (("a", "3"), ("b", "7"))  # last letter of a question -> its answer
LARGER = ("lm_head.weight", "model.embed_tokens.weight")
WHOLE = {"fp32": 0.05, "bf16": 0.7}  # largest relative difference of a whole gradient; docs/self_test.md: what was seen
PIECE = {"fp32": (0.9, 1.1), "bf16": (0.02, 4)}  # part of the expected value in each tensor, or an expert's part of one
NORM = {"fp32": 0.01, "bf16": 0.25}  # largest relative difference of the gradient's norm
SAME_ROWS = "gives the same for the same rows in any order"
OTHER_ROWS = "depends on the order of its rows, or on chance"
SCORED_TWICE = 8  # training questions whose gold answers are scored twice
# Tripwires of a run that have a check of their own here, or that a toy task would trip.
OFF = ("reward_constant", "unparsable", "truncated", "sampling", "impossible", "gradient_spike", "entropy")
WATCHED = (  # methods that Observer's of the same name stand in for
    (TorchSampler, "load_weights"), (Run, "save"), (Learner, "update"),
)  # fmt: skip
LOOK_AT = {
    "noise": "aqn.perturb, and the step, seed and sigma that it is called with (weight_sync.py)",
    "questions": "data_gsm8k.Questions.pick, and the step in train_grpo.train; which file each split is read from",
    "resume": "checkpoint.py, Learner.state, Learner.restore",
    **dict.fromkeys(("reward.function", "loss.advantage", "loss.kind"), "the function that the configuration names"),
    "answers": "data_gsm8k.stop_token_ids, and how the sampler ends an answer (torch_sampler.py)",
    "rewards": "reward_gsm8k.py, inputs.check.Inputs.score, and the order in which rollout.sample gathers",
    "advantages": "grpo.group_advantages",
    "sampler": "weights_hf.export (the merge, alpha / R), weight_sync.py, torch_decoder.py; kernels.py on this device",
    "gradient": "learner.py (loss, masks, counts), grpo.py, lora_megatron.py, packing.py, backward of kernels.py",
    "AdamW": "Learner._step: moments, step count, learning rate, weight decay",
    "KL": "Learner._reference_logp (adapters off?), grpo.kl, the sign and coefficient in Learner._loss",
    "learning": "the log named below; run again with model.dtype=fp32, and with the loss of configs/tiny_cpu.yaml",
}

# ------------------------------------------------------------------------------------------------ the tiny run


def num_updates(cfg: Config) -> int:
    """Optimizer steps of one rollout: as many as in ``cfg``, but 1, 2 or 4."""
    updates = cfg.rollout.prompts_per_step // cfg.optim.prompts_per_update
    return 4 if updates >= 4 else 2 if updates >= 2 else 1


def tiny_run(cfg: Config, folder: Path) -> Config:
    """The method of ``cfg`` on the tiny model and the toy questions in ``folder``, on one rank."""
    kept = cfg.model_dump(mode="json")
    roles = [target for target in kept["aqn"]["targets"] if target in ("attention", "experts", "router")]
    return Config.model_validate({
        "name": "self_test",
        "device": kept["device"],
        "model": kept["model"] | {"path": str(folder / "model"), "quantisation": "none"},
        "data": {
            "source": "gsm8k", "train_path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl"),
            "max_prompt_tokens": 16, "prompt_template": "{question}",
        },
        "rollout": {
            "prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": NEW_TOKENS,
            **{key: kept["rollout"][key] for key in ("temperature", "top_p", "top_k")},
            "round_bits": kept["rollout"]["round_bits"] if kept["aqn"]["schedule"] == "off" else 0,
        },
        "reward": {"method": "verl_flexible"},
        "lora": {"targets": kept["lora"]["targets"], "rank": 16, "alpha": 32.0, "expert_rank": 8},
        "loss": kept["loss"] | ({} if cfg.loss.corrects else {"importance": "none"}),  # nothing is stale here
        "optim": {
            "lr": 3e-3, "warmup_steps": min(2, kept["optim"]["warmup_steps"]),
            "decay": "constant" if "optim.decay" in unknown(cfg) else kept["optim"]["decay"],
            "min_lr_ratio": max(0.5, kept["optim"]["min_lr_ratio"]), "prompts_per_update": PROMPTS // num_updates(cfg),
            "tokens_per_micro_batch": MICRO_BATCH,
            **{key: kept["optim"][key] for key in ("betas", "weight_decay", "max_grad_norm")},
        },
        "aqn": kept["aqn"] | {"targets": roles or ["attention", "experts"]},
        "replay": kept["replay"],
        "checks": dict.fromkeys(OFF, "off") | ({"logp_gap_bf16": 1.0} if cfg.model.dtype == "bf16" else {}),
        "eval": {"samples": 0, "num_questions": 1},  # an evaluation is a matter of the tests
        "train": {
            "steps": STEPS, "out_dir": str(folder / "out"), "checkpoint_every": LATER, "resume": "auto",
            "seed": SEED, "deterministic": kept["train"]["deterministic"],
        },
    })  # fmt: skip


def write_inputs(cfg: Config, folder: Path, vocab_size: int = 259, boost: float = 1.0) -> dict[str, str]:
    """Write a random model of the kind of ``cfg``, and toy questions. Returns the training questions and answers.

    A question is a letter and a digit, which mean nothing, and an a or a b. The answers are 3 and 7; the head's rows of
    these are multiplied by ``boost``.
    """
    model = folder / "model"
    tiny = TinyModelConfig(
        architecture=hf_config.planned(cfg)[0].model_type, vocab_size=vocab_size, num_experts=4, expert_width=32
    )
    settings = hf_config.tiny_settings(tiny, row_tokens=1536)
    tiny_model.build_tokenizer([], settings["vocab_size"], model)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]  # so that a prompt is the bare question
    stops = [settings["eos_token_id"], *range(settings["vocab_size"] - STOPS, settings["vocab_size"])]
    for name, content in (
        ("config.json", settings),
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", {"eos_token_id": stops, "pad_token_id": 0}),
    ):
        (model / name).write_text(json.dumps(content))
    generator, w = torch.Generator().manual_seed(SEED), {}
    for name, shape in tensor_shapes(hf_config.read(model)).items():
        noise, scale = torch.randn(shape, generator=generator), 2 if name in LARGER else 1
        w[name] = 0.1 * noise + ("norm" in name) if len(shape) == 1 else scale * noise / shape[1] ** 0.5
    answers = {f"{letter}{digit} {which}": gold for letter in "uvwxyz" for digit in "0189" for which, gold in ANSWERS}
    questions = [json.dumps({"question": text, "answer": f"#### {gold}"}) for text, gold in answers.items()]
    for name, part in (("train", questions[:-HELD_OUT]), ("test", questions[-HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    # Give the two answers the rows of likely first tokens in the head, so that some samples are right at the start.
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    prompts = torch.tensor([[vocabulary[c] for c in text.replace(" ", "\u0120")] for text in answers])
    likely = forward({n: x.double() for n, x in w.items()}, settings, prompts, 1.0)[3][:, -1].exp().mean(0)
    likely[stops] = 0
    for place, (_, gold) in zip(likely.topk(2).indices.tolist(), ANSWERS, strict=True):
        w["lm_head.weight"][[place, vocabulary[gold]]] = w["lm_head.weight"][[vocabulary[gold], place]]
        w["lm_head.weight"][vocabulary[gold]] *= boost
    w = {name: tensor.bfloat16().float() for name, tensor in w.items()}  # so that both dtypes have the same weights
    save_file(w, model / "model.safetensors", metadata={"format": "pt"})
    return dict(list(answers.items())[:-HELD_OUT])


# ------------------------------------------------------------------------------------------------ judging a run


def pieces(tensors: Named) -> Named:
    """The same, with the tensors of each expert by themselves."""
    parts = {f"{name}[{e}]": part for name, x in tensors.items() if x.dim() == 3 for e, part in enumerate(x)}
    return parts | {name: x for name, x in tensors.items() if x.dim() != 3}


@contextlib.contextmanager
def watching(observer: object, watched: Iterable[tuple[Any, str]], log_path: Path) -> Iterator[None]:
    """In this block the observer's methods stand in for the ``watched`` ones of the same names; all output is logged.

    They get the real one as their first argument.
    """

    def standing_in(seeing: Callable, real: Callable) -> Callable:
        return lambda *args, **kwargs: seeing(real, *args, **kwargs)

    with contextlib.ExitStack() as stack, open(log_path, "a") as log:
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        for owner, name in watched:
            method = standing_in(getattr(observer, name), getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, method))
        yield


class Observer(Watch):
    """Also repeats the updates of some steps of a run in float64, and compares."""

    state: State | None = None

    def update(
        self, real_update: Callable, learner: Learner, batch: Rollout, completions: list[list[Completion]],
        advantages: Tensor, step: int, timer: StepTimer,
    ) -> dict[str, float]:  # fmt: skip
        """Learner.update, compared with the reference in the OBSERVED steps. NotAsExpected if they differ."""
        cfg, findings, dtype = self.cfg, self.findings, self.cfg.model.dtype
        self.asked += [self.tokenizer.decode(prompt) for prompt in batch.prompts]
        if cfg.aqn.schedule in ("qerl", "paper", "constant") and {"attention", "experts"} & set(cfg.aqn.targets):
            self.check_noise(step)
        if step not in OBSERVED:
            return real_update(learner, batch, completions, advantages, step, timer)
        optim = cfg.optim.model_copy(update={"lr": rate(cfg.optim, step, STEPS)})
        cfg = cfg.model_copy(update={"optim": optim})
        expected_advantages = self.check_inputs(batch, completions, advantages, step)  # (S,)
        rows = rows_of(batch, [one for group in completions for one in group])
        updates = PROMPTS // cfg.optim.prompts_per_update
        if step != SECOND:  # the second step begins with the state after the first: a loss between the two shows
            self.state = learner_state(learner, step * updates)
        before = self.state
        if self.saved:
            self.check_resume(self.saved, before, learner.optimizer_steps)
        if step == FIRST:
            zero = not any(x.any() for x in before.first.values())
            findings.add("AdamW", zero, "moments before the first step are not 0")
        if cfg.aqn.schedule == "off" and not cfg.rollout.round_bits:
            with torch.no_grad():
                weights = merged(self.base, before.factors, cfg.lora)
                logp = forward(weights, self.settings, rows.tokens, cfg.rollout.temperature)[0]
            gap = (logp - rows.sampled_logp)[rows.own].abs().mean().item()
            findings.add(
                "sampler",
                gap <= GAP[dtype],
                f"step {step + 1}: {gap:.1g} nats a token from the float64 model, at most {GAP[dtype]:g}",
            )
        reference = functools.partial(updated, cfg, self.settings, self.base, before, batch, rows)
        if step == LATER and (cfg.loss.kl != "none" and cfg.loss.kl_coef or cfg.loss.entropy_coef):
            # An update whose advantages are 0 has the gradient of the penalties alone. It is undone afterwards.
            whole, counts = learner.state()
            kept = {kind: {k: x.make().clone() for k, x in part.items()} for kind, part in whole.items()}
            real_update(
                learner, batch, completions, 0 * advantages, step, StepTimer(timer.heartbeat, step, timer.device)
            )
            decay = cfg.optim.betas[0] ** updates
            found, expected = (
                {name: x - decay * before.first[name] for name, x in state.first.items()}
                for state in (learner_state(learner, 0), reference(0 * expected_advantages)[0])
            )
            self._compare("KL", step, found, expected)
            learner.restore(kept, counts)
        metrics = real_update(learner, batch, completions, advantages, step, timer)
        after, (expected, norm) = learner_state(learner, before.steps + updates), reference(expected_advantages)
        self.expected = expected  # with its metrics
        logged = metrics["actor/grad_norm"]
        findings.add(
            "gradient",
            abs(logged - norm) <= NORM[dtype] * norm,
            f"step {step + 1}: norm {logged:.3g}, expected {norm:.3g}",
        )
        self._compare("gradient", step, after.first, expected.first)
        self._compare("AdamW", step, after.second, expected.second)
        changes = [{name: s.factors[name] - x for name, x in before.factors.items()} for s in (after, expected)]
        self._compare("AdamW", step, *changes)
        self.state = after
        if not findings.good():
            raise NotAsExpected
        return metrics

    def _compare(self, name: str, step: int, found: Named, expected: Named) -> None:
        """Compare two sets of tensors: their relative difference, and each large piece with its expected value."""
        error = sum((found[key] - x).square().sum() for key, x in expected.items()) ** 0.5
        size = sum(x.square().sum() for x in expected.values()) ** 0.5
        if not size:
            self.findings.add(name, not error, f"step {step + 1}: 0 is expected, norm {error:.1g} was found")
            return
        mine = pieces(found)
        shares = {
            key: ((mine[key] * x).sum() / x.square().sum()).item()
            for key, x in pieces(expected).items()
            if x.norm() > 0.05 * expected[key.partition("[")[0]].norm()
        }
        whole, (least, most) = WHOLE[self.cfg.model.dtype], PIECE[self.cfg.model.dtype]
        odd = min(shares, key=lambda key: min(shares[key] - least, most - shares[key]))
        self.findings.add(
            name,
            bool(error / size <= whole and least <= shares[odd] <= most),
            f"step {step + 1}: relative difference {error / size:.1g}, at most {whole:g}; {odd} has {shares[odd]:.0%} "
            f"of what is expected, {least:.0%} to {most:.0%} is right",
        )


def judge_functions(cfg: Config, findings: Findings) -> None:
    """Add a finding for each function of ``cfg`` (FILE.py:NAME). InputError if one of them fails.

    It can be judged that a function repeats itself, and treats the completions of a question alike. Whether it rewards
    the right thing, this test cannot know.
    """
    if cfg.reward.function:
        rows = data_gsm8k.read(cfg.data, "train")[0][:SCORED_TWICE]
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
        findings.add("loss.advantage", alike, f"{cfg.loss.advantage}: {SAME_ROWS if alike else OTHER_ROWS}")
    if callable(loss := functions.token_loss(cfg.loss.kind)):
        logp, old, advantages = (torch.randn(4, 6, generator=generator) for _ in range(3))
        mask = (torch.arange(6) < torch.tensor([[6], [3], [1], [5]])).float()

        def losses(order: torch.Tensor) -> torch.Tensor:
            own, before, better = ((x * mask)[order] for x in (logp, old, advantages))
            return loss(grpo.LossInputs(own, before, better, mask[order], 0.2, 0.2, 3.0))[0] * mask[order]

        plain = losses(torch.arange(4))
        alike = torch.equal(plain, losses(torch.arange(4))) and torch.allclose(losses(rows), plain[rows], atol=1e-5)
        findings.add("loss.kind", alike, f"{cfg.loss.kind}: {SAME_ROWS if alike else OTHER_ROWS}")


def judge(cfg: Config, folder: Path) -> Findings:
    """Train by the method of ``cfg`` in ``folder``, which is empty, and return the findings. InputError as in a run."""
    findings, tiny = Findings(), tiny_run(cfg, folder)
    if not cfg.reward.function:
        texts = (
            "#### 18",
            "<think>18</think><answer>\\boxed{18}</answer>",
        )  # base_acc and math read the second form only
        scorer = Scorer(cfg.reward)
        right, wrong = (max(scorer([Call(text, gold, {}) for text in texts])).reward for gold in ("18", "81"))
        scorer.close()
        findings.add(
            "rewards",
            right == 1 and wrong == 0,
            f"reward.method {cfg.reward.method}: 18 earns {right:g} where 18 is right, {wrong:g} where 81 is",
        )
    judge_functions(cfg, findings)
    if not findings.good():
        return findings
    if other := ", ".join(f"{key} {value}" for key, value in unknown(cfg).items()):
        findings.add("not judged:", True, f"{other}; it has no second formula, so the trainer's own was used")
    observer = Observer(tiny, write_inputs(cfg, folder), findings)
    with watching(observer, WATCHED, folder / "log.txt"):
        try:
            with contextlib.suppress(Interrupted):
                train_grpo.start(tiny)
            parallel_setup.close_layout()  # what an exception leaves open
            torch.distributed.destroy_process_group()
            train_grpo.start(tiny)
        except NotAsExpected:
            return findings
        except (Tripped, aqn.AqnError) as error:
            findings.add("learning", False, f"the run stopped: {error}")
            return findings
    (run_dir,) = folder.glob("out/*")
    rows = read_lines(run_dir / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows]
    last = sum(rewards[-LAST:]) / LAST
    text = f"reward {rewards[0]:.2f} in the first step, {last:.2f} in the last {LAST} of {STEPS}, at least {LEVEL}"
    if set(tiny.lora.targets) == {"router"}:  # four experts of a random model do not hold the answers
        findings.add("learning", True, f"{text}, not judged: routers alone cannot learn this")
    else:
        findings.add("learning", last >= LEVEL, text)
    return findings
