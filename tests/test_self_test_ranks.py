"""The self-test on two ranks: sound methods pass, and every fault between ranks fails the check that is made for it.

Each fault is planted in the product's own functions, in one layout that shows it. One world of two forked ranks runs
all of them, one after the other.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training
import world
from planting import Plant, after, instead
from pytest import MonkeyPatch
from tiers import asked, nightly
from torch import Tensor

import adapter_weights
import grpo
import learner
import lora_megatron
import preflight
import rollout
import weight_sync
import weights_hf
from checks import self_test, self_test_ranks
from config import resolve_config
from inputs.config_rules import OTHER_RULES
from knobs import Config
from learner import Learner
from parallel_setup import Parallel
from rollout import Rollout

ROOT = Path(__file__).parents[1]
TINY, QWEN3, QWEN15 = (str(ROOT / "configs" / f"{name}.yaml") for name in ("tiny_cpu", "qwen3", "qwen15_moe"))
HERE = ["device=cpu", "rollout.engine=torch"]
Findings = dict[str, tuple[bool, str]]


# ------------------------------------------------------------------------------------------------ planting a fault


def gradients(change: Callable[[torch.nn.Parameter, Parallel], Tensor | float]) -> Plant:
    """After their sum over ranks, gradients are multiplied by ``change``."""

    def all_of_them(_: None, parallel: Parallel, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad *= change(parameter, parallel)

    return after(Parallel, "sync_gradients_", all_of_them)


def counts(**changes: Callable[[Learner, learner.Update], float]) -> Plant:
    """Learner._pack gives other counts."""
    return after(
        Learner, "_pack",
        lambda update, trainer, *_: update._replace(
            counts=update.counts | {name: change(trainer, update) for name, change in changes.items()}
        ),
    )  # fmt: skip


def own_tokens(trainer: Learner, update: learner.Update) -> float:
    return float(sum(micro.mask.sum() for micro in update.micro_batches))


def own_sequences(trainer: Learner, update: learner.Update) -> float:
    return float(sum(micro.mask.any(1).sum() for micro in update.micro_batches))


def in_batch(change: Callable[[Rollout], None]) -> Plant:
    def changed(result: tuple, *_: object) -> tuple:
        change(result[0])
        return result

    return after(rollout, "sample", changed)


def rewards_of_this_rank(batch: Rollout) -> None:
    mine = batch.rewards[dist.get_rank() :: 2]
    batch.rewards = mine.repeat_interleave(2, 0)


def place_on_the_rank(real: Callable, seed: int, what: str, key: str) -> int:
    """The draw of an expert's factor depends on its place on its rank; each of two ranks has two experts."""
    return real(seed, what, re.sub(r"\d+$", lambda found: str(int(found[0]) % 2), key))


def local_clip(real: Callable, trainer: Learner, step: int) -> float:
    """Clips by the norm of this rank's gradients, and reports the true one."""
    true = trainer.parallel.gradient_norm(trainer.parameters).item()
    local = sum(parameter.grad.square().sum() for parameter in trainer.parameters) ** 0.5
    with MonkeyPatch.context() as patch:
        patch.setattr(Parallel, "gradient_norm", lambda *_: local)
        real(trainer, step)
    return true


def same_half(shares: list, *_: object) -> list:
    return [[share[0]] * len(share) for share in shares]


def other_advantages(advantages: Tensor, *_: object) -> Tensor:
    return advantages.roll(8, 0) if dist.get_rank() == 1 else advantages


def rank_order(whole: Tensor, by_rank: Tensor, count: int, tensor: int) -> Tensor:
    return by_rank[::tensor].flatten(0, 1)[:count].cpu()


def swapped_experts(pieces: dict, adapters: dict, wholes: dict, arch: object, parallel: Parallel, *_: object) -> dict:
    factors = lora_megatron.factors(adapters)
    return {name: piece.flip(0) if factors[name].is_expert else piece for name, piece in pieces.items()}


def replicated(parameter: torch.nn.Parameter) -> bool:
    return parameter.partial_over == "tensor"


def no_tensor_sum(real: Callable, parallel: Parallel, parameters: list[torch.nn.Parameter]) -> None:
    kept = [parameter.partial_over for parameter in parameters]
    for parameter in parameters:
        parameter.partial_over = None
    real(parallel, parameters)
    for parameter, group in zip(parameters, kept, strict=True):
        parameter.partial_over = group


DOUBLED = gradients(lambda p, _: 1.0 + replicated(p))  # of replicated factors


