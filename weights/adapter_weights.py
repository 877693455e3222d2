"""Converts whole LoRA tensors with Hugging Face names to the shards of this rank and back, and compares tensors.

A checkpoint contains whole tensors, so a run in any layout can load it. A whole factor is named after the fused Hugging
Face module, e.g. `model.layers.0.self_attn.qkv_proj.B` with rows [q; k; v], or
`model.layers.0.mlp.experts.gate_up_proj.A` (E, in, R). Optimizer moments have the shape of their factor and are
converted in the same way. E is the number of experts, and R the rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import lora_megatron
from facts.architectures import Architecture, Module, every_module, layers
from facts.exits import InputError
from knobs import LoraConfig
from lora_megatron import Adapter, whole_shape
from parallel_setup import Factor, Parallel, gather
from weights import huggingface
from weights.checkpoint import Checkpoint
from weights.peft_adapters import Pair, Pairs

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes per element -> integer dtype of this size
SUMMED = 2**22  # number of elements that a checksum adds at a time: 32 MiB in int64


def hf_name(name: str, arch: Architecture) -> str:
    """Convert the name of a factor to its name in a checkpoint.

    For example, decoder.layers.3.mlp.experts.linear_fc1.A becomes model.layers.3.mlp.experts.gate_up_proj.A.
    """
    return f"model.layers.{name.split('.')[2]}.{_module_of(name, arch).fused}.{name[-1]}"


def _module_of(name: str, arch: Architecture) -> Module:
    """Return the module that the factor called ``name`` adapts."""
    weight = name.split(".", 3)[3][: -len(".A")].removesuffix(".lora") + ".weight"
    return next(module for module in every_module(arch) if module.megatron == weight)


# ------------------------------------------------------------------------------------------------ whole <-> shards


@torch.no_grad()
def whole(
    name: str,
    factor: Factor,
    value: Tensor,
    arch: Architecture,
    parallel: Parallel,
    join_on_host: bool = False,
) -> Tensor:
    """Gather and return the whole tensor of which ``value`` is this rank's shard. All ranks call this together.

    ``value`` has the shape of ``factor``. The result may be ``value`` itself. A rank receives all shards in one tensor.
    For experts, this tensor is the result. For other factors, the shards are then joined in a copy. With
    ``join_on_host``, the copy is on the host, so the device stores only the received tensor in addition to its shard.
    """
    if factor.is_expert:
        return gather(value, parallel.expert, parallel.expert_group).flatten(0, 1)
    dim, is_qkv = factor.shard_dim, name.endswith("linear_qkv.B")
    if dim is None or (parallel.tensor == 1 and not is_qkv):
        return value
    parts = gather(value, parallel.tensor, parallel.tensor_group)
    if join_on_host:
        parts = [part.cpu() for part in parts]
    if is_qkv:
        parts = [huggingface.separate_qkv(part, arch.num_kv_heads // parallel.tensor, arch) for part in parts]
    blocks = [size // parallel.tensor for size in _block_sizes(name, whole_shape(factor, parallel)[dim], arch)]
    by_block = zip(*(part.split(blocks, dim) for part in parts), strict=True)
    return torch.cat([piece for pieces in by_block for piece in pieces], dim)


@torch.no_grad()
def scatter(
    adapters: dict[str, Adapter],
    wholes: Mapping[str, Tensor],
    arch: Architecture,
    parallel: Parallel,
    ending: str = "",
) -> dict[str, Tensor]:
    """Return this rank's piece of each tensor in ``wholes`` whose name ends in ``ending``, by the factor's name.

    Raises InputError if names or shapes are not those of ``adapters``, if a value is not finite, or if an exp_avg_sq
    has a negative value.
    """
    factors = lora_megatron.factors(adapters)
    shapes = {hf_name(name, arch) + ending: whole_shape(factor, parallel) for name, factor in factors.items()}
    refuse_unfit({name: wholes[name] for name in wholes if name.endswith(ending)}, shapes, "checkpoint")
    pieces = {}
    for (name, factor), whole_name in zip(factors.items(), shapes, strict=True):
        value = piece(name, factor, wholes[whole_name], arch, parallel)
        negative = ending == ".exp_avg_sq" and bool((value < 0).any())
        if not value.isfinite().all() or negative:
            raise InputError(f"checkpoint: {whole_name} has a number that is not finite, or a negative square")
        pieces[name] = value.contiguous()
    return pieces


def refuse_unfit(wholes: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise InputError unless ``wholes`` has exactly the names and shapes in ``shapes``, and all tensors are fp32.

    The values are not read. The message begins with ``where``.
    """
    for name in sorted(shapes.keys() | wholes.keys()):
        if name not in wholes:
            fault = "is missing"
        elif name not in shapes:
            fault = "is not trained by lora.targets in this model"
        elif tuple(wholes[name].shape) != shapes[name] or wholes[name].dtype != torch.float32:
            fault = (
                f"has shape {list(wholes[name].shape)} of {wholes[name].dtype}; the model needs {list(shapes[name])}"
            )
        else:
            continue
        raise InputError(f"{where}: {name} {fault}")


