"""LoRA (arXiv 2106.09685) on Megatron's column and row parallel linears, on grouped experts, and on the router.

y = base(x) + (alpha / R) B A x, A random, B zero, so that an adapted model starts as its base. The factors are fp32.
A column-parallel linear holds A whole and B by output rows; a row-parallel one A by input columns and B whole.
E local experts, R rank. Merging needs no communication: each rank's shard of the weight gets its own B A.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from config import derive_seed
from input_files import InputError
from knobs import LoraConfig
from model_megatron import GroupedLinear
from parallel_setup import Parallel


def _factor(
    weight: Tensor, shape: tuple[int, ...], is_expert: bool, shard_dim: int | None, partial_over: str | None
) -> torch.nn.Parameter:
    """A zero fp32 factor beside ``weight`` that says how it lies over the ranks.

    Parallel.sync_gradients_ and checkpoints read this. Made where it stays: Module.to may make another parameter of it.
    """
    factor = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=weight.device))
    factor.is_expert, factor.shard_dim, factor.partial_over = is_expert, shard_dim, partial_over
    return factor


class LoRALinear(torch.nn.Module):
    """A column or row parallel linear with its low-rank update.  A (R, in), B (out, R), sharded as the base is."""

    def __init__(
        self, base: torch.nn.Module, rank: int, alpha: float, dropout: float, is_column: bool, tensor: int
    ) -> None:
        super().__init__()
        self.base, self.scale, self.dropout, self.enabled = base, alpha / rank, dropout, True
        self.is_column = is_column
        # With sequence parallelism each tensor rank sees its own tokens, so the factor they all hold whole gets a
        # partial gradient on each.
        self.sequence_parallel = tensor > 1
        partial = "tensor" if self.sequence_parallel else None
        out_size, in_size = base.weight.shape
        place = (None, partial) if is_column else (1, None)
        self.A = _factor(base.weight, (rank, in_size), False, *place)
        place = (0, None) if is_column else (None, partial)
        self.B = _factor(base.weight, (out_size, rank), False, *place)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from megatron.core.tensor_parallel import mappings

        y, bias = self.base(x)
        if not self.enabled:
            return y, bias
        low = F.linear(F.dropout(x, self.dropout, self.training), self.A.to(x.dtype))  # (.., R)
        if self.sequence_parallel and self.is_column:
            # R columns travel, not the hidden size; the backward pass sums their gradient over the tensor ranks.
            low = mappings.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        elif self.sequence_parallel:
            low = mappings.reduce_scatter_to_sequence_parallel_region(low)
        return y + F.linear(self.scale * low, self.B.to(x.dtype)), bias  # scaled where it is R wide

    def delta(self) -> Tensor:
        """This rank's shard of the update, fp32.  -> (out, in)"""
        return self.scale * (self.B @ self.A)


class LoRAGroupedLinear(torch.nn.Module):
    """Grouped expert weights with one low-rank update per expert.  A (E, in, R), B (E, R, out)

    The update stays two thin grouped products, so neither pass ever forms an (E, in, out) tensor.
    """

    def __init__(
        self, base: GroupedLinear, rank: int, alpha: float, dropout: float, is_column: bool, expert_tensor: int
    ) -> None:
        super().__init__()
        self.base, self.scale, self.dropout, self.enabled = base, alpha / rank, dropout, True
        self.is_column = is_column
        experts, in_size, out_size = base.weight.shape
        partial = "expert_tensor" if expert_tensor > 1 else None
        place = (None, partial) if is_column else (1, None)
        self.A = _factor(base.weight, (experts, in_size, rank), True, *place)
        place = (2, None) if is_column else (None, partial)
        self.B = _factor(base.weight, (experts, rank, out_size), True, *place)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        y = self.base(x, tokens_per_expert)
        if not self.enabled:
            return y
        low = kernels.grouped_mm(F.dropout(x, self.dropout, self.training), self.A.to(x.dtype), tokens_per_expert)
        return y.add_(kernels.grouped_mm(self.scale * low, self.B.to(x.dtype), tokens_per_expert))

    def delta(self) -> Tensor:
        """This rank's shard of every local expert's update, fp32.  -> (E, in, out)"""
        return self.scale * (self.A @ self.B)


class LoRARouter(torch.nn.Module):
    """A low-rank update of the router's weight, added to its logits in fp32.  A (R, h), B (all experts, R)"""

    def __init__(self, router: torch.nn.Module, rank: int, alpha: float, dropout: float, tensor: int) -> None:
        super().__init__()
        self.scale, self.dropout, self.enabled = alpha / rank, dropout, True
        partial = "tensor" if tensor > 1 else None
        self.A = _factor(router.weight, (rank, router.weight.shape[1]), False, None, partial)
        self.B = _factor(router.weight, (router.weight.shape[0], rank), False, None, partial)
        base_gating = router.gating

        def gating(x: Tensor) -> Tensor:
            logits = base_gating(x)
            if not self.enabled:
                return logits
            x = F.dropout(x.float(), self.dropout, self.training)
            return logits + self.scale * F.linear(F.linear(x, self.A), self.B)

        router.gating = gating

    def delta(self) -> Tensor:
        """The update of the whole router weight, fp32.  -> (experts, h)"""
        return self.scale * (self.B @ self.A)


