"""The self-test: sound methods pass, and every planted fault fails the check that is made for it.

Each run is a forked process, in which the fault is planted in the product's own functions. docs/self_test.md lists the
faults that the self-test does not find.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import training
import world
from torch import Tensor
from training import after

import aqn
import checkpoint
import data_gsm8k
import evaluate
import grpo
import kernels
import knobs
import learner
import lora_megatron
import parallel_setup
import preflight
import reward_gsm8k
import rollout
import runlog
import startup
import weight_sync
import weights_hf
from config import resolve_config
from config_rules import OTHER_RULES
from engines import torch_sampler
from learner import Learner
from plan import self_test, self_test_ranks
from rollout import MicroBatch, Rollout

ROOT = Path(__file__).parents[1]
TINY, QWEN3, QWEN15 = (str(ROOT / "configs" / f"{name}.yaml") for name in ("tiny_cpu", "qwen3", "qwen15_moe"))
HERE = ["device=cpu", "rollout.engine=torch"]
Findings = dict[str, tuple[bool, str]]


def judged(folder: Path, plant: Callable[[], None], *arguments: str) -> Findings:
    """The findings for ``arguments``, a configuration and overrides, in a forked process with a planted fault."""

    def run() -> int:
        plant()
        cfg, _ = resolve_config(arguments[0], [*HERE, *arguments[1:]], rules=OTHER_RULES)
        (folder / "findings.json").write_text(json.dumps(self_test.judge(cfg, folder)))
        return 0

    assert forked(run) == 0
    return json.loads((folder / "findings.json").read_text())


def forked(function: Callable[[], int]) -> int:
    """The exit code of a forked process that runs ``function``. Its changes to the product end with the process."""
    training.import_before_the_fork()
    world._import_megatron()

    def run() -> int:
        warnings.simplefilter("ignore")
        training.lighten(lenient=False)
        return function()

    child = multiprocessing.get_context("fork").Process(target=world.exit_with, args=(run, 99))
    with warnings.catch_warnings():  # Python 3.12 warns of every fork of a process with threads
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        child.start()
    child.join()
    return child.exitcode


def alone(arguments: list[str], plant: Callable[[], None] = lambda: None) -> int:
    """The exit code of the command where two ranks cannot run, in a forked process with a planted fault."""

    def run() -> int:
        os.sched_getaffinity = lambda _: {0}
        plant()
        return self_test_ranks.main(arguments)

    return forked(run)


def failed(findings: Findings) -> list[str]:
    return [name for name, (good, _) in findings.items() if not good]


def nothing() -> None:
    pass


# ------------------------------------------------------------------------------------------------ sound methods


SOUND = {
    "Qwen3's, bf16, 4 updates": (QWEN3,),
    "Qwen1.5's, noise and 1 update": (QWEN15, "model.dtype=fp32", "optim.prompts_per_update=96"),
    "gspo": (
        TINY, "loss.kind=gspo", "loss.aggregate=seq-mean-token-mean", "loss.clip_low=3e-4", "loss.clip_high=4e-4",
        "optim.prompts_per_update=16",
    ),
    "cispo, r2, entropy bonus": (
        TINY, "loss.kind=cispo", "replay.mode=r2", "loss.entropy_coef=1e-3", "optim.prompts_per_update=16",
    ),
    "dr-grpo, r3, noise": (
        TINY, "loss.advantage=none", "loss.aggregate=dr-grpo", "replay.mode=r3", "aqn.schedule=qerl",
        "loss.kl=low_var_kl+", "loss.importance=sequence",
    ),
    "noise and icepop": (
        TINY, "aqn.schedule=qerl", "loss.importance=icepop", "loss.importance_low=0.98", "loss.importance_clip=1.02",
    ),
    "noise and mis": (TINY, "aqn.schedule=qerl", "loss.importance=mis", "loss.importance_clip=1.02"),
}  # fmt: skip


@pytest.mark.parametrize("method", SOUND)
def test_a_sound_method_learns(method: str, tmp_path: Path) -> None:
    findings = judged(tmp_path, nothing, *SOUND[method])
    assert not failed(findings) and "learning" in findings, findings
    print(findings)


# ------------------------------------------------------------------------------------------------ the faults


def before(owner: object, name: str, act: Callable) -> None:
    """From now on ``act(*its arguments)`` runs before ``owner.name``."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (act(*args), real(*args, **kwargs))[1])


