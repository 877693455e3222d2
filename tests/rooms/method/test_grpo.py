"""The GRPO objective against the reference's formulas (update_reference.py), numbers by hand, closed-form gradients.

Not covered: whether the trainer passes the counts of the whole update, and whether its log-probabilities are right.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import update_reference
from tiers import ci
from torch import Tensor

import grpo
from knobs import LossConfig

AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr-grpo")
KINDS = ("ppo", "gspo", "cispo", "dppo_tv")
KL_KINDS = ("k1", "k2", "k3", "low_var_kl", "low_var_kl+", "abs")
EVERY_LOSS = list(itertools.product(KINDS, AGGREGATES))
GARBAGE = [math.nan, -1e30, *map(ci, [math.inf, -math.inf, 1e30])]


def batch(rows: int = 6, tokens: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Rows of different lengths, the last but one without a token. The ratios lie on both sides of every clip."""
    make = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([tokens, 3, 1, 5, 0, 4])[:rows]
    return {
        "logp": -3 * torch.rand(rows, tokens, generator=make, dtype=torch.float64) - 0.1,
        "old_logp": -3 * torch.rand(rows, tokens, generator=make, dtype=torch.float64) - 0.1,
        "advantages": torch.randn(rows, generator=make, dtype=torch.float64),
        "mask": (torch.arange(tokens) < lengths[:, None]).float(),
        "weights": 2 * torch.rand(rows, tokens, generator=make, dtype=torch.float64),
    }


