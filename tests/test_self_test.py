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
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import training
import world
from torch import Tensor
from training import after

import data_gsm8k
import grpo
import kernels
import learner
import lora_megatron
import parallel_setup
import preflight
import reward_gsm8k
import rollout
import runlog
import startup
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
    "no gradient for the experts": (
        gradients(lambda parameter: parameter.grad * (not parameter.is_expert)), "gradient", (),
    ),
    "no gradient for one expert": (gradients(first_expert_lost), "gradient", ()),
    "gradients 8 times too large": (gradients(lambda parameter: parameter.grad * 8), "gradient", ()),
    "gradients never clipped": (never_clipped, "gradient", ("optim.max_grad_norm=0.1",)),
    "moments forgotten in each update": (lambda: before(Learner, "_step", forget_moments), "gradient", ()),
    "moments forgotten between steps": (lambda: before(Learner, "_pack", forget_moments), "gradient", SEVERAL),
    "the optimizer's step count forgotten": (lambda: before(Learner, "_step", forget_steps), "AdamW", ()),
    "another learning rate": (lambda: after(learner, "learning_rate", lambda rate, *_: rate * 2), "AdamW", ()),
    "LoRA's scale wrong on both sides": (lambda: after(lora_megatron, "attach", scale_doubled), "gradient", ()),
    "another mean over tokens": (always_one_mean, "gradient", ("loss.aggregate=seq-mean-token-mean",)),
    "KL of the wrong sign": (lambda: after(grpo, "kl", lambda kl, *_: -kl), "KL", ()),
    "a reference with its adapters on": (reference_with_adapters, "KL", ()),
    "positions wrong on both sides": (rotated_backwards, "sampler", ()),
    "a wrong backward pass of a kernel": (norm_backward_without_its_mean, "gradient", ()),
    "the same questions in each step": (first_questions, "questions", ()),
    "the end token never recognised": (
        lambda: after(data_gsm8k, "stop_token_ids", lambda *_: {258}), "answers", (),
    ),
    "equal answers in each group": (equal_groups, "learning", ()),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_check(fault: str, tmp_path: Path) -> None:
    plant, check, changes = FAULTS[fault]
    findings = judged(tmp_path, plant, TINY, *changes)
    print(findings)
    assert check in failed(findings), findings


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_reports_in_a_few_lines_and_takes_less_than_a_minute() -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "preflight.py", "--self-test", TINY, "loss.kind=cispo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stderr == "", done
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used < 60
    lines = done.stdout.splitlines()
    assert len(lines) <= 20 and "loss cispo" in lines[1] and lines[-1].startswith("it learned"), done.stdout
    assert [line.split()[:3] for line in lines[3:6]] == [["ok", layout, "gradient"] for layout in ("DP2", "EP2", "TP2")]
    assert lines[6].startswith("two ranks agree with the reference, ")
    assert "KL" in done.stdout and "at least 0.3" in done.stdout


def test_a_failed_self_test_ends_with_code_1_and_says_what_to_look_at(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(self_test_ranks.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    code = alone([TINY, *HERE], FAULTS["KL of the wrong sign"][0])
    lines = capfd.readouterr().out.splitlines()
    assert code == 1 and len(lines) <= 17, lines
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
