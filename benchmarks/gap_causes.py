"""The causes of the gap that bench_gap.py switches, and the planted error of each cause.

A switch changes one thing of the sampler or of the trainer. vLLM's kernels are fixed: only its prompts and its prefix
cache are switched, and all else in the trainer. A planted error is in the trainer and the same for both engines; only
that of the prefix cache is in vLLM.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gap_pair import Pair, Row
from torch import Tensor

import kernels
import lora_megatron
import model_megatron
from engines import torch_cache
from engines.torch_decoder import Decoder

WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
OTHER = {torch.bfloat16: torch.float32, torch.float32: torch.bfloat16}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
Trainer = Callable[[list[Row]], list[Tensor]]


class Cause(NamedTuple):
    """A switch: a context for sampler and trainer, how each computes, and the planted error that belongs to it."""

    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    trainer: Trainer | None = None  # Pair.trainer if not given
    sampler: Callable[[], list[Row]] | None = None  # if not given, the rows of the code as it is are used
    planted: str = ""  # a key of the function `planted`


# ------------------------------------------------------------------------------------------------ switching


@contextlib.contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextlib.contextmanager
def merging(pair: Pair, merges: bool) -> Iterator[None]:
    """Whether the trainer computes with merged weights, or adds s B A x to W x."""
    before = [adapter.merges for adapter in pair.adapters.values()]
    for adapter in pair.adapters.values():
        adapter.merges = merges
    yield
    for adapter, merged in zip(pair.adapters.values(), before, strict=True):
        adapter.merges = merged


def coarse(x: Tensor, bits: int = 4) -> Tensor:
    """``x`` rounded to so many significant bits; bf16 has 8."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((2**bits * mantissa).round() / 2**bits, exponent).to(x.dtype)


coarser = functools.partial(coarse, bits=2)  # for what changes the log-probs little


def then(function: Callable, change: Callable[[Tensor], Tensor]) -> Callable:
    """``function`` with its result, or the first of a tuple, changed."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        found = function(*args, **kwargs)
        return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

    return run


# ------------------------------------------------------------------------------------------------ the embedded sampler


def weighted_last(self: Decoder, layer: int, x: Tensor, routes: list[Tensor]) -> Tensor:
    """Decoder._mlp with experts that are weighted after their second product."""
    arch, weights = self.arch, self.layers[layer]
    h = kernels.rms_norm(x, weights["mlp_norm"], arch.rms_norm_eps)
    score, experts = F.linear(h.float(), weights["router"].float()).topk(arch.experts_per_token, dim=-1)
    routes.append(experts)
    in_order, pair = experts.view(-1).sort(stable=True)
    counts = torch.bincount(in_order, minlength=arch.num_experts)
    out = h.index_select(0, pair.div(arch.experts_per_token, rounding_mode="floor"))
    out = kernels.swiglu(kernels.grouped_mm(out, weights["expert_gate_up"], counts))
    out = kernels.grouped_mm(out, weights["expert_down"], counts)
    out = torch.empty_like(out).index_copy_(0, pair, out).view(*experts.shape, -1)
    return x + (out * score.softmax(-1).to(x.dtype).unsqueeze(-1)).sum(1)


def sampler_router_in_bf16(real: Callable) -> Callable:
    """Decoder._mlp with router logits in bf16, as vLLM computes them for a bf16 model."""

    def mlp(self: Decoder, layer: int, x: Tensor, routes: list[Tensor]) -> Tensor:
        linear = F.linear
        narrow = lambda a, b, *more: linear(a.bfloat16(), b.bfloat16(), *more).float()  # noqa: E731
        with patched(F, "linear", narrow):
            return real(self, layer, x, routes)

    return mlp


def sampler_head(self: Decoder, hidden: Tensor) -> Tensor:
    """Decoder.logits in the other dtype."""
    dtype = OTHER[self.dtype]
    hidden = kernels.rms_norm(hidden, self.final_norm, self.arch.rms_norm_eps)
    return F.linear(hidden.to(dtype), self.head.to(dtype)).float()


def embedded(pair: Pair) -> dict[str, Cause]:
    """The causes of the embedded sampler, which computes as the trainer does."""
    decoder = pair.sampler.decoder
    other = {torch_cache.LineCache: torch_cache.RowCache, torch_cache.RowCache: torch_cache.LineCache}
    router = sampler_router_in_bf16(Decoder._mlp)
    switches = {
        "experts weighted last": (patched(Decoder, "_mlp", weighted_last), "experts"),
        "the other cache's attention": (patched(decoder, "cache", other[decoder.cache]), "attention"),
        "router in bf16": (patched(Decoder, "_mlp", router), "router"),
        f"head in {NAMES[OTHER[pair.dtype]]}": (patched(Decoder, "logits", sampler_head), "head"),
    }
    return {name: Cause(context, sampler=pair.sample, planted=error) for name, (context, error) in switches.items()}


# ------------------------------------------------------------------------------------------------ vLLM


def experts_weighted_last(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
    """GroupedExperts.forward with rows that are weighted after their second product."""
    out = self.linear_fc2(kernels.swiglu(self.linear_fc1(x, tokens_per_expert)), tokens_per_expert)
    return (out.float() * probs[:, None]).to(x.dtype), None


def attention_in(wider: torch.dtype) -> Callable:
    """CausalAttention.forward computed in ``wider``."""
    real = model_megatron.CausalAttention.forward

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask, **unused) -> Tensor:
        return real(self, *(x.to(wider) for x in (query, key, value)), attention_mask, **unused).to(query.dtype)

    return forward


def router_in_bf16(self, x: Tensor) -> Tensor:
    """Megatron's Router.gating in bf16."""
    return F.linear(x.bfloat16(), self.weight.bfloat16()).float()