def attach(model: torch.nn.Module, cfg: LoraConfig, parallel: Parallel, seed: int) -> dict[str, torch.nn.Module]:
    """Freeze ``model``, put adapters on every target, and return them by module name, in the model's order.

    Raises InputError for a target that this model does not have.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters, found = {}, set()
    for name, module in list(model.named_modules()):
        parent_name, _, target = name.rpartition(".")
        if target not in cfg.targets:
            continue
        parent = model.get_submodule(parent_name)
        if target == "router":
            module.lora = adapters[f"{name}.lora"] = LoRARouter(
                module, cfg.rank, cfg.alpha, cfg.dropout, parallel.tensor
            )
        else:
            is_column = target in ("linear_qkv", "linear_fc1")
            if isinstance(module, GroupedLinear):
                kind, rank, size = LoRAGroupedLinear, cfg.expert_rank or cfg.rank, parallel.expert_tensor
            else:
                kind, rank, size = LoRALinear, cfg.rank, parallel.tensor
            adapters[name] = kind(module, rank, cfg.alpha, cfg.dropout, is_column, size)
            setattr(parent, target, adapters[name])
        found.add(target)
    missing = [target for target in cfg.targets if target not in found]
    if missing:
        raise InputError(f"lora.targets: {', '.join(missing)} matches no module of this model")
    for name, adapter in adapters.items():
        _initialise_(adapter, name, parallel, seed)
    return adapters


@torch.no_grad()
def _initialise_(adapter: torch.nn.Module, name: str, parallel: Parallel, seed: int) -> None:
    """A uniform in +-1/sqrt(in) as PEFT draws it, from (seed, name, expert), which no layout changes; B stays 0."""
    if isinstance(adapter, LoRAGroupedLinear):
        local, in_size, _ = adapter.A.shape
        first = parallel.expert_rank * local
        pieces = [(adapter.A[i], f"{name}.{first + i}", 0, parallel.expert_tensor) for i in range(local)]
        rank_in_group = parallel.expert_tensor_rank
    else:
        pieces, rank_in_group = [(adapter.A, name, 1, parallel.tensor)], parallel.tensor_rank
    for piece, key, in_dim, size in pieces:
        shards = size if adapter.A.shard_dim is not None else 1
        shape = list(piece.shape)
        shape[in_dim] *= shards
        bound = 1 / math.sqrt(shape[in_dim])
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", key))
        whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        piece.copy_(whole.chunk(shards, in_dim)[rank_in_group if shards > 1 else 0])


def factors(adapters: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Every trainable tensor by name, `<module>.A` and `<module>.B`."""
    return {f"{name}.{letter}": getattr(adapter, letter) for name, adapter in adapters.items() for letter in "AB"}


def attached(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The adapters that `attach` put on ``model``, as it returned them."""
    kinds = LoRALinear, LoRAGroupedLinear, LoRARouter
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


@contextlib.contextmanager
def disabled(adapters: dict[str, torch.nn.Module]) -> Iterator[None]:
    """The model as it was before training: every adapter off inside the block."""
    before = {name: adapter.enabled for name, adapter in adapters.items()}
    for adapter in adapters.values():
        adapter.enabled = False
    try:
        yield
    finally:
        for name, adapter in adapters.items():
            adapter.enabled = before[name]


def describe(adapters: dict[str, torch.nn.Module], parallel: Parallel) -> str:
    """What is trained, over the whole job: one line a target (modules x experts, parameters) and the total in MiB."""
    lines, total = [], 0
    for pattern, label in (
        ("*.linear_qkv", "attention linear_qkv"),
        ("*.linear_proj", "attention linear_proj"),
        ("*.experts.linear_fc1", "experts linear_fc1"),
        ("*.experts.linear_fc2", "experts linear_fc2"),
        ("*.shared_experts.linear_fc1", "shared expert linear_fc1"),
        ("*.shared_experts.linear_fc2", "shared expert linear_fc2"),
        ("*.mlp.linear_fc1", "dense linear_fc1"),
        ("*.mlp.linear_fc2", "dense linear_fc2"),
        ("*.router.lora", "router"),
    ):
        chosen = [adapter for name, adapter in adapters.items() if fnmatch.fnmatch(name, pattern)]
        if not chosen:
            continue
        parameters = sum(_whole_size(factor, parallel) for adapter in chosen for factor in (adapter.A, adapter.B))
        experts = f" x {len(chosen[0].A) * parallel.expert} experts" if chosen[0].A.is_expert else ""
        lines.append(f"  {label}: {len(chosen)} layers{experts}, {parameters:,} parameters")
        total += parameters
    mine = sum(factor.numel() for factor in factors(adapters).values())
    return "\n".join(
        [
            f"LoRA: {total:,} trainable parameters ({total * 4 / 2**20:.2f} MiB in fp32), {mine:,} on this rank",
            *lines,
        ]
    )


def _whole_size(factor: torch.nn.Parameter, parallel: Parallel) -> int:
    if factor.is_expert:
        shards = parallel.expert_tensor if factor.shard_dim is not None else 1
        return factor.numel() * parallel.expert * shards
    return factor.numel() * (parallel.tensor if factor.shard_dim is not None else 1)