def advantages(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    return lambda: after(grpo, "group_advantages", lambda found, rewards, *_: change(found, rewards))


def masks(change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def masked(micro: MicroBatch, *_) -> MicroBatch:
        micro.mask = change(micro.mask)
        return micro

    return lambda: after(rollout, "pack", masked)


def gradients(change: Callable[[torch.nn.Parameter], Tensor]) -> Callable[[], None]:
    def all_of_them(_: None, parallel: parallel_setup.Parallel, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = change(parameter)

    return lambda: after(parallel_setup.Parallel, "sync_gradients_", all_of_them)


def first_expert_lost(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.is_expert:
        parameter.grad[0] = 0
    return parameter.grad


def forget_moments(trainer: Learner, *_) -> None:
    for moments in trainer.moments.values():
        for value in moments.values():
            value.zero_()


def forget_steps(trainer: Learner, *_) -> None:
    trainer.optimizer_steps = 0


def last_micro_batch() -> None:
    """Each micro-batch throws away the gradients of those before it."""
    real = learner.Learner._loss

    def loss(trainer: learner.Learner, *arguments: object) -> tuple:
        trainer.model.zero_grad()
        return real(trainer, *arguments)

    learner.Learner._loss = loss


def neighbours_rewards(result: tuple, *_) -> tuple:
    batch: Rollout = result[0]
    batch.rewards = batch.rewards.roll(1, dims=1)
    return result


def score_flipped(scored: tuple[float, bool], *_) -> tuple[float, bool]:
    return 1 - scored[0], True


def scale_doubled(adapters: dict, *_) -> dict:
    for adapter in adapters.values():
        adapter.scale *= 2
    return adapters


def always_one_mean() -> None:
    real = grpo.aggregate_loss
    grpo.aggregate_loss = lambda *args, **kwargs: real(*args, **kwargs | {"aggregate": "token-mean"})


def equal_groups() -> None:
    real = torch_sampler.TorchSampler.sample
    torch_sampler.TorchSampler.sample = lambda *args, num_samples, **kwargs: [
        one * num_samples for one in real(*args, num_samples=1, **kwargs)
    ]


def optimizer_twice_as_fast() -> None:
    real = learner.adamw
    learner.adamw = lambda *args, lr, **kwargs: real(*args, lr=2 * lr, **kwargs)


def first_questions() -> None:
    real = data_gsm8k.Questions.pick
    data_gsm8k.Questions.pick = lambda questions, step, count: real(questions, 0, count)


def rotated_backwards() -> None:
    real = kernels.rotary
    kernels.rotary = lambda x, cos, sin: real(x, cos, -0.5 * sin)


def norm_backward_without_its_mean() -> None:
    def backward(ctx, grad: Tensor) -> tuple:
        x, weight, scale = ctx.saved_tensors
        return grad * weight * scale, None, None

    kernels._RmsNorm.backward = staticmethod(backward)


def reference_with_adapters() -> None:
    lora_megatron.disabled = lambda adapters: contextlib.nullcontext()


def never_clipped() -> None:
    after(parallel_setup.Parallel, "gradient_norm", lambda norm, *_: norm * 0.01)


SEVERAL = ("optim.prompts_per_update=8",)
FAULTS = {  # fault: how it is planted, the check that must find it, overrides of configs/tiny_cpu.yaml
    "advantages of the wrong sign": (advantages(lambda found, rewards: -found), "advantages", ()),
    "advantages that are not centred": (advantages(lambda found, rewards: rewards), "advantages", ()),
    "shuffled advantages": (advantages(lambda found, rewards: found.roll(1, 1)), "advantages", ()),
    "the reward of another answer": (lambda: after(rollout, "sample", neighbours_rewards), "rewards", ()),
    "rewards flipped in the run": (lambda: after(startup.Run, "score", score_flipped), "rewards", ()),
    "rewards flipped in the method": (lambda: after(reward_gsm8k, "score", lambda x, *_: 1 - x), "rewards", ()),
    "the first token masked": (masks(lambda mask: mask * mask.roll(1, 1)), "gradient", ()),
    "half of the tokens masked": (
        masks(lambda mask: mask * (torch.arange(mask.shape[1]) % 2)), "gradient", (),
    ),
    "only the last micro-batch counts": (last_micro_batch, "gradient", ()),
    "no gradient for the experts": (
        gradients(lambda parameter: parameter.grad * (not parameter.is_expert)), "gradient", (),
    ),
    "no gradient for one expert": (gradients(first_expert_lost), "gradient", ()),
    "gradients 8 times too large": (gradients(lambda parameter: parameter.grad * 8), "gradient", ()),
    "gradients never clipped": (never_clipped, "gradient", ("optim.max_grad_norm=0.1",)),
    "moments forgotten in each update": (lambda: before(Learner, "_step", forget_moments), "gradient", ()),
    "moments forgotten between steps": (lambda: before(Learner, "_pack", forget_moments), "gradient", SEVERAL),
    "the optimizer's step count forgotten": (lambda: before(Learner, "_step", forget_steps), "AdamW", ()),
    "another learning rate": (lambda: after(learner, "learning_rate", lambda rate, *_: rate * 2), "rate", ()),
    "another learning rate for the optimizer alone": (optimizer_twice_as_fast, "AdamW", ()),
    "LoRA's scale wrong on both sides": (lambda: after(lora_megatron, "attach", scale_doubled), "gradient", ()),
    "another mean over tokens": (always_one_mean, "gradient", ("loss.aggregate=seq-mean-token-mean",)),
    "KL of the wrong sign": (lambda: after(grpo, "kl", lambda kl, *_: -kl), "KL", ()),
    "a reference with its adapters on": (reference_with_adapters, "KL", ()),
    "positions wrong on both sides": (rotated_backwards, "sampler", ()),
    "a wrong backward pass of a kernel": (norm_backward_without_its_mean, "gradient", ()),
    "the same questions in each step": (first_questions, "order", ()),
    "the end token never recognised": (
        lambda: after(data_gsm8k, "stop_token_ids", lambda *_: {258}), "answers", (),
    ),
    "equal answers in each group": (equal_groups, "learning", ()),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ evaluations, resumes


def push_nothing() -> None:
    weight_sync.WeightSync.push_clean = lambda self: None


def evaluated_on(change: Callable[[startup.Run], None]) -> Callable[[], None]:
    """A fault that changes the run before each evaluation."""
    return lambda: before(startup.Run, "evaluate", lambda run, *_: change(run))


def training_questions(run: startup.Run) -> None:
    run.inputs = run.inputs._replace(held_out=run.inputs.questions)


def backwards(run: startup.Run) -> None:
    questions = run.inputs.held_out
    run.inputs = run.inputs._replace(held_out=dataclasses.replace(questions, questions=questions[::-1]))


def base_policy(run: startup.Run) -> None:
    run.engine.load_weights(weights_hf.read_model(run.cfg.model.path, run.inputs.arch).items())


def never_greedy() -> None:
    real = torch_sampler.TorchSampler.sample
    torch_sampler.TorchSampler.sample = lambda *args, temperature, **kwargs: real(
        *args, temperature=temperature or 1.0, **kwargs
    )


def hotter() -> None:
    """Samples at 1.3 times the temperature, with the log-probs of the right one."""
    real = torch_sampler.inverse_cdf
    torch_sampler.inverse_cdf = lambda probs, uniform: real(probs ** (1 / 1.3), uniform)


def accuracy_one_higher(summary: dict, *_) -> dict:
    return summary | {"eval/greedy_accuracy": summary["eval/greedy_accuracy"] + 1 / summary["eval/num_questions"]}


def order_from_the_start() -> None:
    """A resumed run asks again what the run asked from its first step on."""
    first = []
    after(startup, "open_run", lambda run, *_: (first.append(run.first_step), run)[1])
    real = data_gsm8k.Questions.pick
    data_gsm8k.Questions.pick = lambda self, step, count: real(self, step - (first or [0])[-1], count)


def saved_without_b() -> None:
    real = checkpoint.save

    def save(run_dir: Path, step: int, tensors: dict, *args, **kwargs) -> None:
        adapter = {
            name: checkpoint.Pending(x.shape, x.dtype, lambda x=x, name=name: x.make() * (not name.endswith(".B")))
            for name, x in tensors["adapter"].items()
        }
        real(run_dir, step, tensors | {"adapter": adapter}, *args, **kwargs)

    checkpoint.save = save


def one_seed_of_noise() -> None:
    """The trainer asks for the noise of step 0 in every step; aqn.py itself is sound."""
    real = weight_sync.WeightSync._add_noise

    def add_noise(*args) -> dict:
        with mock.patch.object(aqn, "perturb", functools.partial(perturb_at, aqn.perturb)):
            return real(*args)

    def perturb_at(perturb: Callable, *args, step: int, **kwargs) -> object:
        return perturb(*args, step=0, **kwargs)

    weight_sync.WeightSync._add_noise = add_noise


NOISY = ("aqn.schedule=constant", "aqn.sigma_start=1e-3")
SAMPLES = ("eval.samples=1",)
IN_THE_RUN = {  # fault: how it is planted, the check that must find it, overrides of configs/tiny_cpu.yaml
    "evaluation one update old": (push_nothing, "evaluation", ()),
    "evaluation of the noisy policy, bf16": (push_nothing, "evaluation", (*NOISY, "model.dtype=bf16")),
    "evaluation of the base": (evaluated_on(base_policy), "evaluation", ()),
    "evaluation of training questions": (evaluated_on(training_questions), "evaluation", ()),
    "evaluation in another order": (evaluated_on(backwards), "evaluation", ("eval.num_questions=3",)),
    "greedy answers at temperature 1": (never_greedy, "evaluation", ()),
    "samples at another temperature": (hotter, "evaluation", SAMPLES),
    "another accuracy is logged": (lambda: after(evaluate, "_summary", accuracy_one_higher), "evaluation", ()),
    "order that starts again at a resume": (order_from_the_start, "questions", ()),
    "B saved as 0": (saved_without_b, "learning", ()),
    "one noise in all steps of the run": (one_seed_of_noise, "noise", NOISY),
}


@pytest.mark.parametrize("fault", FAULTS | IN_THE_RUN)
def test_a_planted_fault_is_found_by_its_check(fault: str, tmp_path: Path) -> None:
    plant, check, changes = (FAULTS | IN_THE_RUN)[fault]
    findings = judged(tmp_path, plant, TINY, *changes)
    print(findings)
    assert check in failed(findings), findings


# ------------------------------------------------------------------------------------------------ what is not known

NEW = {"kind": "reinforce", "aggregate": "sum", "importance": "root", "kl": "k4", "advantage": "rank"}


def new_methods() -> None:
    """Adds a loss, a mean over tokens, weights, a KL estimate and an advantage to knobs.py and grpo.py."""
    for name in NEW:
        knobs.LossConfig.model_fields[name].annotation = str
    knobs.LossConfig.model_rebuild(force=True)
    knobs.Config.model_rebuild(force=True)
    grpo._require = lambda *_: None
    policy, mean, weights, estimate, advantage = (
        grpo.policy_loss, grpo.aggregate_loss, grpo.rollout_weights, grpo.kl, grpo.group_advantages,
    )  # fmt: skip

    def policy_loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **keys) -> tuple:
        loss, stats = policy(logp, old, advantages, mask, **keys)
        if keys["kind"] == "reinforce":
            counts = {key: keys[key] for key in ("aggregate", "num_tokens", "num_sequences", "max_new_tokens")}
            loss = grpo.aggregate_loss(-advantages[:, None] * logp * keys["weights"], mask, **counts)
        return loss, stats

    def aggregate_loss(per_token: Tensor, mask: Tensor, *, aggregate: str = "token-mean", **counts) -> Tensor:
        return mean(per_token, mask, aggregate="token-mean" if aggregate == "sum" else aggregate, **counts) * (
            3 if aggregate == "sum" else 1
        )

    def rollout_weights(old: Tensor, sampled: Tensor, mask: Tensor, mode: str, *bounds) -> Tensor:
        return (
            weights(old, sampled, mask, "token", *bounds) ** 0.5
            if mode == "root"
            else weights(old, sampled, mask, mode, *bounds)
        )

    grpo.policy_loss, grpo.aggregate_loss, grpo.rollout_weights = policy_loss, aggregate_loss, rollout_weights
    grpo.kl = lambda logp, ref, kind, mask: 2 * estimate(logp, ref, "k2" if kind == "k4" else kind, mask)
    grpo.group_advantages = lambda rewards, norm: (
        2 * advantage(rewards, "none") if norm == "rank" else advantage(rewards, norm)
    )


UNKNOWN = tuple(f"loss.{key}={value}" for key, value in NEW.items())


def test_a_loss_and_an_advantage_that_have_no_second_formula_are_named_and_all_else_passes(tmp_path: Path) -> None:
    findings = judged(tmp_path, new_methods, TINY, *UNKNOWN)
    assert not failed(findings) and {"learning", "gradient", "evaluation"} <= findings.keys(), findings
    assert all(f"loss.{key} {value}" in findings["not judged:"][1] for key, value in NEW.items())


def test_with_an_unknown_loss_a_masked_token_is_still_found(tmp_path: Path) -> None:
    def plant() -> None:
        new_methods()
        masks(lambda mask: mask * mask.roll(1, 1))()

    findings = judged(tmp_path, plant, TINY, "loss.kind=reinforce")
    assert "gradient" in failed(findings) and "loss.kind reinforce" in findings["not judged:"][1], findings


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_reports_in_a_few_lines_and_takes_less_than_a_minute() -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "preflight.py", "--self-test", TINY, "loss.kind=cispo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stderr == "", done
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used < 60
    lines = done.stdout.splitlines()
    assert len(lines) <= 24 and "loss cispo" in lines[1] and lines[-1].startswith("it learned"), done.stdout
    assert [line.split()[:3] for line in lines[3:6]] == [["ok", layout, "gradient"] for layout in ("DP2", "EP2", "TP2")]
    assert lines[6].startswith("two ranks agree with the reference, ")
    assert "KL" in done.stdout and "at least 0.3" in done.stdout


def test_a_failed_self_test_ends_with_code_1_and_says_what_to_look_at(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(self_test_ranks.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    code = alone([TINY, *HERE], FAULTS["KL of the wrong sign"][0])
    lines = capfd.readouterr().out.splitlines()
    assert code == 1 and len(lines) <= 22, lines
    assert lines[3].startswith("two ranks cannot be compared here (device cpu, 1 cores); needed: torchrun ")
    place = next(i for i, line in enumerate(lines) if line.startswith("FAIL  KL"))
    assert "relative difference 2, at most 0.05" in lines[place] and "look at: Learner._reference" in lines[place + 1]
    assert lines[-1].startswith("it did not learn") and lines[-1].endswith(str(tmp_path))
    assert (tmp_path / "log.txt").exists()


UNUSABLE = {
    "no file": (["no/such.yaml"], "no/such.yaml"),
    "unknown key": ([TINY, "loss.kinds=ppo"], "loss.kinds: unknown key"),
    "unknown model": ([TINY, "model.path=models/unheard-of", "tiny_model=null"], "models/unheard-of"),
    "no such device": ([QWEN3], "device: npu: torch_npu is not installed"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_unusable_input_is_one_line_and_exit_code_2(what: str, capfd) -> None:
    arguments, expected = UNUSABLE[what]
    assert alone(arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1


def test_a_full_disk_is_an_error_and_not_a_failure_to_learn(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(self_test_ranks.tempfile, "mkdtemp", lambda **_: str(tmp_path))

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    code = alone([TINY, *HERE], lambda: before(runlog.RunLog, "log_step", full))
    said = capfd.readouterr()
    assert code == 2 and said.err == "error: metrics.jsonl: No space left on device\n", said
    assert "learn" not in said.out.splitlines()[-1] and not tmp_path.exists()


@pytest.mark.parametrize("option", ["--self-test", "--doctor"])
def test_under_torchrun_one_process_answers(option: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    assert preflight.main([option, TINY]) == 0 and capsys.readouterr() == ("", "")