class HeadIn:
    """model_megatron._VocabularyLogProbs with logits in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.real = dtype, model_megatron._VocabularyLogProbs

    def apply(self, hidden: Tensor, weight: Tensor, *more) -> tuple[Tensor, Tensor, Tensor]:
        return self.real.apply(hidden.to(self.dtype), weight.to(self.dtype), *more)


@contextlib.contextmanager
def no_prefix_cache() -> Iterator[None]:
    """vLLM computes every prompt; with its prefix cache, the samples of a prompt share keys and values."""
    import vllm

    with patched(vllm, "SamplingParams", functools.partial(vllm.SamplingParams, skip_reading_prefix_cache=True)):
        yield


def vllm(pair: Pair) -> dict[str, Cause]:
    """The causes of vLLM. Its prompts and its prefix cache can be switched; the rest is switched in the trainer."""
    from megatron.core.transformer.moe.router import Router

    wide, other = WIDER[pair.dtype], OTHER[pair.dtype]
    attention = patched(model_megatron.CausalAttention, "forward", attention_in(wide))
    cached = functools.partial(pair.sample, long=True)
    return {
        "trainer's experts weighted last": Cause(
            patched(model_megatron.GroupedExperts, "forward", experts_weighted_last), planted="experts"
        ),
        "trainer's attention in higher precision": Cause(attention, planted="attention"),
        "trainer's router in bf16": Cause(patched(Router, "gating", router_in_bf16), planted="router"),
        f"trainer's head in {NAMES[other]}": Cause(
            patched(model_megatron, "_VocabularyLogProbs", HeadIn(other)), planted="head"
        ),
        "long prompts, prefix cache used": Cause(sampler=cached, planted="prefix cache"),
        "long prompts, prefix cache not used": Cause(no_prefix_cache(), sampler=cached, planted="prefix cache"),
    }


def causes(pair: Pair) -> dict[str, Cause]:
    """Name -> what is switched."""
    merges = next(iter(pair.adapters.values())).merges
    own = {"embedded": embedded, "vllm": vllm}[pair.engine]
    return {
        f"trainer {'with factors apart' if merges else 'merges'}": Cause(merging(pair, not merges), planted="merge"),
        **own(pair),
        "trainer row by row": Cause(trainer=lambda rows: [pair.trainer([row])[0] for row in rows], planted="batch"),
        "sampler prompt by prompt": Cause(sampler=functools.partial(pair.sample, together=False), planted="batch"),
        "routes replayed": Cause(trainer=lambda rows: pair.trainer(rows, replay=True), planted="routes"),
    }


# ------------------------------------------------------------------------------------------------ planted errors


@contextlib.contextmanager
def coarsely_merged(pair: Pair) -> Iterator[None]:
    with merging(pair, True), patched(lora_megatron.Adapter, "merged", then(lora_megatron.Adapter.merged, coarse)):
        yield


def after_a_neighbour(pair: Pair, rows: list[Row]) -> list[Tensor]:
    """Log-probs of rows whose tokens also see another row, as if a packed line had no borders between its rows."""
    before = [prompt + one.tokens for prompt, one in rows]
    return pair.trainer([(before[i - 1] + prompt, one) for i, (prompt, one) in enumerate(rows)])


def one_token_late(pair: Pair, rows: list[Row]) -> list[Tensor]:
    """Log-probs with the routes of the token before."""
    late = [replace(one, routed_experts=np.roll(one.routed_experts, 1, axis=0)) for _, one in rows]
    return pair.trainer([(prompt, one) for (prompt, _), one in zip(rows, late, strict=True)], replay=True)


def planted(pair: Pair) -> dict[str, Cause]:
    """Name -> an error of the kind that a cause stands for, large enough to be seen in bf16."""
    from megatron.core.transformer.moe.router import Router

    model = model_megatron
    found = {
        "merge": Cause(coarsely_merged(pair)),
        "router": Cause(patched(Router, "gating", then(Router.gating, coarser))),
        "head": Cause(patched(model, "hidden_states", then(model.hidden_states, coarse))),
        "batch": Cause(trainer=functools.partial(after_a_neighbour, pair)),
        "routes": Cause(trainer=functools.partial(one_token_late, pair)),
    }
    for name, module, rounds in (
        ("experts", model.GroupedExperts, coarser), ("attention", model.CausalAttention, coarse),
    ):  # fmt: skip
        found[name] = Cause(patched(module, "forward", then(module.forward, rounds)))
    if pair.engine == "vllm":
        found["prefix cache"] = Cause(sampler=pair.sample_with_stale_prompts)
    return found
