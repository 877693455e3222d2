"""The only reference of an update: the losses of the papers that grpo.py names, and torch.optim.AdamW, in float64.

It has one rank, rows padded on the right, and no micro-batches. P is the number of prompts, G the number of completions
per prompt, S = P x G the number of sequences, and T the number of tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lora_reference
import numpy as np
import reference
import torch
from lora_reference import Named
from torch import Tensor

if TYPE_CHECKING:
    from knobs import Config, LossConfig
    from model.batches import Rollout

EPS = 1e-8  # of AdamW (arXiv 1412.6980)


class Rows(NamedTuple):
    """The sequences of a rollout. Column t of the floats is about token t + 1."""

    tokens: Tensor  # (S, T)
    own: Tensor  # (S, T - 1) bool: the token was sampled
    sampled_logp: Tensor  # (S, T - 1) of the sampler; 0 elsewhere


class Updated(NamedTuple):
    """What a step must leave: factors and AdamW's moments by the names of a checkpoint, and metrics."""

    factors: Named
    exp_avg: Named
    exp_avg_sq: Named
    metrics: dict[str, float]


def rows_of(batch: Rollout) -> Rows:
    group = batch.rewards.shape[1]
    prompts = [batch.prompts[s // group] for s in range(len(batch.lengths))]
    width = max(len(prompt) + length for prompt, length in zip(prompts, batch.lengths, strict=True))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    own, sampled = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(tokens.shape, dtype=torch.float64)
    for s, (prompt, length) in enumerate(zip(prompts, batch.lengths, strict=True)):
        first, end = len(prompt), len(prompt) + length
        tokens[s, :first] = torch.tensor(prompt)
        tokens[s, first:end] = batch.tokens[s, :length]
        sampled[s, first:end] = batch.logp[s, :length].double()
        own[s, first:end] = batch.mask[s, :length]
    return Rows(tokens, own[:, 1:], sampled[:, 1:])


def advantages_of(rewards: Tensor, norm: str) -> Tensor:
    """The advantages of GRPO (std), Dr.GRPO (none), leave-one-out and none at all (zero).  (P, G) -> (P, G)"""
    if norm == "zero":
        return 0 * rewards
    centred = rewards - rewards.mean(1, keepdim=True)
    if norm == "std":
        return centred / (rewards.std(1, keepdim=True) + 1e-6)
    size = rewards.shape[1]
    return centred * size / (size - 1) if norm == "loo" else centred


def importance_weights(loss: LossConfig, old: Tensor, rows: Rows) -> Tensor:
    """Weights that correct the difference of sampler and trainer: truncated, 0 where it is large (icepop), or all 1."""
    if loss.importance == "none":
        return torch.ones_like(old)
    off = (old - rows.sampled_logp) * rows.own
    if loss.importance == "sequence":
        off = off.sum(1, keepdim=True).expand_as(off)
    weight = off.exp()
    if loss.importance == "icepop":
        return weight * (loss.importance_low <= weight) * (weight <= loss.importance_clip)
    return weight.clamp(max=loss.importance_clip)


def policy_loss(loss: LossConfig, logp: Tensor, old: Tensor, advantages: Tensor, own: Tensor) -> Tensor:
    """The loss of each token by PPO with a dual clip, GSPO (2507.18071), CISPO (2506.13585) or DPPO (2602.04879)."""
    a, ratio = advantages if advantages.dim() == 2 else advantages[:, None], (logp - old).exp()
    if loss.kind == "gspo":
        mean = ((logp - old).detach() * own).sum(1, keepdim=True) / own.sum(1, keepdim=True).clamp(min=1)
        ratio = mean.exp() * (logp - logp.detach()).exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    if loss.kind == "dppo_tv":  # masked where the probability has moved far enough
        moved = logp.exp() - old.exp()
        masked = torch.where(a > 0, moved > loss.clip_high, moved < -loss.clip_low)
        return -a * ratio * ~masked
    if loss.kind == "cispo":
        return -clipped.detach() * a * logp
    largest = torch.maximum(-a * ratio, -a * clipped)
    if loss.kind == "gspo" or not loss.dual_clip:
        return largest
    return torch.where(a < 0, torch.minimum(largest, -a * loss.dual_clip), largest)


def kl_to(reference: Tensor, logp: Tensor) -> Tensor:
    """k3 (http://joschu.net/blog/kl-approx.html); low_var_kl is cut at 10, which is far away here."""
    d = reference - logp
    return d.exp() - d - 1


def shares(aggregate: str, own: Tensor, max_new_tokens: int) -> Tensor:
    """What the loss of each token is multiplied by, so that the sum is the loss of the update.  (S, T - 1)"""
    lengths, sequences = own.sum(1, keepdim=True).clamp(min=1), own.any(1).sum()
    count = {
        "token-mean": own.sum(),
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences * lengths,
        "dr-grpo": sequences * max_new_tokens,
    }[aggregate]
    return own.double() / count


def compute(path: Path, factors: Named, batch: Rollout, cfg: Config) -> Updated:
    """The state after two steps on the same rollout from ``factors``, and the metrics of the second one."""
    optim, loss, group = cfg.optim, cfg.loss, cfg.rollout.group_size
    model, rows = lora_reference.load(path), rows_of(batch)
    leaves = {name: value.double().requires_grad_() for name, value in factors.items()}
    parameters = list(leaves.values())
    adamw = torch.optim.AdamW(parameters, optim.lr, optim.betas, EPS, optim.weight_decay)

    free = torch.full((*rows.tokens.shape, MOE_LAYERS, model.config.num_experts_per_tok), -1)
    given = free.clone()
    if cfg.replay.mode == "r3":
        for of_row, routes in zip(given, routes_of(batch), strict=True):
            of_row[: len(routes)] = torch.from_numpy(routes)

    def forward(weights: Named, routes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies, and the experts of every token."""
        with lora_reference.routed(model, routes) as used:
            logp, entropy = lora_reference.token_logprobs(model, weights, rows.tokens, cfg.rollout.temperature)
        return logp, entropy, torch.stack(used, dim=1).unflatten(0, rows.tokens.shape)

    advantages = advantages_of(batch.rewards.double(), loss.advantage).flatten()
    mixed = batch.rewards.amax(1) > batch.rewards.amin(1)
    kept = ~(batch.truncated & loss.mask_truncated)
    trained = kept & (mixed.repeat_interleave(group) | (not loss.skip_equal_groups))
    sequences, size = torch.arange(len(kept)), optim.prompts_per_update * group

    def take_step() -> dict[str, float]:
        losses, norms = [], []
        with torch.no_grad():
            old, _, used = forward(lora_reference.merge(model, leaves), given)
            routes = free if cfg.replay.mode == "off" else used  # r2: those of the old policy
            base, _, _ = forward(dict(model.named_parameters()), routes)
            taught, _, _ = forward(lora_reference.merge(model, teacher_of(factors)), free)
        reverse_kl = (old - taught) * rows.own
        better = advantages[:, None] - loss.teacher_coef * reverse_kl * bool(loss.teacher)
        for first in range(0, len(kept), size):
            chosen = (sequences >= first) & (sequences < first + size)
            counted = rows.own & (chosen & kept)[:, None]
            share = shares(loss.aggregate, counted, cfg.rollout.max_new_tokens)
            logp, entropy, _ = forward(lora_reference.merge(model, leaves), routes)
            total = policy_loss(loss, logp, old, better, rows.own) * importance_weights(loss, old, rows)
            total = total - loss.entropy_coef * entropy
            if loss.kl != "none":
                total = total + loss.kl_coef * kl_to(base, logp)
            losses.append((total * share * trained[:, None]).sum())  # skipped groups count, as 0
            adamw.zero_grad()
            losses[-1].backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, optim.max_grad_norm))
            adamw.step()
        return {
            "actor/loss": torch.stack(losses).mean().item(),
            "actor/grad_norm": torch.stack(norms).mean().item(),
            **({"actor/teacher_kl": (reverse_kl.sum() / rows.own.sum()).item()} if loss.teacher else {}),
        }

    take_step()
    metrics = take_step()
    moments = [{name: adamw.state[leaf][key] for name, leaf in leaves.items()} for key in ("exp_avg", "exp_avg_sq")]
    found = ({name: value.detach().float() for name, value in part.items()} for part in (leaves, *moments))
    return Updated(*found, metrics)


# ------------------------------------------------------------------------------------------------ the tests' rollout

CASES: dict[str, dict] = {  # section -> what differs from config(); together every term of the losses above
    "ppo, token-mean, KL, entropy": {
        "loss": {"importance": "token", "kl_coef": 0.1, "entropy_coef": 0.01},
        "optim": {"weight_decay": 1.0, "max_grad_norm": 0.01},
    },
    "gspo, seq-mean-token-mean, equal groups skipped": {
        "loss": {
            "kind": "gspo",
            "advantage": "loo",
            "aggregate": "seq-mean-token-mean",
            "importance": "sequence",
            "clip_low": 0.005,
            "clip_high": 0.005,
            "kl": "k3",
            "kl_coef": 0.1,
            "skip_equal_groups": True,
        },
    },
    "cispo, dr-grpo, truncated answers masked": {
        "loss": {
            "kind": "cispo",
            "advantage": "none",
            "aggregate": "dr-grpo",
            "importance": "icepop",
            "kl": "none",
            "mask_truncated": True,
        },
    },
    "a teacher alone": {"loss": {"teacher": "given", "teacher_coef": 2.0, "advantage": "zero", "kl": "none"}},
    "rewards, a teacher, KL, gspo": {
        "loss": {"teacher": "given", "kind": "gspo", "importance": "token", "kl_coef": 0.1, "aggregate": "dr-grpo"},
    },
    "a teacher, the sampler's routes": {"loss": {"teacher": "given"}, "replay": {"mode": "r3"}},
    "a teacher, the old policy's routes": {"loss": {"teacher": "given"}, "replay": {"mode": "r2"}},
    "the sampler's routes": {"replay": {"mode": "r3"}},
    "the old policy's routes": {"replay": {"mode": "r2"}},
}
MOE_LAYERS = 2  # of the first of lora_reference.KINDS
GROUP, NEW_TOKENS = 4, 6
PROMPTS = [[5, 9, 60], [7, 7, 3, 88, 21], [99, 4], [31, 32, 33, 34]]
REWARDS = [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [0.5, 0, 0, 1]]


def config(path: Path, case: str) -> Config:
    """Two updates of two prompts each, in micro-batches of about two rows."""
    from knobs import Config

    sections = {
        "name": "update",
        "device": "cpu",
        "model": {"path": str(path), "dtype": "fp32"},
        "rollout": {
            "prompts_per_step": len(PROMPTS),
            "group_size": GROUP,
            "max_new_tokens": NEW_TOKENS,
            "temperature": 0.9,
        },
        "lora": {
            "targets": lora_reference.TARGETS,
            "rank": lora_reference.RANK,
            "alpha": lora_reference.ALPHA,
            "expert_rank": lora_reference.EXPERT_RANK,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 0, "prompts_per_update": 2, "tokens_per_micro_batch": 24},
        "loss": {},
        "replay": {},
        "data": {"source": "arithmetic"},
        "train": {"steps": 1, "out_dir": str(path)},
    }
    for section, changes in CASES[case].items():
        sections[section] |= changes
    return Config.model_validate(sections)


def teacher_of(factors: Named) -> Named:
    """The factors of another adapter."""
    return {name: 0.5 * value.flip(-1) for name, value in factors.items()}


def rollout_of(path: Path, factors: Named) -> Rollout:
    """Random completions. The sampler's log-probs are those of the policy, but for a tenth of a nat."""
    from model.batches import Rollout

    generator, sequences = torch.Generator().manual_seed(2), len(PROMPTS) * GROUP
    lengths = torch.randint(1, NEW_TOKENS + 1, (sequences,), generator=generator).tolist()
    own = torch.arange(NEW_TOKENS) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, 128, own.shape, generator=generator) * own
    ends = torch.arange(NEW_TOKENS) == torch.tensor(lengths)[:, None] - 1
    given = own & ~ends & (torch.rand(own.shape, generator=generator) < 0.4)  # by an environment, between own tokens
    given[:, 0] = False
    own &= ~given
    batch = Rollout(
        prompts=PROMPTS,
        tokens=tokens,
        logp=torch.zeros(tokens.shape),
        lengths=lengths,
        truncated=torch.tensor(lengths) == NEW_TOKENS,
        rewards=torch.tensor(REWARDS),
        parsable=torch.ones(len(PROMPTS), GROUP),
        correct=torch.zeros(len(PROMPTS), GROUP),
        mask=own,
    )
    rows, model = rows_of(batch), lora_reference.load(path)
    with torch.no_grad():
        logp, _ = lora_reference.token_logprobs(model, lora_reference.merge(model, factors), rows.tokens, 0.9)
    gap = 0.1 * torch.randn(tokens.shape, generator=generator)
    batch.logp[own] = logp[rows.own].float() + gap[own]
    return batch


def routes_of(batch: Rollout) -> list[np.ndarray]:
    """Random experts for the tokens of each row but the last, as a sampler reports them.  S x (row length - 1, L, K)

    The rows of a prompt have the same ones for it.
    """
    generator = torch.Generator().manual_seed(6)

    def experts(tokens: int) -> Tensor:
        order = torch.rand(tokens, MOE_LAYERS, reference.SIZES["num_experts"], generator=generator).argsort(-1)
        return order[..., : reference.SIZES["num_experts_per_tok"]].to(torch.uint8)

    of_prompts = [experts(len(prompt)) for prompt in batch.prompts]
    own = [experts(length - 1) for length in batch.lengths]
    return [torch.cat([of_prompts[s // GROUP], routes]).numpy() for s, routes in enumerate(own)]
