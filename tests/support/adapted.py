"""Helpers of the LoRA tests on one rank: load a model, attach and fill adapters, compute the reference's loss."""

from pathlib import Path

import lora_reference
import torch
from lora_reference import ALPHA, EXPERT_RANK, RANK, TARGETS, TEMPERATURE, Reference
from torch import Tensor

import lora_megatron
from facts.architectures import Architecture
from inputs import hf_config
from knobs import Config, LoraConfig
from model import megatron_model
from parallel_setup import Parallel
from weights import adapter_weights, huggingface

SEED = 4  # seed of the initial factors


def lora_config(**changes) -> LoraConfig:
    settings = dict(targets=TARGETS, rank=RANK, alpha=ALPHA, expert_rank=EXPERT_RANK)
    return LoraConfig(**settings | changes)


def placed(cfg: Config, parallel: Parallel) -> Config:
    """``cfg`` with the sizes of the layout that is open."""
    sizes = {name: getattr(parallel, name) for name in ("tensor", "expert")}
    return cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update=sizes)})


def load(path: Path, parallel: Parallel, *, dtype: torch.dtype = torch.float32, recompute: bool = False, **settings):
    arch = hf_config.read(path)
    model = megatron_model.build(arch, parallel, dtype=dtype, recompute=recompute, **settings)
    huggingface.load(model, arch, parallel, path)
    return model, arch


def adapt(
    path: Path,
    parallel: Parallel,
    factors: dict[str, Tensor],
    *,
    merges: bool = False,
    **settings,
):
    """The loaded model with adapters that hold these whole ``factors``.  -> (model, architecture, adapters)"""
    model, arch = load(path, parallel, **settings)
    adapters = lora_megatron.attach(model, lora_config(), parallel, SEED, merges=merges)
    fill(adapters, factors, arch, parallel)
    return model, arch, adapters


def fill(adapters: dict, whole: dict[str, Tensor], arch: Architecture, parallel: Parallel) -> None:
    pieces = adapter_weights.scatter(adapters, whole, arch, parallel)
    adapter_weights.copy_(lora_megatron.factors(adapters), pieces)


@torch.no_grad()
def gather(adapters: dict, values: dict[str, Tensor], arch: Architecture, parallel: Parallel) -> dict[str, Tensor]:
    """Whole tensors by their names in a checkpoint, from the ``values`` of every rank by factor name. Collective."""
    whole = {}
    for name, factor in lora_megatron.factors(adapters).items():
        tensor = adapter_weights.whole(name, factor, values[name], arch, parallel)
        whole[adapter_weights.hf_name(name, arch)] = tensor.clone()
    return whole


def move(adapters: dict, arch: Architecture, parallel: Parallel, step: int) -> None:
    """Change the adapters as an update would, to the same policy in every layout."""
    whole = gather(adapters, lora_megatron.factors(adapters), arch, parallel)
    generator = torch.Generator().manual_seed(step)
    whole = {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in whole.items()}
    fill(adapters, whole, arch, parallel)


def my_rows(tokens: Tensor, parallel: Parallel) -> tuple[Tensor, Tensor]:
    mine = tokens.chunk(parallel.data)[parallel.data_rank].to(parallel.device)
    mask = torch.ones_like(mine)
    mask[:, 0] = 0
    return mine, mask


def backward(model: torch.nn.Module, tokens: Tensor, parallel: Parallel) -> Tensor:
    """Backward pass of the loss of lora_reference.compute on this rank's rows; the log-probs.  -> (b / data, T)"""
    mine, mask = my_rows(tokens, parallel)
    weights, _ = my_rows(lora_reference.loss_weights(tokens), parallel)
    logp, entropy, *_ = megatron_model.token_logprobs(model, mine, mask, parallel, TEMPERATURE)
    (weights * (logp + 0.3 * entropy)).sum().backward()
    return logp.detach()


def logp_error(logp: Tensor, expected: Reference, parallel: Parallel) -> float:
    """Largest error of this rank's log-probs."""
    return float((logp[:, 1:].cpu() - expected.logp.chunk(parallel.data)[parallel.data_rank]).abs().max())


def gradient_error(
    adapters: dict[str, torch.nn.Module],
    shares: dict[str, Tensor],
    arch: Architecture,
    parallel: Parallel,
    expected: Reference,
) -> float:
    """Largest error of this rank's gradients after the reductions, relative to the whole gradient's largest element.

    ``shares``: what the backward pass left on this rank, before the reductions.
    """
    factors = lora_megatron.factors(adapters)
    for name, factor in factors.items():
        factor.grad = shares[name].clone()
    parallel.sync_gradients_(list(factors.values()))
    for factor in factors.values():
        factor.is_expert = factor.dim() == 3  # the control "experts as dense" has cleared it; scatter needs it
    pieces = adapter_weights.scatter(adapters, expected.gradients, arch, parallel)
    assert factors.keys() == pieces.keys()
    gaps = {name: (factor.grad.cpu() - pieces[name]).abs().max() for name, factor in factors.items()}
    return max(
        float(gap / expected.gradients[adapter_weights.hf_name(name, arch)].abs().max()) for name, gap in gaps.items()
    )


def errors(
    path: Path, parallel: Parallel, expected: Reference, tokens: Tensor, **settings
) -> tuple[torch.nn.Module, float, float]:
    """The adapted model after a backward pass, and the errors of its log-probs and of its gradients."""
    model, arch, adapters = adapt(path, parallel, expected.factors, **settings)
    logp = backward(model, tokens, parallel)
    shares = {name: factor.grad for name, factor in lora_megatron.factors(adapters).items()}
    return model, logp_error(logp, expected, parallel), gradient_error(adapters, shares, arch, parallel, expected)
