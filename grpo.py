"""Computes advantages, KL estimates, policy losses and their aggregation with plain tensor functions (steps 3 and 4).

This file needs only torch.

P is the number of prompts, G the number of completions per prompt, B the number of rows, and T the number of tokens per
padded row. A log-probability belongs to the token at the same position. The mask is non-zero on sampled tokens.
Values outside the mask, even NaN, change neither a result nor a gradient, and a row without a token in the mask
contributes exactly 0.

The loss of a micro-batch is its share of the update's loss. It is divided by the counts of the whole update over all
data ranks. So the shares add up to the same loss, however the rows are split.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NORMS = ("std", "none", "loo", "zero")
KL_KINDS = ("k1", "k2", "k3", "low_var_kl", "low_var_kl+", "abs")
AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr-grpo")
WEIGHT_MODES = ("none", "token", "sequence", "icepop", "mis", "uncorrected")
MASKING_MODES = ("icepop", "mis")

STD_EPS = 1e-6
LOG_RATIO_LIMIT = 20.0  # nats: e^20 is far below the largest float32 number
LOW_VAR_KL_LIMIT = 10.0  # largest low_var_kl per token; above it the gradient is 0
GSPO_LOG_RATIO_LIMIT = 10.0  # nats; an upper limit only


# ----------------------------------------------------------------------------------------------------------- advantages
def group_advantages(rewards: Tensor, norm: str | Callable[[Tensor], Tensor] = "std") -> Tensor:
    """Compute the advantage of each completion over its group.  (P, G) -> (P, G)

    std: reward minus the group's mean, divided by its standard deviation (ddof 1) + 1e-6 (GRPO, arXiv 2402.03300).
    none: reward minus the group's mean (Dr. GRPO, arXiv 2503.20783).
    loo: reward minus the mean of the G - 1 others (RLOO, arXiv 2402.14740).
    zero: always 0, so that the policy learns only from a teacher.
    Equal rewards in a group give exactly 0. In a group of one, the mean counts as 0 and the standard deviation as 1.
    If ``norm`` is a function, it computes the advantages itself.
    Raises ValueError for a wrong shape, an unknown norm, or a reward that is not finite.
    """
    if not callable(norm):
        _require("norm", norm, NORMS)
    if rewards.dim() != 2 or not rewards.numel():
        raise ValueError(f"rewards: found shape {tuple(rewards.shape)}; give (prompts, group_size), not empty")
    rewards = _at_least_float32(rewards)
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards: found NaN or infinity; give finite numbers")
    if callable(norm):
        return norm(rewards.clone())  # a function of the user may change it in place
    if norm == "zero":
        return torch.zeros_like(rewards)
    group_size = rewards.shape[1]
    if group_size == 1:
        return rewards / (1.0 + STD_EPS) if norm == "std" else rewards.clone()
    # The smallest reward of the group is subtracted first. Then equal rewards are exactly 0 (the mean of seven float32
    # 0.1 is not 0.1), and a large common offset does not spoil the variance.
    above = rewards - rewards.amin(dim=1, keepdim=True)
    centred = above - above.mean(dim=1, keepdim=True)
    if norm == "std":
        return centred / (above.std(dim=1, keepdim=True) + STD_EPS)
    return centred * (group_size / (group_size - 1)) if norm == "loo" else centred


def distilled(advantages: Tensor, old_logp: Tensor, teacher_logp: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return A - coef x (old_logp - teacher_logp) for each token, where A is its row's advantage.  (B,) -> (B, T)

    This is on-policy distillation by policy gradients (MiniLLM, arXiv 2306.08543). The difference in
    brackets is the estimate k1 of KL(policy || teacher), limited to +-20 nats. The gradient of this KL is the mean of
    k1 times the gradient of the log-prob.
    """
    return advantages[:, None] - coef * kl(old_logp, teacher_logp, "k1", mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Compute DAPO's (arXiv 2503.14476) penalty, which is subtracted from the rewards of long completions.

    It is 0 up to max_new_tokens - buffer tokens. From there it rises linearly to ``penalty`` at max_new_tokens, where
    a completion is cut off. The result has the shape of ``lengths``.
    """
    return penalty * ((lengths - (max_new_tokens - buffer)) / buffer).clamp(min=0, max=1)


def shuffled(rewards: Tensor, seed: int) -> Tensor:
    """Shuffle the rewards over all completions of the step, for the control experiment.  (P, G) -> (P, G)"""
    order = torch.randperm(rewards.numel(), generator=torch.Generator().manual_seed(seed))
    return rewards.flatten()[order].view_as(rewards)


# ------------------------------------------------------------------------------------------------------------------- KL
def kl(logp: Tensor, ref_logp: Tensor, kind: str = "low_var_kl", mask: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) per token, for tokens drawn from the policy.  (B, T) -> (B, T)

    With d = ref_logp - logp: k1 = -d; k2 = d^2 / 2; k3 = e^d - d - 1; abs = |d| (Schulman, "Approximating KL
    divergence"). low_var_kl is the usual choice of trainers: k3 with d limited to +-20 and the result limited to 10.
    low_var_kl+ has the value of low_var_kl and the gradient of k2. Outside the mask the result is 0. Only logp gets a
    gradient.

    As a loss, k1 has the expected gradient 0, and k3 has the gradient of the forward KL. The gradient of low_var_kl is
    0 if logp is more than 2.611 nats below ref_logp, or more than 11 nats above it. Only k2 and low_var_kl+ have the
    gradient of the reverse KL.
    """
    _require("kl", kind, KL_KINDS)
    _same_shape(logp=logp, ref_logp=ref_logp, mask=mask)
    logp, ref_logp = _at_least_float32(logp), _at_least_float32(ref_logp).detach()
    if mask is not None:
        logp, ref_logp = _inside(mask, logp), _inside(mask, ref_logp)
    d = ref_logp - logp
    exact = {
        "k1": lambda: -d,
        "k2": lambda: 0.5 * d.square(),
        "k3": lambda: torch.expm1(d) - d,
        "abs": lambda: d.abs(),
    }
    if kind in exact:
        return exact[kind]()
    limited = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = (torch.expm1(limited) - limited).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
    if kind == "low_var_kl":
        return value
    return value.detach() - d.detach() * (logp - logp.detach())  # the bracket is exactly 0 and has the gradient 1


# ---------------------------------------------------------------------------------------------------------- policy loss
def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: str | Callable[["LossInputs"], "PerToken"] = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregate: str = "token-mean",
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    max_new_tokens: int | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the micro-batch's share of the update's policy loss and of its statistics.  (B, T) -> (), dict of ()

    advantages: (B,), (B, 1) or (B, T). weights (B, T): constant factors of the token losses (rollout_weights).
    r = exp(logp - old_logp), A = advantage, clip(r) = r limited to [1 - clip_low, 1 + clip_high].
    ppo (arXiv 1707.06347): max(-A r, -A clip(r)) with the log-ratio limited to +-20. If A < 0, the loss is at most
    -A dual_clip (arXiv 1912.09729); if dual_clip is 0 or None, this limit is off.
    gspo (arXiv 2507.18071): the same maximum, but r is the geometric mean of the row's ratios. The gradient of r is
    spread over the row's tokens, and there is no dual clip.
    cispo (arXiv 2506.13585): -clip(r) A logp, where clip(r) is a constant, so only logp has a gradient.
    dppo_tv (arXiv 2602.04879, Binary-TV): -A r. The loss is 0 if the token's probability has risen by more than
    clip_high and A > 0, or has fallen by more than clip_low and A < 0.
    If ``kind`` is a function, it computes the token losses and their metrics itself.

    For aggregate, num_tokens, num_sequences and max_new_tokens see aggregate_loss. GSPO's paper uses
    seq-mean-token-mean. The statistics have no gradient. They are policy_loss, which is the loss itself, and means over
    tokens: clip_frac, dual_clip_frac, ppo_kl (old_logp - logp), ratio_mean, and ratio_gap, the mean of |r - 1|. Both
    clip fractions are 0 where A = 0, because clipping changes nothing there. ratio_gap is exactly 0 as long as the
    policy has not changed. With the update's num_tokens, the statistics add up over micro-batches and ranks.
    """
    if not callable(kind):
        _require("kind", kind, tuple(PER_TOKEN))
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low, clip_high: must be 0 or more, not {clip_low}, {clip_high}")
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip: must be more than 1, or 0 for off, not {dual_clip}")
    _same_shape(logp=logp, old_logp=old_logp, mask=mask, weights=weights)
    rows, tokens = logp.shape
    if tuple(advantages.shape) not in (possible := ((rows,), (rows, 1), (rows, tokens))):
        raise ValueError(f"advantages: found shape {tuple(advantages.shape)}; give one of {possible}")
    # The mask is applied to the inputs, because 0 x NaN in the finished loss would still reach the gradient.
    logp, old_logp = _inside(mask, _at_least_float32(logp)), _inside(mask, _at_least_float32(old_logp).detach())
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    advantages = _inside(mask, advantages.detach().to(logp.dtype).expand(rows, tokens))

    inputs = LossInputs(logp, old_logp, advantages, mask, clip_low, clip_high, dual_clip or 0.0)
    per_token, measured = (kind if callable(kind) else PER_TOKEN[kind])(inputs)
    if weights is not None:
        per_token = per_token * _inside(mask, weights.detach().to(per_token.dtype))

    loss = aggregate_loss(
        per_token,
        mask,
        aggregate=aggregate,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_new_tokens=max_new_tokens,
    )
    with torch.no_grad():
        stats = {name: aggregate_loss(value, mask, num_tokens=num_tokens) for name, value in measured.items()}
    return loss, {"policy_loss": loss.detach(), **stats}


@dataclass(frozen=True)
class LossInputs:
    """The inputs of the token losses. The tensors are (B, T), in float32 or wider, and 0 outside the mask."""

    logp: Tensor  # log-probs of the policy that is trained, the only tensor with a gradient
    old_logp: Tensor  # log-probs before the rollout's first optimizer step, computed by the trainer
    advantages: Tensor
    mask: Tensor
    clip_low: float
    clip_high: float
    dual_clip: float  # 0 means off

    def clipped(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.clip_low, 1 + self.clip_high)


PerToken = tuple[Tensor, dict[str, Tensor]]  # the loss of each token, and its metrics by name


def _ppo(x: LossInputs) -> PerToken:
    log_ratio = (x.logp - x.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    per_token, was_clipped = _pessimistic(x, ratio)
    if not x.dual_clip:
        return per_token, _measured(log_ratio, ratio, was_clipped)
    ceiling = -x.advantages * x.dual_clip
    was_dual_clipped = (x.advantages < 0) & (per_token > ceiling)
    return torch.where(was_dual_clipped, ceiling, per_token), _measured(log_ratio, ratio, was_clipped, was_dual_clipped)


def _gspo(x: LossInputs) -> PerToken:
    log_ratio = x.logp - x.old_logp
    row_tokens = (x.mask != 0).sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    row_log_ratio = log_ratio.detach().sum(dim=1, keepdim=True) / row_tokens
    ratio = (row_log_ratio + (x.logp - x.logp.detach())).clamp(max=GSPO_LOG_RATIO_LIMIT).exp()
    per_token, was_clipped = _pessimistic(x, ratio)
    return per_token, _measured(log_ratio, ratio, was_clipped)


def _cispo(x: LossInputs) -> PerToken:
    log_ratio = (x.logp - x.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    weight = x.clipped(ratio)
    was_clipped = (weight != ratio) & (x.advantages != 0)
    return -weight.detach() * x.advantages * x.logp, _measured(log_ratio, ratio, was_clipped)


def _dppo_tv(x: LossInputs) -> PerToken:
    log_ratio = (x.logp - x.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, moved = log_ratio.exp(), x.logp.detach().exp() - x.old_logp.exp()
    outside = torch.where(x.advantages > 0, moved > x.clip_high, moved < -x.clip_low)
    was_clipped = outside & (x.advantages != 0)
    return -x.advantages * ratio.masked_fill(outside, 0.0), _measured(log_ratio, ratio, was_clipped)


def _pessimistic(x: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the larger of the plain and the clipped loss of each token, and whether the clipped loss is larger."""
    plain, clipped = -x.advantages * ratio, -x.advantages * x.clipped(ratio)
    return torch.maximum(plain, clipped), clipped > plain


def _measured(
    log_ratio: Tensor, ratio: Tensor, clipped: Tensor, dual_clipped: Tensor | None = None
) -> dict[str, Tensor]:
    dual_clipped = torch.zeros_like(clipped) if dual_clipped is None else dual_clipped
    return {
        "clip_frac": clipped.to(ratio.dtype),
        "dual_clip_frac": dual_clipped.to(ratio.dtype),
        "ppo_kl": -log_ratio,
        "ratio_mean": ratio,
        "ratio_gap": (ratio - 1).abs(),
    }


PER_TOKEN: dict[str, Callable[[LossInputs], PerToken]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
}


def aggregate_loss(
    per_token: Tensor,
    mask: Tensor,
    *,
    aggregate: str = "token-mean",
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    max_new_tokens: int | None = None,
) -> Tensor:
    """Compute the share that a micro-batch adds to the update's mean of a per-token quantity.  (B, T) -> ()

    token-mean: sum / num_tokens. seq-mean-token-sum: sum / num_sequences. seq-mean-token-mean: sum of the rows' means /
    num_sequences. dr-grpo: sum / (num_sequences x max_new_tokens).
    num_tokens and num_sequences count the whole update over all data ranks, including groups with equal rewards that
    the forward pass skips. If they are None, the counts are those of this micro-batch: its tokens in the mask, and its
    rows with such tokens.
    Raises ValueError for an unknown aggregate, and for dr-grpo without max_new_tokens.
    """
    _require("aggregate", aggregate, AGGREGATES)
    _same_shape(per_token=per_token, mask=mask)
    if aggregate == "dr-grpo" and (max_new_tokens is None or max_new_tokens < 1):
        raise ValueError(f"max_new_tokens: must be 1 or more for aggregate dr-grpo, not {max_new_tokens}")
    row_tokens = (mask != 0).sum(dim=1)  # (B,)
    row_sums = _inside(mask, _at_least_float32(per_token)).sum(dim=1)  # (B,)
    if aggregate == "token-mean":
        return row_sums.sum() / _at_least_one(row_tokens.sum() if num_tokens is None else num_tokens)
    if aggregate == "seq-mean-token-mean":
        row_sums = row_sums / row_tokens.clamp(min=1)
    share = row_sums.sum() / _at_least_one((row_tokens > 0).sum() if num_sequences is None else num_sequences)
    return share / max_new_tokens if aggregate == "dr-grpo" else share


# --------------------------------------------------------------------------------------------------- rollout correction
def rollout_weights(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    mode: str = "token",
    clip: float = 2.0,
    low: float = 0.5,
) -> Tensor:
    """Compute importance weights for tokens from a sampler with other numerics or an older policy.  (B, T) -> (B, T)

    old_logp are the trainer's log-probs before the first update on these rows, and rollout_logp those of the sampler.
    For a token, r is exp(old_logp - rollout_logp).
    token: min(r, clip).
    sequence: for each token of a row, the product of the row's r, at most clip.
    icepop (IcePop, arXiv 2510.18855, which uses 0.5 and 5): r if low <= r <= clip, otherwise 0.
    mis (masked importance sampling): for each token of a row, the product of the row's r if it is at most clip,
    otherwise 0.
    none, uncorrected: 1.
    Outside the mask the weight is 0. There is no gradient. A token with the weight 0 still counts in the denominator of
    the loss.
    """
    _require("mode", mode, WEIGHT_MODES)
    if not clip > 0:
        raise ValueError(f"clip: must be more than 0, not {clip}")
    if mode == "icepop" and not 0 <= low < clip:
        raise ValueError(f"low: must be at least 0 and less than clip ({clip}), not {low}")
    _same_shape(old_logp=old_logp, rollout_logp=rollout_logp, mask=mask)
    old_logp, rollout_logp = _at_least_float32(old_logp).detach(), _at_least_float32(rollout_logp).detach()
    if mode in ("none", "uncorrected"):
        return _inside(mask, torch.ones_like(old_logp))
    log_ratio = _inside(mask, old_logp) - _inside(mask, rollout_logp)
    if mode in ("sequence", "mis"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.exp()
    if mode in MASKING_MODES:
        kept = (ratio <= clip) & (ratio >= (low if mode == "icepop" else 0))
        return _inside(mask, torch.where(kept, ratio, torch.zeros_like(ratio)))
    return _inside(mask, ratio.clamp(max=clip))


# ---------------------------------------------------------------------------------------------------- masks and checks
def _inside(mask: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` inside the mask and 0 outside it. Outside, the gradient is 0 even if ``value`` is NaN."""
    return torch.where(mask != 0, value, torch.zeros_like(value))


def _at_least_float32(value: Tensor) -> Tensor:
    """Cast to float32 or wider. bf16 gives a log-probability only 8 significant bits, and rewards may be integers."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _at_least_one(count: int | Tensor) -> int | Tensor:
    """Return ``count``, or 1 if it is 0, so that an update without any token has the loss 0 and not 0 / 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def _require(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: must be one of {', '.join(choices)}, not {value!r}")


def _same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors have the same shape (B, T).

    Otherwise, broadcasting (B, 1) to (B, T) would silently give a wrong sum over tokens.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"the shapes {shapes} differ; give all tensors one shape (rows, tokens)")
