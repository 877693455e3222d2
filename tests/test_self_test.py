"""The self-test: sound methods pass, and every planted fault fails the check that is made for it.

Each run is a forked process, in which the fault is planted in the product's own functions. docs/self_test.md lists the
faults that the self-test does not find.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import training
import world
from planting import Plant, after, before, instead
from pytest import MonkeyPatch
from tiers import asked, nightly
from torch import Tensor

import aqn
import checkpoint
import data_gsm8k
import grpo
import knobs
import learner
import lora_megatron
import preflight
import reward_gsm8k
import rollout
import runlog
import startup
from checks import self_test, self_test_ranks
from config import resolve_config
from engines.torch_sampler import TorchSampler
from hardware import kernels
from inputs import check
from inputs.config_rules import OTHER_RULES
from learner import Learner
from parallel_setup import Parallel
from rollout import MicroBatch, Rollout
from weight_sync import WeightSync

ROOT = Path(__file__).parents[1]
TINY, QWEN3, QWEN15 = (str(ROOT / "configs" / f"{name}.yaml") for name in ("tiny_cpu", "qwen3", "qwen15_moe"))
HERE = ["device=cpu", "rollout.engine=torch"]
Findings = dict[str, tuple[bool, str]]


def judged(folder: Path, plant: Plant, *arguments: str) -> Findings:
    """The findings for ``arguments``, a configuration and overrides, in a forked process with a planted fault."""

    def run() -> int:
        plant(MonkeyPatch())
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
    child.start()
    child.join()
    return child.exitcode


def alone(arguments: list[str], plant: Plant = lambda _: None) -> int:
    """The exit code of the command where two ranks cannot run, in a forked process with a planted fault."""

    def run() -> int:
        os.sched_getaffinity = lambda _: {0}
        plant(MonkeyPatch())
        return self_test_ranks.main(arguments)

    return forked(run)


def failed(findings: Findings) -> list[str]:
    return [name for name, (good, _) in findings.items() if not good]


# ------------------------------------------------------------------------------------------------ sound methods


SOUND = dict(asked([
    *{
        "dr-grpo, r3, noise": (
            TINY, "loss.advantage=none", "loss.aggregate=dr-grpo", "replay.mode=r3", "aqn.schedule=qerl",
            "loss.kl=low_var_kl+", "loss.importance=sequence",
        ),
    }.items(),
    *(nightly(*item) for item in {
        "Qwen3's, bf16, 4 updates": (QWEN3,),
        "Qwen1.5's, noise and 1 update": (QWEN15, "model.dtype=fp32", "optim.prompts_per_update=96"),
        "noise and icepop": (
            TINY, "aqn.schedule=qerl", "loss.importance=icepop", "loss.importance_low=0.98",
            "loss.importance_clip=1.02",
        ),
    }.items()),
]))  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("method", SOUND)
def test_a_sound_method_learns(method: str, tmp_path: Path) -> None:
    findings = judged(tmp_path, lambda _: None, *SOUND[method])
    assert not failed(findings) and "learning" in findings, findings


# ------------------------------------------------------------------------------------------------ the faults


def masks(change: Callable[[Tensor], Tensor]) -> Plant:
    def masked(micro: MicroBatch, *_) -> MicroBatch:
        micro.mask = change(micro.mask)
        return micro

    return after(rollout, "pack", masked)


def gradients(change: Callable[[torch.nn.Parameter], object]) -> Plant:
    """A fault that changes every gradient in place after the sum over ranks."""
    return after(Parallel, "sync_gradients_", lambda _, parallel, parameters: list(map(change, parameters)))


first_token_masked = masks(lambda mask: mask * mask.roll(1, 1))


def forget_moments(trainer: Learner, *_) -> None:
    for moments in trainer.moments.values():
        for value in moments.values():
            value.zero_()


def neighbours_rewards(result: tuple, *_) -> tuple:
    batch: Rollout = result[0]
    batch.rewards = batch.rewards.roll(1, dims=1)
    return result


def scale_doubled(adapters: dict, *_) -> dict:
    for adapter in adapters.values():
        adapter.scale *= 2
    return adapters


# ------------------------------------------------------------------------------------------------ kernels, resumes


def backward_without_its_mean(ctx, grad: Tensor) -> tuple:
    x, weight, scale = ctx.saved_tensors
    return grad * weight * scale, None, None


def order_from_the_start(patch: MonkeyPatch) -> None:
    """A resumed run asks again what the run asked from its first step on."""
    first = [0]
    after(startup, "open_run", lambda run, *_: (first.append(run.first_step), run)[1])(patch)
    instead(data_gsm8k.Questions, "pick", lambda real, asked, step, count: real(asked, step - first[-1], count))(patch)


def save_without_b(real: Callable, run_dir: Path, step: int, tensors: dict, *args, **kwargs) -> None:
    adapter = {
        name: checkpoint.Pending(x.shape, x.dtype, lambda x=x, name=name: x.make() * (not name.endswith(".B")))
        for name, x in tensors["adapter"].items()
    }
    real(run_dir, step, tensors | {"adapter": adapter}, *args, **kwargs)


def add_the_first_noise(real: Callable, *args) -> dict:
    """The trainer asks for the noise of step 0 in every step; aqn.py itself is sound."""
    with MonkeyPatch.context() as patch:
        instead(aqn, "perturb", lambda real, *args, step, **kwargs: real(*args, step=0, **kwargs))(patch)
        return real(*args)


NOISY = ("aqn.schedule=constant", "aqn.sigma_start=1e-3")
FAULTS = dict(asked([  # fault: how it is planted, the check that must find it, overrides of configs/tiny_cpu.yaml
    *{
        "shuffled advantages": (after(grpo, "group_advantages", lambda found, *_: found.roll(1, 1)), "advantages", ()),
        "the reward of another answer": (after(rollout, "sample", neighbours_rewards), "rewards", ()),
        "the first token masked": (first_token_masked, "gradient", ()),
        # Each micro-batch throws away the gradients of those before it.
        "only the last micro-batch counts": (
            before(Learner, "_loss", lambda trainer, *_: trainer.model.zero_grad()), "gradient", (),
        ),
        "the optimizer's step count forgotten": (
            before(Learner, "_step", lambda trainer, _: setattr(trainer, "optimizer_steps", 0)), "AdamW", (),
        ),
        "another learning rate": (after(learner, "learning_rate", lambda rate, *_: rate * 2), "AdamW", ()),
        "a reference with its adapters on": (
            instead(lora_megatron, "disabled", lambda *_: contextlib.nullcontext()), "KL", (),
        ),
        "positions wrong on both sides": (
            instead(kernels, "rotary", lambda real, x, cos, sin: real(x, cos, -0.5 * sin)), "sampler", (),
        ),
        "the same questions in each step": (
            instead(data_gsm8k.Questions, "pick", lambda real, asked, step, count: real(asked, 0, count)),
            "questions", (),
        ),
        "order that starts again at a resume": (order_from_the_start, "questions", ()),
        "B saved as 0": (instead(checkpoint, "save", save_without_b), "learning", ()),
        "one noise in all steps of the run": (instead(WeightSync, "_add_noise", add_the_first_noise), "noise", NOISY),
        "the end token never recognised": (
            after(data_gsm8k, "stop_token_ids", lambda *_: {258}), "answers", (),
        ),
    }.items(),
    *(nightly(*item) for item in {
        "advantages of the wrong sign": (after(grpo, "group_advantages", lambda found, *_: -found), "advantages", ()),
        "advantages that are not centred": (
            after(grpo, "group_advantages", lambda found, rewards, *_: rewards), "advantages", (),
        ),
        "rewards flipped in the run": (
            after(check.Inputs, "score", lambda scored, *_: [one._replace(reward=1 - one.reward) for one in scored]),
            "rewards", (),
        ),
        "rewards flipped in the method": (after(reward_gsm8k, "score", lambda x, *_: 1 - x), "rewards", ()),
        "half of the tokens masked": (masks(lambda mask: mask * (torch.arange(mask.shape[1]) % 2)), "gradient", ()),
        "no gradient for the experts": (
            gradients(lambda parameter: parameter.grad.mul_(not parameter.is_expert)), "gradient", (),
        ),
        "gradients 8 times too large": (gradients(lambda parameter: parameter.grad.mul_(8)), "gradient", ()),
        "gradients never clipped": (
            after(Parallel, "gradient_norm", lambda norm, *_: norm * 0.01), "gradient",
            ("optim.max_grad_norm=0.1",),
        ),
        "moments forgotten in each update": (before(Learner, "_step", forget_moments), "gradient", ()),
        "another learning rate for the optimizer alone": (
            instead(learner, "adamw", lambda real, *args, lr, **more: real(*args, lr=2 * lr, **more)), "AdamW", (),
        ),
        "LoRA's scale wrong on both sides": (
            after(lora_megatron, "attach", scale_doubled), "gradient", (),
        ),
        "another mean over tokens": (
            instead(grpo, "aggregate_loss", lambda real, *args, **more: real(
                *args, **more | {"aggregate": "token-mean"})),
            "gradient", ("loss.aggregate=seq-mean-token-mean",),
        ),
        "KL of the wrong sign": (after(grpo, "kl", lambda kl, *_: -kl), "KL", ()),
        "a wrong backward pass of a kernel": (
            lambda patch: patch.setattr(kernels._RmsNorm, "backward", staticmethod(backward_without_its_mean)),
            "gradient", (),
        ),
        "no gradient for one expert": (
            gradients(lambda parameter: parameter.is_expert and parameter.grad[0].zero_()), "gradient", (),
        ),
        "moments forgotten between steps": (
            before(Learner, "_pack", forget_moments), "gradient", ("optim.prompts_per_update=8",),
        ),
        "equal answers in each group": (
            instead(TorchSampler, "sample", lambda real, *args, num_samples, **more: [
                [*group[:-1], *group[-1:] * num_samples] for group in real(*args, num_samples=1, **more)]),
            "learning", (),
        ),
    }.items()),
]))  # fmt: skip


@pytest.mark.parametrize("fault", [*list(FAULTS)[:3], *map(nightly, list(FAULTS)[3:])])
def test_a_planted_fault_is_found_by_its_check(fault: str, tmp_path: Path) -> None:
    plant, check, changes = FAULTS[fault]
    findings = judged(tmp_path, plant, TINY, *changes)
    assert check in failed(findings), findings


# ------------------------------------------------------------------------------------------------ what is not known


def new_methods(patch: MonkeyPatch) -> None:
    """Adds a loss and an advantage to knobs.py and grpo.py."""
    for name in ("kind", "advantage"):
        knobs.LossConfig.model_fields[name].annotation = str
    knobs.LossConfig.model_rebuild(force=True)
    knobs.Config.model_rebuild(force=True)
    patch.setattr(grpo, "_require", lambda *_: None)
    instead(grpo, "policy_loss", reinforce)(patch)
    instead(grpo, "group_advantages", lambda real, rewards, norm: 2 * real(rewards, "none"))(patch)


def reinforce(real: Callable, logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **keys) -> tuple:
    _, stats = real(logp, old, advantages, mask, **keys | {"kind": "ppo"})
    counts = {key: keys[key] for key in ("aggregate", "num_tokens", "num_sequences", "max_new_tokens")}
    return grpo.aggregate_loss(-advantages[:, None] * logp * keys["weights"], mask, **counts), stats


@pytest.mark.nightly
@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_without_a_second_formula_is_named_and_all_else_is_still_judged(masked: bool, tmp_path: Path) -> None:
    def plant(patch: MonkeyPatch) -> None:
        new_methods(patch)
        if masked:
            first_token_masked(patch)

    findings = judged(tmp_path, plant, TINY, "loss.kind=reinforce", "loss.advantage=rank")
    assert ("gradient" in failed(findings)) == masked, findings
    assert masked or (not failed(findings) and {"learning", "gradient"} <= findings.keys()), findings
    assert all(name in findings["not judged:"][1] for name in ("loss.kind reinforce", "loss.advantage rank"))


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.nightly
def test_the_command_reports_in_a_few_lines() -> None:
    command = [sys.executable, "preflight.py", "--self-test", TINY, "loss.kind=cispo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stderr == "", done
    lines = done.stdout.splitlines()
    assert len(lines) <= 24 and "loss cispo" in lines[1] and lines[-1].startswith("it learned"), done.stdout
    assert [line.split()[:3] for line in lines[3:6]] == [["ok", layout, "gradient"] for layout in ("DP2", "EP2", "TP2")]
    assert lines[6].startswith("two ranks agree with the reference, ")


def test_a_failed_self_test_ends_with_code_1_and_says_what_to_look_at(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(self_test_ranks.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    code = alone([TINY, *HERE], after(grpo, "kl", lambda kl, *_: -kl))
    lines = capfd.readouterr().out.splitlines()
    assert code == 1 and len(lines) <= 22, lines
    assert lines[3].startswith("two ranks cannot be compared here (device cpu, 1 cores); needed: torchrun ")
    place = next(i for i, line in enumerate(lines) if line.startswith("FAIL  KL"))
    assert "relative difference 2, at most 0.05" in lines[place] and "look at: Learner._reference" in lines[place + 1]
    assert lines[-1].startswith("it did not learn") and lines[-1].endswith(str(tmp_path))
    assert (tmp_path / "log.txt").exists()


def test_unusable_input_is_one_line_and_exit_code_2(capfd) -> None:
    assert alone([QWEN3]) == 2
    assert capfd.readouterr().err.startswith("error: device: npu: torch_npu is not installed")


def test_a_full_disk_is_an_error_and_not_a_failure_to_learn(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(self_test_ranks.tempfile, "mkdtemp", lambda **_: str(tmp_path))

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    code = alone([TINY, *HERE], before(runlog.RunLog, "log_step", full))
    said = capfd.readouterr()
    assert code == 2 and said.err == "error: metrics.jsonl: No space left on device\n", said
    assert "learn" not in said.out.splitlines()[-1] and not tmp_path.exists()


@pytest.mark.parametrize("option", ["--self-test", "--doctor"])
def test_under_torchrun_one_process_answers(option: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    assert preflight.main([option, TINY]) == 0 and capsys.readouterr() == ("", "")