@torch.no_grad()
def copy_(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy tensors of ``values`` in place to the tensors of ``into`` with the same names.

    torch counts this change in a tensor's ``_version``, so LoRAGroupedLinear.weight notices it.
    """
    for name, tensor in into.items():
        tensor.copy_(values[name])


def piece(name: str, factor: Factor, value: Tensor, arch: Architecture, parallel: Parallel) -> Tensor:
    """Return the part of the whole tensor ``value`` for the rank of ``parallel``. This is the inverse of `whole`."""
    if factor.is_expert:
        return value.chunk(parallel.expert)[parallel.expert_rank]
    if (dim := factor.shard_dim) is not None:
        blocks = value.split(_block_sizes(name, value.shape[dim], arch), dim)
        value = torch.cat([block.chunk(parallel.tensor, dim)[parallel.tensor_rank] for block in blocks], dim)
    if name.endswith("linear_qkv.B"):
        value = huggingface.interleave_qkv(value, arch.num_kv_heads // parallel.tensor, arch)
    return value


def _block_sizes(name: str, factor_dim_size: int, arch: Architecture) -> list[int]:
    """Return the size of each fused block in the whole tensor, along the dimension that is split between ranks."""
    module = _module_of(name, arch)
    return [rows for rows, *_ in module.blocks.values()] if module.split == 0 else [factor_dim_size]


# ------------------------------------------------------------------------------------- by weights of the base model


class Adapted(NamedTuple):
    """A module whose factors A and B are in the checkpoint, and the weights of the base model that they change."""

    layer: str  # for example model.layers.0.
    module: Module
    rank: int

    @property
    def name(self) -> str:
        return self.layer + self.module.fused

    @property
    def is_expert(self) -> bool:
        return self.module.kind == "experts"

    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A and B by their names in the checkpoint.

        A is (R, in) and B (out, R). For routed experts, A is (E, in, R) and B (E, R, out).
        """
        a, b = (self.rank, self.module.in_size), (self.module.out_size, self.rank)
        if self.is_expert:
            a, b = (self.module.copies, *a[::-1]), (self.module.copies, *b[::-1])
        return {f"{self.name}.A": a, f"{self.name}.B": b}

    def pairs(self, factors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each weight of the base model that ``factors`` change, with its A (R, in) and B (out, R).

        A and B are views, not copies.
        """
        a, b, blocks = factors[f"{self.name}.A"], factors[f"{self.name}.B"], self.module.blocks
        for expert in range(self.module.copies):
            a_of_it, b_of_it = (a[expert].t(), b[expert].t()) if self.is_expert else (a, b)
            by_block = b_of_it.split([rows for rows, *_ in blocks.values()])
            for block, rows_of_b in zip(blocks, by_block, strict=True):
                yield f"{self.layer}{block.format(expert)}.weight", a_of_it, rows_of_b

    def names(self, part: slice) -> list[str]:
        """Return the names of the base model's weights in the experts of the slice ``part``, expert by expert.

        A module without routed experts counts as one expert, number 0.
        """
        numbers = range(self.module.copies)[part]
        return [f"{self.layer}{block.format(number)}.weight" for number in numbers for block in self.module.blocks]


def adapted_modules(arch: Architecture, lora: LoraConfig) -> Iterator[Adapted]:
    """Yield every module of ``arch`` that ``lora`` trains, in the order of the layers."""
    for layer, module in layers(arch):
        if module.target in lora.targets:
            yield Adapted(layer, module, lora.rank_of(module.kind == "experts"))


def read_factors(found: Checkpoint, modules: Iterable[Adapted]) -> dict[str, Tensor]:
    """Return the checkpoint's factors.

    Raises InputError unless their names and shapes are those of ``modules``, and all values are finite.
    """
    factors, where = found.tensors.get("adapter", {}), f"{found.path / 'adapter.safetensors'}"
    shapes = {name: shape for module in modules for name, shape in module.factor_shapes().items()}
    refuse_unfit(factors, shapes, where)
    for name, factor in factors.items():
        if not factor.isfinite().all():
            raise InputError(f"{where}: {name} has values that are not finite")
    return factors


def pairs_of(modules: Iterable[Adapted], factors: dict[str, Tensor], alpha: float) -> Pairs:
    """Return the pairs for PEFT, which adapts q, k, v, gate and up separately.

    Each of these matrices gets its rows of B, and the A that it shares with the other matrices of its fused module.
    """
    return {
        name.removesuffix(".weight"): Pair(a, b, alpha / adapted.rank)
        for adapted in modules
        for name, a, b in adapted.pairs(factors)
    }


# ------------------------------------------------------------------------------------------------ comparisons


def checksums(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return two sums over each tensor, in which the bits of each element are read as an integer.

    In the second sum, each element is weighted by its position. The sums are computed modulo 2^64 on the tensor's
    device, and are equal on all types of devices. The host waits for the device only once.
    """
    if not tensors:
        return []
    sums = [_sums(tensor) for tensor in tensors]
    return [(plain, weighted) for plain, weighted in torch.stack(sums).tolist()]


def _sums(tensor: Tensor) -> Tensor:
    words = tensor.detach().contiguous().flatten().view(WORDS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), SUMMED):
        part = words[first : first + SUMMED].long()
        positions = torch.arange(first + 1, first + 1 + len(part), device=tensor.device)
        total += torch.stack([part.sum(), (part * positions).sum()])
    return total
