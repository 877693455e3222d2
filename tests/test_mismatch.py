"""Score centering, flipped routes and noisy logits in training runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training
from refused import refusal

from knobs import LossConfig
from learner import Learner
from model_megatron import TokenStats
from rollout import MicroBatch

pytestmark = pytest.mark.nightly
TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny_cpu.yaml"
SHORT = {"train__steps": 2, "train__checkpoint_every": 1, "rollout__round_bits": 3, "loss__kl": "none"}
SHORT |= {"loss__score_centering": 304}  # all tokens of the vocabulary


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")

    def run(name: str, layout: str = "TP1", **changes) -> tuple[str, training.Config]:
        return layout, training.config(model, out / name, **SHORT | changes)

    return training.run_all({
        "exact": run("exact"),
        "tp2": run("tp2", "TP2"),
        "split": run("split", optim__tokens_per_micro_batch=108),
        "head": run("head", loss__score_centering=32),
        "off": run("off", loss__score_centering=0),
        "clean": run("clean", rollout__round_bits=0),
        "clean_off": run("clean_off", rollout__round_bits=0, loss__score_centering=0),
        "flips": run("flips", rollout__round_bits=0, loss__score_centering=0, rollout__route_flips=0.5),
        "flips_r3": run("flips_r3", rollout__round_bits=0, loss__score_centering=0, rollout__route_flips=0.5,
                        replay__mode="r3"),
        "noise": run("noise", rollout__round_bits=0, loss__score_centering=0, rollout__logit_noise=0.5),
    })  # fmt: skip


def gap(runs, one: str, other: str) -> float:
    """The relative difference of the first gradients, which AdamW's first moment is after a step."""
    a, b = (
        torch.cat(
            [
                tensor.flatten()
                for name, tensor in training.whole(runs[run], 1, "optimizer").items()
                if name.endswith("exp_avg")
            ]
        )
        for run in (one, other)
    )
    return float((a - b).norm() / b.norm())


def test_the_correction_is_that_of_every_layout_and_split_and_more_than_rounding(runs) -> None:
    assert max(gap(runs, "tp2", "exact"), gap(runs, "split", "exact")) < 1e-4
    assert gap(runs, "off", "exact") > 0.01 and 1e-4 < gap(runs, "head", "exact") < gap(runs, "off", "exact")


def test_a_sampler_that_is_the_policy_is_not_corrected(runs) -> None:
    assert gap(runs, "clean", "clean_off") < 1e-4


@pytest.mark.parametrize("importance", ["none", "token"])
def test_the_loss_of_the_learner_is_that_of_the_paper(importance: str) -> None:
    """arXiv 2609.20807 over the whole vocabulary: -A (w_y log p_y - sum of q_v w_v log p_v), weights held constant."""
    make = torch.Generator().manual_seed(0)
    logits, q = torch.randn(2, 3, 7, generator=make), torch.randn(2, 3, 7, generator=make).softmax(-1)
    logits.requires_grad_()
    tokens, advantages = torch.randint(7, (2, 3), generator=make), torch.tensor([0.5, -1.5])
    order = torch.argsort(q, -1, descending=True)
    micro = MicroBatch(tokens, torch.ones(2, 3), q.log().gather(2, tokens[..., None])[..., 0], advantages)
    micro.head = (order, q.log().gather(2, order))
    log_p = logits.log_softmax(-1)
    of_tokens = [log_p.gather(2, tokens[..., None])[..., 0], torch.zeros(2, 3)]
    learner = SimpleNamespace(
        cfg=SimpleNamespace(loss=LossConfig(importance=importance, score_centering=7, kl="none")),
        router_load=SimpleNamespace(counting=lambda micro: contextlib.nullcontext()),
        _logp=lambda micro: TokenStats(*of_tokens, log_p.gather(2, order)),
    )
    counts = {"num_tokens": 6, "num_sequences": 2, "max_new_tokens": 3}
    loss, *_ = Learner._loss(learner, micro, None, None, counts)
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    weights = (log_p.detach().exp() / q).clamp(max=2.0) if importance == "token" else torch.ones_like(q)
    own = (weights * log_p).gather(2, tokens[..., None])[..., 0] - (q * weights * log_p).sum(-1)
    (expected,) = torch.autograd.grad(-(advantages[:, None] * own).sum() / 6, logits)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_how_much_of_the_sampler_the_head_holds_is_a_metric(runs) -> None:
    held = {name: training.metrics(runs[name])[0]["rollout/head_mass"] for name in ("exact", "head")}
    assert held["exact"] == pytest.approx(1, abs=1e-5) and 0.1 < held["head"] < 0.99


def test_a_disturbed_sampler_is_far_from_the_trainer_and_a_replay_of_its_routes_brings_it_back(runs) -> None:
    gaps = {name: training.metrics(runs[name])[1]["rollout/logp_gap_mean"] for name in runs}
    assert min(gaps["flips"], gaps["noise"]) > 1e-3 > 1e-4 > max(gaps["flips_r3"], gaps["clean"])
    for name in ("flips", "flips_r3", "noise"):  # judged on a probe without the disturbance
        assert all(row["sync/probe_gap"] < 1e-5 for row in training.metrics(runs[name]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.score_centering=8", "loss.importance=sequence"],
         "loss.importance: sequence with loss.score_centering; needed: none, token or uncorrected"),
        (["loss.score_centering=8", "rollout.top_k=5"],
         "loss.score_centering: needs the distribution that samples; needed: rollout.top_k 0 and top_p 1"),
        (["loss.score_centering=8", "rollout.prompts_per_step=32", "optim.prompts_per_update=16"],
         "optim.prompts_per_update: 16 with loss.score_centering, which is for one update of a step; needed: "
         "rollout.prompts_per_step, 32"),
        (["rollout.logit_noise=0.5", "rollout.engine=vllm"],
         "rollout.route_flips, rollout.logit_noise: for tests; needed: 0, or a tiny_model and rollout.engine torch"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    assert message in refusal(TINY, *overrides)