def loss_and_gradient(data: dict[str, Tensor], **options: object) -> tuple[float, Tensor]:
    logp = data["logp"].clone().requires_grad_()
    loss, _ = grpo.policy_loss(**{**data, "logp": logp}, **options)
    loss.backward()
    return loss.item(), logp.grad


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# ----------------------------------------------------------------------------------------------------------- advantages
def test_advantages_by_hand() -> None:
    """Rewards 1 0 0 1: mean 1/2, variance (4 x 1/4) / 3. Rewards 3 1 2: mean 2, variance 1."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    scale = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(grpo.group_advantages(rewards), torch.tensor([[scale, -scale, -scale, scale]]))
    rewards = torch.tensor([[3.0, 1.0, 2.0], [5.0, 5.0, 5.0]])
    zeros = [0.0, 0.0, 0.0]
    one = 1 / (1 + 1e-6)
    torch.testing.assert_close(grpo.group_advantages(rewards, "std"), torch.tensor([[one, -one, 0.0], zeros]))
    torch.testing.assert_close(grpo.group_advantages(rewards, "none"), torch.tensor([[1.0, -1.0, 0.0], zeros]))
    torch.testing.assert_close(grpo.group_advantages(rewards, "loo"), torch.tensor([[1.5, -1.5, 0.0], zeros]))


@pytest.mark.parametrize("norm", ["std", "none", "loo"])
@pytest.mark.parametrize(("reward", "size"), [(0.1, 7), (1.0, 8), (1 / 3, 13), (1e8 + 8, 3), (-1e30, 2)])
def test_equal_rewards_have_advantage_exactly_zero(norm: str, reward: float, size: int) -> None:
    """In float32 the mean of seven 0.1 is not 0.1. Divided by a standard deviation of 0, the error becomes 0.41."""
    rewards = torch.full((3, size), reward, dtype=torch.float32)
    rewards[1] = torch.arange(size)  # a neighbouring ordinary group is not affected
    found = grpo.group_advantages(rewards, norm)
    assert torch.equal(found[[0, 2]], torch.zeros(2, size)) and found[1].min() < 0 < found[1].max()


@pytest.mark.parametrize("norm", ["std", "none", "loo"])
def test_advantages_do_not_depend_on_a_common_offset(norm: str) -> None:
    rewards = torch.tensor([[0.0, 8.0, 16.0, 0.0], [8.0, 0.0, 0.0, 0.0]])
    shifted = grpo.group_advantages(rewards + 1e8, norm)  # 1e8 + 8 is exact in float32, and so is the shift back
    assert torch.equal(shifted, grpo.group_advantages(rewards, norm))


def test_a_group_of_one_counts_as_mean_zero_and_deviation_one() -> None:
    rewards = torch.tensor([[2.0], [0.0]], dtype=torch.float64)
    assert grpo.group_advantages(rewards, "std")[:, 0].tolist() == [pytest.approx(2 / (1 + 1e-6), rel=1e-15), 0.0]
    assert torch.equal(grpo.group_advantages(rewards, "none"), rewards)
    assert torch.equal(grpo.group_advantages(rewards, "loo"), rewards)


# ------------------------------------------------------------------------------------------------------------------- KL
# --------------------------------------------------------------------------------------------------------- a teacher
def test_zero_turns_rewards_off() -> None:
    found = grpo.group_advantages(torch.tensor([[1.0, 0.0, 0.0], [2.0, 2.0, 7.0]]), "zero")
    assert torch.equal(found, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="rewards: found NaN"):
        grpo.group_advantages(torch.tensor([[math.nan, 0.0]]), "zero")


def test_a_teacher_takes_its_reverse_kl_off_the_advantage_of_each_token_by_hand() -> None:
    """0.5 - 2 (-1 + 3) = -3.5; 0.5 - 2 (-3 + 1) = 4.5; at most 20 nats: 0.5 -+ 40; a token of others has no term."""
    old, taught = torch.tensor([[-1.0, -3.0, -0.5, -90.0, -1.0]]), torch.tensor([[-3.0, -1.0, -60.0, -1.0, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    found = grpo.distilled(torch.tensor([0.5]), old, taught, mask, 2.0)
    torch.testing.assert_close(found, torch.tensor([[-3.5, 4.5, -39.5, 40.5, 0.5]]))
    same = grpo.distilled(torch.tensor([0.5, -1.0]), old.expand(2, 5), old.expand(2, 5), mask.expand(2, 5), 3.0)
    assert torch.equal(same, torch.tensor([[0.5] * 5, [-1.0] * 5]))


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Each of five tokens is a row, weighted with its probability. KL(p || q) is torch's, in float64."""
    make = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 5, generator=make, dtype=torch.float64)
    logits.requires_grad_()
    logp, taught = (torch.log_softmax(values, 0)[:, None] for values in (logits, teacher))  # (5, 1)
    old, mask = logp.detach(), torch.ones(5, 1)
    advantages = grpo.distilled(torch.zeros(5), old, taught, mask, 1.0)
    loss, _ = grpo.policy_loss(logp, old, advantages, mask, weights=5 * old.exp())  # the mean over five tokens
    (found,) = torch.autograd.grad(loss, logits)
    p, q = (torch.distributions.Categorical(logits=values) for values in (logits, teacher))
    (expected,) = torch.autograd.grad(torch.distributions.kl_divergence(p, q), logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("difference", [0.0, 0.5, -0.5, 2.0, -2.0, -2.61, -2.62, 10.9, 11.5, -25.0, 30.0])
def test_kl_values_and_gradients_by_formula(difference: float) -> None:
    """``difference`` is logp - ref_logp. e^d - d - 1 exceeds 10 from d = 2.6109.. on: there the gradient is 0."""
    d = -difference
    raw, raw_slope = math.exp(d) - d - 1, 1 - math.exp(d)
    held = clip(d, -20, 20)
    limited = min(math.exp(held) - held - 1, 10.0)
    expected = {
        "k1": (difference, 1.0),
        "k2": (difference**2 / 2, difference),
        "k3": (raw, raw_slope),
        "low_var_kl": (limited, 0.0 if limited == 10.0 else raw_slope),
        "low_var_kl+": (limited, difference),
        "abs": (abs(difference), math.copysign(1, difference) if difference else 0.0),
    }
    for kind in KL_KINDS:
        logp = torch.tensor([[difference]], dtype=torch.float64).requires_grad_()
        value = grpo.kl(logp, torch.zeros(1, 1, dtype=torch.float64), kind)
        value.sum().backward()
        assert (value.item(), logp.grad.item()) == pytest.approx(expected[kind], rel=1e-12, abs=1e-12), kind


# ---------------------------------------------------------------------------------------------------------- policy loss
@pytest.mark.parametrize(("kind", "aggregate"), EVERY_LOSS)
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.28, 3.0), (0.1, 0.5, 1.5), (0.2, 0.2, 0.0)])
def test_loss_and_gradient_against_the_formulas(
    kind: str, aggregate: str, low: float, high: float, dual: float
) -> None:
    data = batch()
    own = data["mask"].bool()
    assert (own.sum(), own.any(1).sum()) == (20, 5)
    loss = LossConfig(kind=kind, aggregate=aggregate, clip_low=low, clip_high=high, dual_clip=dual)
    logp = data["logp"].clone().requires_grad_()
    of_tokens = update_reference.policy_loss(loss, logp, data["old_logp"], data["advantages"], own) * data["weights"]
    expected = (of_tokens * update_reference.shares(aggregate, own, max_new_tokens=16)).sum()
    expected.backward()
    found, gradient = loss_and_gradient(
        data, kind=kind, aggregate=aggregate, clip_low=low, clip_high=high, dual_clip=dual, max_new_tokens=16
    )
    assert found == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, logp.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "loss", "slope"),
    [
        (1.0, 0.0, -1.0, -1.0),  # on policy: the plain policy gradient
        (-1.0, 0.0, 1.0, 1.0),
        (1.0, math.log(1.1), -1.1, -1.1),
        (1.0, math.log(1.5), -1.2, 0.0),  # a good token that is more likely already: clipped at 1 + 0.2
        (1.0, math.log(0.5), -0.5, -0.5),  # a good token that is less likely: not clipped
        (-1.0, math.log(0.5), 0.8, 0.0),  # a bad token that is less likely already: clipped at 1 - 0.2
        (-1.0, math.log(2.0), 2.0, 2.0),  # a bad token that is more likely: not clipped
        (-1.0, math.log(4.0), 3.0, 0.0),  # a bad token that is far more likely: dual clip at 3
        (-2.0, math.log(4.0), 6.0, 0.0),
        (-1.0, 25.0, 3.0, 0.0),
        (0.0, 3.0, 0.0, 0.0),
    ],
)
def test_ppo_regions_by_hand(advantage: float, log_ratio: float, loss: float, slope: float) -> None:
    data = {"logp": torch.full((1, 1), -1.0 + log_ratio, dtype=torch.float64), "old_logp": -torch.ones(1, 1)}
    more = {"advantages": torch.tensor([[advantage]]), "mask": torch.ones(1, 1, dtype=torch.bool)}
    found, gradient = loss_and_gradient(data | more)
    assert (found, gradient.item()) == pytest.approx((loss, slope), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [25.0, 1e4, -1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_absurd_log_ratio_stays_bounded(kind: str, log_ratio: float, advantage: float) -> None:
    """Without a limit, one token of +25 nats gives a loss of 7e10; the limit is e^20 (gspo e^10) without dual clip."""
    logp = torch.full((1, 1), log_ratio).requires_grad_()
    options = {"kind": kind, "mask": torch.ones(1, 1), "advantages": torch.tensor([advantage])}
    with_dual, stats = grpo.policy_loss(logp, torch.zeros(1, 1), **options)
    without, _ = grpo.policy_loss(logp, torch.zeros(1, 1), **options, dual_clip=0)
    limit = {"ppo": 3.0, "gspo": math.exp(10), "cispo": 1.2 * abs(log_ratio), "dppo_tv": math.exp(20)}[kind]
    assert abs(with_dual.item()) <= limit * (1 + 1e-6)
    assert abs(without.item()) <= max(math.exp(20), limit) * (1 + 1e-6)
    with_dual.backward()
    assert torch.isfinite(logp.grad).all()
    assert all(torch.isfinite(value) for value in stats.values())


def test_dppo_masks_by_the_change_of_the_probability() -> None:
    """Binary-TV of arXiv 2602.04879 with 0.15: 0.01 -> 0.1 stays at a ratio of 10, 0.5 -> 0.7 is masked at 1.4."""
    old, new = torch.tensor([[0.01, 0.5, 0.5, 0.5]]), torch.tensor([[0.1, 0.7, 0.3, 0.7]])
    data = {"logp": new.log(), "old_logp": old.log(), "advantages": torch.tensor([[1.0, 1.0, -1.0, -1.0]])}
    found, gradient = loss_and_gradient(
        data | {"mask": torch.ones(1, 4)}, kind="dppo_tv", clip_low=0.15, clip_high=0.15
    )
    assert gradient[0].tolist() == pytest.approx([-10 / 4, 0, 0, 1.4 / 4]) and found == pytest.approx((1.4 - 10) / 4)


def test_gspo_keeps_a_small_ratio_beside_a_large_log_probability() -> None:
    """One of 1024 tokens moves by 2^-12. Adding the mean, 2^-22, to a float32 logp of -30 would round it off."""
    logp = torch.full((1, 1024), -30.0)
    old_logp = logp.clone()
    old_logp[0, 0] -= 2**-12
    _, stats = grpo.policy_loss(logp, old_logp, torch.ones(1), torch.ones(1, 1024), kind="gspo")
    assert stats["ratio_gap"].item() == pytest.approx(2**-22, rel=1e-3)


# ----------------------------------------------------------------------------------------- what must make no difference
@pytest.mark.parametrize(("kind", "aggregate"), EVERY_LOSS)
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 0, 4], [1, 2, 3]], [[4], [3, 1], [0, 5, 2]]]
)
def test_loss_does_not_depend_on_how_rows_are_split(kind: str, aggregate: str, split: list[list[int]]) -> None:
    """The shares of micro-batches (or ranks), their gradients and the statistics add up, with different padding."""
    data = batch()
    options = {"kind": kind, "aggregate": aggregate, "max_new_tokens": 16, "num_tokens": 20, "num_sequences": 6}
    whole_loss, whole_stats = grpo.policy_loss(**data, **options)
    _, whole_gradient = loss_and_gradient(data, **options)
    loss, gradient, stats = 0.0, torch.zeros_like(whole_gradient), dict.fromkeys(whole_stats, 0.0)
    for rows in split:
        longest = max(int(data["mask"][rows].sum(dim=1).max()), 1)
        part = {name: value[rows, :longest] if value.dim() == 2 else value[rows] for name, value in data.items()}
        share, share_gradient = loss_and_gradient(part, **options)
        loss += share
        gradient[rows, :longest] += share_gradient
        for name, value in grpo.policy_loss(**part, **options)[1].items():
            stats[name] += value.item()
    assert loss == pytest.approx(whole_loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, whole_gradient)
    assert stats == pytest.approx({name: value.item() for name, value in whole_stats.items()}, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_inside_the_mask_is_not_hidden(kind: str) -> None:
    data = batch()
    data["logp"][0, 2] = math.nan
    loss, stats = grpo.policy_loss(**data, kind=kind)
    assert loss.isnan() and stats["ratio_gap"].isnan()
    assert all(grpo.kl(data["logp"], data["old_logp"], name)[0, 2].isnan() for name in KL_KINDS)


@pytest.mark.parametrize(("kind", "aggregate"), EVERY_LOSS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_outside_the_mask_makes_no_difference(kind: str, aggregate: str, garbage: float) -> None:
    data = batch()
    data["advantages"] = data["advantages"][:, None].expand(6, 7)
    outside = data["mask"] == 0
    dirty = {name: value.masked_fill(outside, garbage) for name, value in data.items()} | {"mask": data["mask"]}
    options = {"kind": kind, "aggregate": aggregate, "max_new_tokens": 16}
    (clean_loss, clean_gradient), (loss, gradient) = (loss_and_gradient(each, **options) for each in (data, dirty))
    assert loss == clean_loss and torch.equal(gradient, clean_gradient)
    assert not gradient[outside].any()
    (_, clean_stats), (_, stats) = (grpo.policy_loss(**each, **options) for each in (data, dirty))
    assert stats == clean_stats


@pytest.mark.parametrize("garbage", GARBAGE)
def test_kl_and_rollout_weights_ignore_what_is_outside_the_mask(garbage: float) -> None:
    data = batch()
    mask, outside = data["mask"], data["mask"] == 0
    old_logp, logp = (data[name].masked_fill(outside, garbage) for name in ("old_logp", "logp"))
    for kind in KL_KINDS:
        leaf = logp.clone().requires_grad_()
        value = grpo.kl(leaf, old_logp, kind, mask)
        value.sum().backward()
        assert torch.equal(value, grpo.kl(data["logp"], data["old_logp"], kind).masked_fill(outside, 0.0))
        assert leaf.grad.isfinite().all() and not leaf.grad[outside].any()
    for mode in grpo.WEIGHT_MODES:
        found = grpo.rollout_weights(old_logp, logp, mask, mode)
        assert torch.equal(found, grpo.rollout_weights(data["old_logp"], data["logp"], mask, mode))
        assert not found[outside].any()


@pytest.mark.parametrize(("kind", "aggregate"), EVERY_LOSS)
@pytest.mark.parametrize("counts", [{}, {"num_tokens": 0, "num_sequences": 0}, {"num_tokens": 9, "num_sequences": 3}])
def test_rows_without_a_token_contribute_exactly_zero(kind: str, aggregate: str, counts: dict[str, int]) -> None:
    data = {name: value.masked_fill(torch.tensor(True), math.nan) for name, value in batch().items()}
    data["mask"] = torch.zeros(6, 7)
    loss, gradient = loss_and_gradient(data, kind=kind, aggregate=aggregate, max_new_tokens=16, **counts)
    assert loss == 0.0 and torch.equal(gradient, torch.zeros(6, 7, dtype=torch.float64))


def test_only_logp_gets_a_gradient_and_half_precision_is_computed_in_float32() -> None:
    data = {name: value.bfloat16().requires_grad_(name != "mask") for name, value in batch().items()}
    loss, stats = grpo.policy_loss(**data)
    loss.backward()
    assert data["logp"].grad is not None and not any(value.requires_grad for value in stats.values())
    assert all(data[name].grad is None for name in ("old_logp", "advantages", "weights"))
    same, _ = grpo.policy_loss(**{name: value.float() for name, value in data.items()})
    assert loss.dtype == torch.float32 and torch.equal(loss, same)


# ------------------------------------------------------------------------------------------- aggregation and statistics
def test_statistics_by_hand() -> None:
    """Ratios 1, 1.5, 0.5, 4 with A = 1 1 -1 -1: clipped 1.5 and 0.5, dual-clipped 4; the last row is masked."""
    ratios = torch.tensor([[1.0, 1.5], [0.5, 4.0], [9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    loss, stats = grpo.policy_loss(ratios.log(), torch.zeros(3, 2), torch.tensor([1.0, -1.0, -1.0]), mask)
    assert loss.item() == pytest.approx((-1 - 1.2 + 0.8 + 3) / 4)
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(
        {
            "policy_loss": loss.item(),
            "clip_frac": 2 / 4,
            "dual_clip_frac": 1 / 4,
            "ppo_kl": -(math.log(1.5) + math.log(0.5) + math.log(4)) / 4,
            "ratio_mean": 7 / 4,
            "ratio_gap": (0.5 + 0.5 + 3) / 4,
        }
    )


@pytest.mark.parametrize(("kind", "clipped"), [("ppo", 2), ("gspo", 3), ("cispo", 4), ("dppo_tv", 2)])
def test_tokens_without_an_advantage_count_as_not_clipped(kind: str, clipped: int) -> None:
    """Three rows with A = 0, 1, -1. The probability 0.25 of each token becomes 0.025, 0.25, 0.9: ratios 0.1, 1, 3.6.

    Clipped are: ppo, 3.6 for A > 0 and 0.1 for A < 0; gspo, the row with A < 0, for its mean is 0.711; cispo, 0.1 and
    3.6 of both rows; dppo_tv, the change by 0.65 for A > 0 and by -0.225 for A < 0. The dual clip limits one 3.6.
    """
    probabilities = torch.tensor([[0.025, 0.25, 0.9]], dtype=torch.float64).expand(3, 3)
    old = torch.full((3, 3), 0.25, dtype=torch.float64)
    advantages = torch.tensor([0.0, 1.0, -1.0])
    _, stats = grpo.policy_loss(probabilities.log(), old.log(), advantages, torch.ones(3, 3), kind=kind)
    assert stats["clip_frac"].item() == pytest.approx(clipped / 9)
    assert stats["dual_clip_frac"].item() == pytest.approx((kind == "ppo") / 9)


# --------------------------------------------------------------------------------------------------- rollout correction
def test_rollout_weights_by_hand() -> None:
    """Ratios 1.5 0.5 8 | 1.5 1.2 | 0.4 0.6: products 6, 1.8 and 0.24, clipped at 2. IcePop's lower bound is 0.5."""
    ratios = torch.tensor([[1.5, 0.5, 8.0], [1.5, 1.2, 7.0], [0.4, 0.6, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]])
    expected = {
        "none": [[1, 1, 1], [1, 1, 0], [1, 1, 0]],
        "token": [[1.5, 0.5, 2], [1.5, 1.2, 0], [0.4, 0.6, 0]],
        "sequence": [[2, 2, 2], [1.8, 1.8, 0], [0.24, 0.24, 0]],
        "icepop": [[1.5, 0.5, 0], [1.5, 1.2, 0], [0, 0.6, 0]],
        "mis": [[0, 0, 0], [1.8, 1.8, 0], [0.24, 0.24, 0]],  # has no lower bound
    }
    old_logp = ratios.log().requires_grad_()
    for mode, weights in expected.items():
        found = grpo.rollout_weights(old_logp, torch.zeros_like(ratios), mask, mode)
        torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float64))
        assert not found.requires_grad
    assert grpo.rollout_weights(old_logp, torch.zeros_like(ratios), mask, clip=1.1).max().item() == pytest.approx(1.1)


def test_a_masked_token_has_no_gradient_and_still_counts_in_the_mean() -> None:
    """Two tokens with advantage 1 and ratio 1; the second is masked. The loss is -1 x 1.5 / 2, not -1 x 1.5 / 1."""
    logp = torch.tensor([[0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    mask, rollout_logp = torch.ones(1, 2), -torch.tensor([[1.5, 9.0]], dtype=torch.float64).log()
    weights = grpo.rollout_weights(logp.detach(), rollout_logp, mask, "icepop", clip=5.0)
    loss, _ = grpo.policy_loss(logp, logp.detach(), torch.ones(1), mask, weights=weights)
    loss.backward()
    assert loss.item() == pytest.approx(-0.75)
    assert logp.grad.tolist() == [[pytest.approx(-0.75), 0.0]]


def test_rollout_weights_of_an_exact_sampler_are_one_and_of_an_absurd_one_bounded() -> None:
    logp, mask = batch()["logp"].float(), torch.ones(6, 7)
    for mode, largest in (("token", 2), ("sequence", 2), ("icepop", 0), ("mis", 0)):
        for offset, weight in ((0, 1), (1e4, largest), (-1e4, 0)):
            assert torch.equal(grpo.rollout_weights(logp + offset, logp, mask, mode), weight * mask), mode


# ------------------------------------------------------------------------------------------------------------ bad input
ROW = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("function", "arguments", "changed", "message"),
    [
        (grpo.group_advantages, [ROW, "mean"], {}, "norm: must be one of std, none, loo.*, not 'mean'"),
        (grpo.group_advantages, [torch.zeros(4)], {}, r"rewards: found shape \(4,\); give \(prompts, group_size\)"),
        (grpo.group_advantages, [torch.tensor([[1.0, math.nan]])], {}, "rewards: found NaN or infinity"),
        (grpo.kl, [ROW, ROW[:1]], {}, r"the shapes .*'ref_logp': \(1, 3\).* differ; give all tensors one shape"),
        (grpo.policy_loss, [ROW] * 4, {"aggregate": "mean"}, "aggregate: must be one of token-mean.*, not 'mean'"),
        (
            grpo.policy_loss,
            [ROW] * 4,
            {"aggregate": "dr-grpo"},
            "max_new_tokens: must be 1 or more for aggregate dr-grpo, not None",
        ),
        (grpo.policy_loss, [ROW] * 4, {"dual_clip": 0.5}, "dual_clip: must be more than 1, or 0 for off, not 0.5"),
        (grpo.policy_loss, [ROW] * 4, {"clip_low": -0.1}, "clip_low, clip_high: must be 0 or more, not -0.1, 0.2"),
        (grpo.policy_loss, [ROW, ROW, torch.zeros(3), ROW], {}, r"advantages: found shape \(3,\); give one of"),
        (grpo.policy_loss, [ROW] * 4, {"weights": ROW[:, :1]}, "the shapes .*'weights'"),
        (
            grpo.rollout_weights,
            [ROW] * 3,
            {"mode": "icepop", "low": 2.0},
            "low: must be at least 0 and less than clip .2.0., not 2.0",
        ),
        (grpo.rollout_weights, [ROW] * 3, {"clip": 0.0}, "clip: must be more than 0, not 0.0"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_found_and_what_is_needed(
    function: Callable, arguments: list, changed: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments, **changed)


def test_the_penalty_of_overlong_completions_by_hand() -> None:
    """Of at most 20 tokens, the last 5 are the buffer: 15 tokens cost nothing, each further one a fifth of 0.5."""
    lengths = torch.tensor([[1, 15, 16], [18, 19, 20]])
    found = grpo.overlong_penalty(lengths, max_new_tokens=20, buffer=5, penalty=0.5)
    assert found.tolist() == [pytest.approx([0, 0, 0.1]), pytest.approx([0.3, 0.4, 0.5])]
    assert grpo.overlong_penalty(lengths, 20, 20, 2.0)[0, 0].item() == pytest.approx(0.1)
