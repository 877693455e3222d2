"""Helpers of the LoRA tests on one rank: load a model, attach and fill adapters, compute the loss of the reference."""

from __future__ import annotations

from pathlib import Path

import lora_reference
import torch
from lora_reference import ALPHA, EXPERT_RANK, RANK, TARGETS, TEMPERATURE
from torch import Tensor

import adapter_weights
import hf_config
import lora_megatron
import model_megatron
import weights_hf
from knobs import LoraConfig
from parallel_setup import Parallel

SEED = 4  # seed of the initial factors


def lora_config(**changes) -> LoraConfig:
    settings = dict(targets=TARGETS, rank=RANK, alpha=ALPHA, expert_rank=EXPERT_RANK, dropout=0.0)
    return LoraConfig(**settings | changes)


def load(path: Path, parallel: Parallel, *, dtype: torch.dtype = torch.float32, recompute: bool = False, **settings):
    arch = hf_config.read(path)
    model = model_megatron.build(arch, parallel, dtype=dtype, recompute=recompute, **settings)
    weights_hf.load(model, arch, parallel, path)
    return model, arch


def fill(adapters: dict, whole: dict[str, Tensor], arch: hf_config.Architecture, parallel: Parallel) -> None:
    pieces = adapter_weights.scatter(adapters, whole, arch, parallel)
    with torch.no_grad():
        for name, factor in lora_megatron.factors(adapters).items():
            factor.copy_(pieces[name])


def move(adapters: dict, arch: hf_config.Architecture, parallel: Parallel, step: int) -> None:
    """Change the adapters as an update would, to the same policy in every layout."""
    whole = adapter_weights.gather(adapters, lora_megatron.factors(adapters), arch, parallel)
    generator = torch.Generator().manual_seed(step)
    whole = {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in whole.items()}
    fill(adapters, whole, arch, parallel)


def my_rows(tokens: Tensor, parallel: Parallel) -> tuple[Tensor, Tensor]:
    mine = tokens.chunk(parallel.data)[parallel.data_rank]
    mask = torch.ones_like(mine)
    mask[:, 0] = 0
    return mine, mask


def backward(model: torch.nn.Module, tokens: Tensor, parallel: Parallel) -> Tensor:
    """Backward pass of the loss of lora_reference.compute on this rank's rows; the log-probs.  -> (b / data, T)"""
    mine, mask = my_rows(tokens, parallel)
    weights, _ = my_rows(lora_reference.loss_weights(tokens), parallel)
    logp, entropy, _ = model_megatron.token_logprobs(model, mine, mask, parallel, TEMPERATURE)
    (weights * (logp + 0.3 * entropy)).sum().backward()
    return logp.detach()


def shard_error(
    gradients: dict[str, Tensor],
    true: dict[str, Tensor],
    adapters: dict[str, torch.nn.Module],
    arch: hf_config.Architecture,
    parallel: Parallel,
) -> float:
    """Largest error of this rank's gradients, relative to the largest element of the whole gradient.

    ``true``: the whole gradients; this rank compares with its shards of them.
    """
    pieces = adapter_weights.scatter(adapters, true, arch, parallel)
    assert gradients.keys() == pieces.keys()
    gaps = {name: (value - pieces[name]).abs().max() for name, value in gradients.items()}
    return max(float(gap / true[adapter_weights.hf_name(name)].abs().max()) for name, gap in gaps.items())
