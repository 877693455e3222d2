"""A second implementation for checks/self_test.py: model, loss and AdamW in float64, on one rank and right-padded rows.

It follows the formulas of the model and of the papers that grpo.py names. It shares no code with the trainer: neither
kernels nor shards, packing or masks. A fault stays hidden only if both implementations have it. For a loss that is not
in KNOWN the trainer's own formula stands in, so that everything around it is still compared.
S sequences, T tokens of a row, V vocabulary, E experts, K experts a token, R LoRA rank, L layers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import grpo
from inputs import functions

if TYPE_CHECKING:
    from engines.interface import Completion
    from knobs import Config, LoraConfig
    from rollout import Rollout

Named = dict[str, Tensor]
EPS = 1e-8  # of AdamW
KNOWN = {  # what has a formula of its own, here or in self_test_schedules.py
    "loss.kind": ("ppo", "gspo", "cispo"),
    "loss.aggregate": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr-grpo"),
    "loss.importance": ("none", "token", "sequence", "icepop", "mis"),
    "loss.kl": ("none", "k1", "k2", "k3", "abs", "low_var_kl", "low_var_kl+"),
    "loss.advantage": ("std", "none", "loo"),
    "optim.decay": ("constant", "linear", "cosine"),
    "aqn.schedule": ("off", "constant", "qerl", "paper"),
}


def unknown(cfg: Config) -> dict[str, str]:
    """The keys of KNOWN whose value in ``cfg`` has no formula written apart, with this value."""
    values = {key: functools.reduce(getattr, key.split("."), cfg) for key in KNOWN}
    return {key: str(value) for key, value in values.items() if value not in KNOWN[key]}


def forward(w: Named, c: dict, tokens: Tensor, temperature: float, routes: Tensor | None = None) -> tuple:
    """Log-prob and entropy of each token, given the tokens before it; the routes; the log-probs of each next token.

    (S, T) -> (S, T), (S, T), (S, T, L, K), (S, T, V).  The first token has log-prob 0. ``w``: weights; ``c``: its
    config.json; ``routes``: experts to use, -1 where the model chooses itself.
    """
    heads, size, length, chosen = c["num_attention_heads"], c["head_dim"], tokens.shape[1], []
    angle = torch.arange(length)[:, None] * c["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin, future = angle.cos()[:, None], angle.sin()[:, None], torch.ones(length, length).triu(1).bool()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def norm_heads(x: Tensor, name: str) -> Tensor:
        """The norm of each head, or of all of them together if its weight is so long.  (S, T, heads, d)"""
        return norm(x.flatten(2).unflatten(-1, (-1, len(w[f"{name}.weight"]))), name).view_as(x)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].t() + w.get(f"{name}.bias", 0)

    def swiglu(x: Tensor, name: str) -> Tensor:
        gate = linear(x, f"{name}.gate_proj")
        return linear(gate * gate.sigmoid() * linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(h, f"{attention}.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv")
        if f"{attention}.q_norm.weight" in w:
            q, k = norm_heads(q, f"{attention}.q_norm"), norm_heads(k, f"{attention}.k_norm")
        k, v = (y.repeat_interleave(heads // y.shape[2], 2) for y in (rotate(k), v))
        scores = torch.einsum("sqhd,skhd->shqk", rotate(q), k) / size**0.5
        mixed = torch.einsum("shqk,skhd->sqhd", scores.masked_fill(future, -math.inf).softmax(-1), v)
        x = x + linear(mixed.flatten(2), f"{attention}.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        router = linear(h, f"{layer}.mlp.gate")
        top = router.topk(c["num_experts_per_tok"]).indices
        top = top if routes is None else torch.where(routes[:, :, i] < 0, top, routes[:, :, i])
        chosen.append(top)
        share = router.softmax(-1).gather(-1, top)
        share = share / share.sum(-1, keepdim=True) if c["norm_topk_prob"] else share
        share = torch.zeros_like(router).scatter(-1, top, share)
        y = sum(share[..., e, None] * swiglu(h, f"{layer}.mlp.experts.{e}") for e in range(c["num_experts"]))
        if f"{layer}.mlp.shared_expert_gate.weight" in w:
            y = y + linear(h, f"{layer}.mlp.shared_expert_gate").sigmoid() * swiglu(h, f"{layer}.mlp.shared_expert")
        x = x + y
    logp = (linear(norm(x, "model.norm"), "lm_head") / temperature).log_softmax(-1)
    picked, entropy = logp[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)[:, :-1]
    picked, entropy = (torch.nn.functional.pad(x, (1, 0)) for x in (picked, entropy))  # 0 for the first token
    return picked, entropy, torch.stack(chosen, 2), logp


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def merged(base: Named, factors: Named, lora: LoraConfig) -> Named:
    """The base weights plus alpha / R x B A, for factors by their names in a checkpoint."""
    weights = dict(base)
    for module in (name.removesuffix(".A") for name in factors if name.endswith(".A")):
        a, b, (parent, last) = factors[f"{module}.A"], factors[f"{module}.B"], module.rsplit(".", 1)
        experts = a.dim() == 3
        pairs = [(f"{parent}.{e}", a[e].t(), b[e].t()) for e in range(len(a))] if experts else [(parent, a, b)]
        for place, down, up in pairs:
            delta = lora.alpha / (lora.expert_rank if experts else lora.rank) * up @ down
            names = [f"{place}.{part}.weight" for part in FUSED.get(last, (last,))]
            for name, change in zip(names, delta.split([len(base[name]) for name in names]), strict=True):
                weights[name] = base[name] + change
    return weights


@dataclass
class Rows:
    """The sequences of a step, padded on the right."""

    tokens: Tensor  # (S, T)
    own: Tensor  # (S, T) true on the tokens that were sampled
    sampled_logp: Tensor  # (S, T) of the sampler; 0 on other tokens
    routes: Tensor | None  # (S, T, L, K) of the sampler, under replay r3; -1 where it has none


def rows_of(batch: Rollout, completions: list[Completion]) -> Rows:
    """The rows of all S ``completions``, which are in the order of the sequences."""
    group = len(completions) // len(batch.prompts)
    prompts = [batch.prompts[s // group] for s in range(len(completions))]
    width = max(len(prompt) + len(one.tokens) for prompt, one in zip(prompts, completions, strict=True))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    own, logp, routes = tokens.bool(), tokens.double(), None
    for s, (prompt, one) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(one.tokens)
        tokens[s, :end] = torch.tensor(prompt + one.tokens)
        own[s, len(prompt) : end], logp[s, len(prompt) : end] = True, torch.tensor(one.logp).double()
        if one.routed_experts is not None:
            record = torch.from_numpy(one.routed_experts).long()
            routes = torch.full((*tokens.shape, *record.shape[1:]), -1) if routes is None else routes
            routes[s, : len(record)] = record
    return Rows(tokens, own, logp, routes)


def advantages_of(rewards: list[float], norm: str) -> list[float]:
    """The advantages of one group, in plain Python."""
    n, mean = len(rewards), sum(rewards) / len(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / (n - 1)) ** 0.5
    scale = {"std": 1 / (std + 1e-6), "none": 1.0, "loo": n / (n - 1)}[norm]
    return [(reward - mean) * scale for reward in rewards]


def loss_of(
    cfg: Config,
    logp: Tensor,
    entropy: Tensor,
    old: Tensor,
    reference: Tensor,
    rows: Rows,
    chosen: Tensor,
    skipped: Tensor,
    advantages: Tensor,
) -> Named:
    """The losses of one update by the trainer's names, and for other metrics the sums over the trained tokens.

    logp, entropy, old, reference: (S, T); chosen, skipped, advantages: (S,). ``chosen`` are the sequences of the
    update. ``skipped`` ones count in the means but add nothing to the loss.
    """
    loss, own = cfg.loss, rows.own & chosen[:, None]
    if {"loss.kind", "loss.aggregate", "loss.importance", "loss.kl"} & unknown(cfg).keys():
        trained = own & ~skipped[:, None]
        return {"actor/loss": trainers_loss(cfg, logp, entropy, old, reference, rows, trained, own, advantages)}
    lengths, sequences = own.sum(1, keepdim=True).clamp(min=1), chosen.sum().clamp(min=1)
    share = {
        "token-mean": 1 / own.sum().clamp(min=1).double().expand(len(own), 1),
        "seq-mean-token-sum": 1 / sequences.double().expand(len(own), 1),
        "seq-mean-token-mean": 1 / (sequences * lengths),
        "dr-grpo": 1 / (sequences.double() * cfg.rollout.max_new_tokens).expand(len(own), 1),
    }[loss.aggregate] * (own & ~skipped[:, None])
    a, ratio = advantages[:, None], (logp - old).exp()
    if loss.kind == "gspo":
        mean = ((logp - old).detach() * own).sum(1, keepdim=True) / lengths
        ratio = mean.exp() * (logp - logp.detach()).exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    if loss.kind == "cispo":
        policy = -clipped.detach() * a * logp
    else:
        policy = torch.maximum(-a * ratio, -a * clipped)
        if loss.kind == "ppo" and loss.dual_clip:
            policy = torch.where(a < 0, torch.minimum(policy, -a * loss.dual_clip), policy)
    if loss.corrects:
        off = (old - rows.sampled_logp) * rows.own
        weight = (off.sum(1, keepdim=True) if loss.importance in ("sequence", "mis") else off).exp()
        masked = {
            "icepop": (weight < loss.importance_low) | (weight > loss.importance_clip),
            "mis": weight > loss.importance_clip,
        }.get(loss.importance)
        policy = policy * (weight.clamp(max=loss.importance_clip) if masked is None else weight * ~masked)
    sums = {
        "actor/entropy": entropy,
        "actor/ppo_kl": old - logp,
        "rollout/logp_gap_mean": (old - rows.sampled_logp).abs(),
    }
    total = policy - loss.entropy_coef * entropy
    if loss.kl != "none":
        d = reference - logp
        k3, k2 = d.exp() - d - 1, d**2 / 2
        sums["actor/kl_loss"] = {
            "k1": -d, "k2": k2, "k3": k3, "abs": d.abs(), "low_var_kl": k3.clamp(max=10),
            "low_var_kl+": k2 + (k3.clamp(max=10) - k2).detach(),  # the gradient of k2
        }[loss.kl]  # fmt: skip
        total = total + loss.kl_coef * sums["actor/kl_loss"]
    losses = {"actor/loss": (total * share).sum(), "actor/policy_loss": (policy * share).sum()}
    return losses | {name: (value * (own & ~skipped[:, None])).sum() for name, value in sums.items()}


def trainers_loss(
    cfg: Config,
    logp: Tensor,
    entropy: Tensor,
    old: Tensor,
    reference: Tensor,
    rows: Rows,
    trained: Tensor,
    counted: Tensor,
    advantages: Tensor,
) -> Tensor:
    """The loss of loss_of, by grpo.py in float64, called as the trainer calls it.  trained, counted: (S, T)"""
    loss, r = cfg.loss, trained.any(1)
    means: dict = {
        "aggregate": loss.aggregate, "num_tokens": counted.sum(), "num_sequences": counted.any(1).sum(),
        "max_new_tokens": cfg.rollout.max_new_tokens,
    }  # fmt: skip
    weights = grpo.rollout_weights(
        old[r], rows.sampled_logp[r], trained[r], loss.importance, loss.importance_clip, loss.importance_low
    )
    total, _ = grpo.policy_loss(
        logp[r], old[r], advantages[r], trained[r], weights=weights, kind=functions.token_loss(loss.kind),
        clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip, **means,
    )  # fmt: skip
    penalty = -loss.entropy_coef * entropy[r]
    if loss.kl != "none":
        penalty = penalty + loss.kl_coef * grpo.kl(logp[r], reference[r], loss.kl, trained[r])
    return total + grpo.aggregate_loss(penalty, trained[r], **means)


@dataclass
class State:
    """Factors by their names in a checkpoint, AdamW's moments, the number of its steps; metrics of the last rollout."""

    factors: Named
    first: Named
    second: Named
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def updated(
    cfg: Config, c: dict, base: Named, state: State, batch: Rollout, rows: Rows, advantages: Tensor
) -> tuple[State, float]:
    """The state after the updates of one rollout, and the mean norm of their gradients before clipping.

    ``c``: config.json of the model; ``base``: its weights; ``advantages``: (S,)
    """
    optim, (beta1, beta2) = cfg.optim, cfg.optim.betas
    state = State(dict(state.factors), dict(state.first), dict(state.second), state.steps)
    run = functools.partial(forward, c=c, tokens=rows.tokens, temperature=cfg.rollout.temperature)
    with torch.no_grad():
        old, _, native, _ = run(merged(base, state.factors, cfg.lora), routes=rows.routes)
        routes = native if cfg.replay.mode == "r2" else rows.routes
        reference = run(base, routes=routes if cfg.replay.reference == "replayed" else None)[0]
    place, group = torch.arange(len(rows.tokens)), cfg.rollout.group_size
    equal = batch.rewards.amax(1) == batch.rewards.amin(1)
    skipped = equal.repeat_interleave(group) & cfg.loss.skip_equal_groups
    kept, norms, sums = ~(batch.truncated & cfg.loss.mask_truncated), [], []
    size = optim.prompts_per_update * group
    for first in range(0, len(place), size):
        chosen = (place >= first) & (place < first + size) & kept
        factors = {name: x.detach().requires_grad_() for name, x in state.factors.items()}
        logp, entropy, *_ = run(merged(base, factors, cfg.lora), routes=routes)
        sums.append(loss_of(cfg, logp, entropy, old, reference, rows, chosen, skipped, advantages))
        gradients = torch.autograd.grad(sums[-1]["actor/loss"], list(factors.values()))
        norms.append(math.sqrt(sum(g.square().sum().item() for g in gradients)))
        shrink, state.steps = min(1.0, optim.max_grad_norm / (norms[-1] + 1e-6)), state.steps + 1
        for (name, x), g in zip(factors.items(), gradients, strict=True):
            m = state.first[name] = beta1 * state.first[name] + (1 - beta1) * g * shrink
            v = state.second[name] = beta2 * state.second[name] + (1 - beta2) * (g * shrink) ** 2
            step = m / (1 - beta1**state.steps) / ((v / (1 - beta2**state.steps)).sqrt() + EPS)
            state.factors[name] = x.detach() * (1 - optim.lr * optim.weight_decay) - optim.lr * step
    tokens = (rows.own & (kept & ~skipped)[:, None]).sum().clamp(min=1).item()
    state.metrics = {
        name: sum(part[name].item() for part in sums)
        / (len(sums) if name in ("actor/loss", "actor/policy_loss") else tokens)
        for name in sums[-1]
    }
    return state, sum(norms) / len(norms)