FAULTS = dict(asked([  # fault: the layout, the check that must find it, how it is planted, overrides
    *{
        "expert gradients doubled": ("EP2", "gradient", gradients(lambda p, _: 1.0 + p.is_expert)),
        "expert gradients summed over the wrong group": (
            "EP2", "gradient", instead(Parallel, "sync_gradients_", lambda real, parallel, parameters: real(
                dataclasses.replace(parallel, expert_data_group=parallel.data_group), parameters)),
        ),
        "copies counted twice in the norm": ("TP2", "gradient", after(Parallel, "copies", lambda *_: 1)),
        "the loss divided by this rank's tokens": ("DP2", "gradient", counts(num_tokens=own_tokens)),
        "both ranks train the same half": ("DP2", "rows", after(rollout, "plan", same_half)),
        "replicated factors not summed over tensor ranks, bf16": (
            "TP2", "copies", instead(Parallel, "sync_gradients_", no_tensor_sum), "model.dtype=bf16",
        ),
        "no sum over data ranks": ("DP2", "gradient", instead(Parallel, "sync_gradients_", lambda *_: None)),
        "experts that start equal on both ranks": (
            "EP2", "initial", instead(lora_megatron, "derive_seed", place_on_the_rank),
        ),
        "advantages of the other rank's prompts": (
            "DP2", "advantages", after(grpo, "group_advantages", other_advantages),
        ),
        "rewards of this rank's prompts only": ("DP2", "rewards", in_batch(rewards_of_this_rank)),
        "the truncated answers of the next prompt": (
            "DP2", "rows", in_batch(lambda batch: setattr(batch, "truncated", batch.truncated.roll(self_test.GROUP))),
            "loss.mask_truncated=true",
        ),
        "answers in the order of ranks": ("DP2", "samples", after(rollout, "in_prompt_order", rank_order)),
        "experts exchanged at a restore": ("EP2", "restored", after(adapter_weights, "scatter", swapped_experts)),
        "gradients clipped by this rank's norm": ("EP2", "AdamW", instead(Learner, "_step", local_clip)),
        "metrics of this rank": ("DP2", "metrics", instead(Parallel, "sum_over_data", lambda _, __, x: x.detach())),
        "sequences counted on this rank": (
            "DP2", "gradient", counts(num_sequences=own_sequences), "loss.aggregate=seq-mean-token-mean",
        ),
        "shards joined in the wrong order in the sampler": (
            "TP2", "sampler", instead(weights_hf, "gather", lambda real, *args: real(*args).flip(0)),
        ),
    }.items(),
    *(nightly(*item) for item in {
        "gradients divided by the number of ranks": ("DP2", "gradient", gradients(lambda *_: 0.5)),
        "gradients of replicated factors doubled": ("TP2", "gradient", DOUBLED),
        "replicated factors not summed over tensor ranks": (
            "TP2", "gradient", instead(Parallel, "sync_gradients_", no_tensor_sum),
        ),
        "gradients summed after every micro-batch": (  # and summed again at the end
            "DP2", "gradient", instead(Learner, "_loss", lambda real, trainer, *args: (
                trainer.parallel.sync_gradients_(trainer.parameters), real(trainer, *args))[1]),
        ),
        "gradients summed twice": (
            "DP2", "gradient", instead(Parallel, "sync_gradients_", lambda real, *args: [real(*args), real(*args)]),
        ),
        "rewards of the neighbouring prompt": (
            "DP2", "rewards", in_batch(lambda batch: setattr(batch, "rewards", batch.rewards.roll(1, dims=0))),
        ),
        "the same random numbers on both ranks": (
            "DP2", "samples", instead(rollout, "derive_seed", lambda real, seed, name, step, place: real(
                seed, name, step, place // 2)),
        ),
        "other noise on each rank": (
            "DP2", "samples", instead(weight_sync.aqn, "perturb", lambda real, *args, seed, **more: real(
                *args, seed=seed + dist.get_rank(), **more)), "aqn.schedule=qerl", "aqn.sigma_start=0.05",
        ),
        "metrics summed over tensor ranks": (
            "TP2", "metrics", instead(Parallel, "sum_over_data", lambda _, parallel, x: parallel.sum_over_ranks(x)),
        ),
    }.items()),
]))  # fmt: skip
SOUND = dict(asked([  # the method, in one layout each: all of them in all layouts are in docs/self_test.md
    *{
        "Qwen3's in bf16, with noise": ("EP2", QWEN3, "aqn.schedule=qerl"),
        "routers, r3, dr-grpo": (
            "TP2", TINY, "replay.mode=r3", "loss.aggregate=dr-grpo", "loss.kl=low_var_kl+",
            "lora.targets=[linear_qkv,linear_proj,linear_fc1,linear_fc2,router]",
        ),
        "gspo, small micro-batches, no equal groups": (
            "DP2", TINY, "loss.kind=gspo", "loss.aggregate=seq-mean-token-mean", "loss.clip_low=3e-4",
            "loss.clip_high=4e-4", "optim.tokens_per_micro_batch=64", "loss.skip_equal_groups=true",
        ),
    }.items(),
    *(nightly(*item) for item in {
        "Qwen1.5's, cispo, 4 updates, r2, entropy bonus": (
            "TP2", QWEN15, "model.dtype=fp32", "loss.kind=cispo", "replay.mode=r2", "loss.entropy_coef=1e-3",
        ),
    }.items()),
]))  # fmt: skip


def judge_each(folder: Path, jobs: list[tuple[str, tuple[str, ...], Plant]]) -> list[Findings]:
    """Called on both ranks of a world. The findings on each (layout, arguments, fault)."""
    training.lighten(lenient=False)
    warnings.simplefilter("ignore")
    judged, inputs = [], {}
    for number, (layout, arguments, plant) in enumerate(jobs):
        cfg, place, written = config(*arguments), folder / str(number), folder / Path(arguments[0]).stem
        if dist.get_rank() == 0:
            place.mkdir()
            if not written.exists():
                written.mkdir()
                inputs[written] = self_test.write_inputs(cfg, written, 260, boost=1.3)
            for path in written.iterdir():
                (place / path.name).symlink_to(path)
        inputs, _ = self_test_ranks.everyones(inputs)
        answers = inputs[written]
        with MonkeyPatch.context() as patch:
            plant(patch)
            judged.append(dict(self_test_ranks.judge_layout(cfg, place, layout, answers, torch.device("cpu"))))
    return judged


def config(*arguments: str) -> Config:
    return resolve_config(arguments[0], [*HERE, *arguments[1:]], rules=OTHER_RULES)[0]


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, Findings]:
    """The findings on every method and every fault, by name."""
    training.import_before_the_fork()
    jobs = {name: (layout, arguments, lambda _: None) for name, (layout, *arguments) in SOUND.items()}
    jobs |= {name: (layout, (TINY, *more), plant) for name, (layout, _, plant, *more) in FAULTS.items()}
    by_rank = training.in_world("DP2", judge_each, tmp_path_factory.mktemp("ranks"), list(jobs.values()))
    assert by_rank[0] == by_rank[1]
    return dict(zip(jobs, by_rank[0], strict=True))


def failed(findings: Findings) -> list[str]:
    return [name for name, (good, _) in findings.items() if not good]


@pytest.mark.nightly
@pytest.mark.parametrize("method", SOUND)
def test_two_ranks_of_a_sound_method_agree_with_the_reference(method: str, judged: dict[str, Findings]) -> None:
    findings = judged[method]
    assert not failed(findings) and {"rows", "samples", "metrics", "gradient"} <= findings.keys(), findings


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_ranks_is_found_by_its_check(fault: str, judged: dict[str, Findings]) -> None:
    findings = judged[fault]
    assert FAULTS[fault][1] in failed(findings), findings


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.nightly
def test_the_command_names_layout_and_place_of_a_fault_on_two_ranks(tmp_path: Path, monkeypatch, capfd) -> None:
    """The faults of a forked command reach its ranks, which it forks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run() -> int:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        with MonkeyPatch.context() as patch:
            DOUBLED(patch)
            return preflight.main(["--self-test", TINY, *HERE, "--ranks", "2"])

    (code,) = world.as_torchrun(1, run)
    lines = capfd.readouterr().out.splitlines()
    assert code == 1, lines
    assert [line[:19] for line in lines[3:5]] == ["ok    DP2 gradient ", "ok    EP2 gradient "]
    assert lines[5].startswith("FAIL  TP2 AdamW ")
    assert lines[7].startswith("FAIL  TP2 gradient step 1: norm ")
    assert lines[8].startswith("      look at: Parallel.sync_gradients_") and len(lines) == 10
    assert next(tmp_path.glob("self_test-*/log-TP2-1.txt")).exists()


def test_ranks_that_cannot_be_compared_are_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(self_test_ranks.devices, "resolve", lambda _: torch.device("cuda"))
    assert self_test_ranks.main([TINY, "--ranks", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: two ranks cannot be compared here (device cuda, ")
    others = {"LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in ({"RANK": "3", "WORLD_SIZE": "4"} | others).items():
        monkeypatch.setenv(name, value)
    assert self_test_ranks.main([TINY, "--ranks", "2"]) == 2
    assert capsys.readouterr().err == "error: --ranks 2: torchrun has started 4; needed: --nproc_per_node=2\n"
