"""Whole LoRA tensors under Hugging Face names and the shards of this rank: conversions and comparisons.

A checkpoint holds whole tensors, so any layout can load what any other layout saved. A whole factor is named after the
fused Hugging Face module, e.g. `model.layers.0.self_attn.qkv_proj.B` with rows [q; k; v], or
`model.layers.0.mlp.experts.gate_up_proj.A` (E, in, R). Optimizer moments have the shape of their factor and are
converted in the same way. E experts, R rank.
"""

import dataclasses
import functools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lora_megatron
import weights_hf
from checkpoint import Checkpoint
from hf_config import Architecture
from input_files import InputError, first_three
from knobs import LoraConfig
from lora_megatron import Adapter, whole_shape
from parallel_setup import Parallel

HF_NAMES = {  # Megatron module -> the Hugging Face module, or a fused name for several of them
    "self_attention.linear_qkv": "self_attn.qkv_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc1": "mlp.gate_up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.experts.linear_fc1": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2": "mlp.experts.down_proj",
    "mlp.shared_experts.linear_fc1": "mlp.shared_expert.gate_up_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
    "mlp.router.lora": "mlp.gate",
}
FUSED = {  # Hugging Face module -> (lora.targets, the fused module)
    "q_proj": ("linear_qkv", "qkv_proj"),
    "k_proj": ("linear_qkv", "qkv_proj"),
    "v_proj": ("linear_qkv", "qkv_proj"),
    "o_proj": ("linear_proj", "o_proj"),
    "gate": ("router", "gate"),
    "gate_proj": ("linear_fc1", "gate_up_proj"),
    "up_proj": ("linear_fc1", "gate_up_proj"),
    "down_proj": ("linear_fc2", "down_proj"),
}


def target_of(name: str) -> str:
    """The member of lora.targets that adapts a Hugging Face tensor; "" if none does."""
    return FUSED.get(name.split(".")[-2], ("", ""))[0] if name.endswith(".weight") else ""


def hf_name(name: str) -> str:
    """decoder.layers.3.mlp.experts.linear_fc1.A -> model.layers.3.mlp.experts.gate_up_proj.A"""
    _, _, layer, rest = name.split(".", 3)
    module, _, letter = rest.rpartition(".")
    return f"model.layers.{layer}.{HF_NAMES[module]}.{letter}"


# ------------------------------------------------------------------------------------------------ whole <-> shards


@torch.no_grad()
def gather(
    adapters: dict[str, Adapter], values: dict[str, Tensor], arch: Architecture, parallel: Parallel
) -> dict[str, Tensor]:
    """Whole tensors by Hugging Face name from the ``values`` of every rank (by factor name). Collective."""
    factors = lora_megatron.factors(adapters)
    return {hf_name(name): whole(name, factors[name], values[name], arch, parallel).clone() for name in factors}


@torch.no_grad()
def whole(
    name: str,
    factor: torch.nn.Parameter,
    value: Tensor,
    arch: Architecture,
    parallel: Parallel,
    join_on_host: bool = False,
) -> Tensor:
    """The whole tensor of which ``value``, shaped like ``factor``, is the shard of this rank. Collective.

    The result may be ``value`` itself. Shards are received in one tensor. For experts that tensor is the result, unless
    expert_tensor > 1; all other shards are joined in a copy. With ``join_on_host`` the copy is made on the host, so the
    device holds one such tensor beside its own shard (and, with expert_tensor > 1, a share of it that was gathered over
    the experts before).
    """
    if factor.is_expert:
        value = weights_hf.gather(value, parallel.expert, parallel.expert_group).flatten(0, 1)
    dim, shards, is_qkv = factor.shard_dim, parallel.shards(factor.is_expert), name.endswith("linear_qkv.B")
    if dim is None or (shards.size == 1 and not is_qkv):
        return value
    parts = weights_hf.gather(value, shards.size, shards.group)
    if join_on_host:
        parts = [part.cpu() for part in parts]
    if is_qkv:
        parts = [weights_hf.separate_qkv(part, arch.num_kv_heads // shards.size, arch) for part in parts]
    blocks = [size // shards.size for size in _block_sizes(whole_shape(factor, parallel)[dim], name, arch)]
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
    """The pieces of this rank, by factor name, of all ``wholes`` whose name has this ``ending``; one is read at a time.

    Raises InputError when names or shapes are not those of these adapters.
    """
    factors = lora_megatron.factors(adapters)
    expected = {hf_name(name) + ending for name in factors}
    odd = sorted(expected ^ {name for name in wholes if name.endswith(ending)})
    if odd:
        raise InputError(f"checkpoint: the adapters do not match lora.targets; {odd[0]} is on one side only")
    pieces = {}
    for name, factor in factors.items():
        whole_name, shape = hf_name(name) + ending, whole_shape(factor, parallel)
        value = wholes[whole_name]
        if tuple(value.shape) != shape or value.dtype != factor.dtype:
            raise InputError(
                f"checkpoint: {whole_name} has shape {list(value.shape)} of {value.dtype}, "
                f"the model needs {list(shape)} of {factor.dtype}"
            )
        value = _piece(name, factor, value, arch, parallel)
        negative = ending == ".exp_avg_sq" and bool((value < 0).any())
        if not value.isfinite().all() or negative:
            raise InputError(f"checkpoint: {whole_name} holds a number that is not finite, or a negative square")
        pieces[name] = value.contiguous()
    return pieces


def _piece(name: str, factor: torch.nn.Parameter, value: Tensor, arch: Architecture, parallel: Parallel) -> Tensor:
    """What the rank at the place of ``parallel`` holds of the whole tensor ``value``, the inverse of `whole`."""
    dim, shards = factor.shard_dim, parallel.shards(factor.is_expert)
    if factor.is_expert:
        value = value.chunk(parallel.expert)[parallel.expert_rank]
    if dim is not None:
        blocks = value.split(_block_sizes(value.shape[dim], name, arch), dim)
        value = torch.cat([block.chunk(shards.size, dim)[shards.rank] for block in blocks], dim)
    if name.endswith("linear_qkv.B"):
        value = weights_hf.interleave_qkv(value, arch.num_kv_heads // shards.size, arch)
    return value


def _block_sizes(size: int, name: str, arch: Architecture) -> list[int]:
    """Sizes, in the whole tensor, of the fused blocks along the dimension that is split."""
    if name.endswith("linear_qkv.B"):
        kv = arch.num_kv_heads * arch.head_dim
        return [arch.num_heads * arch.head_dim, kv, kv]
    return [size // 2] * 2 if name.endswith("linear_fc1.B") else [size]  # fc1: gate, up


# ------------------------------------------------------------------------------------- by weights of the base model


@dataclass(frozen=True)
class Adapted:
    """A module with an A and a B in the checkpoint, and the weights of the base model that they change."""

    parent: str  # model.layers.0.self_attn
    fused: str  # qkv_proj: the checkpoint has <parent>.<fused>.A and .B
    rows: dict[str, int]  # the base model's modules in the order of B's output rows: {q_proj: 64, k_proj: 32, ..}
    in_size: int
    rank: int
    num_experts: int = 0  # 0: A (R, in), B (out, R); routed experts: A (E, in, R), B (E, R, out)

    @property
    def name(self) -> str:
        return f"{self.parent}.{self.fused}"

    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the checkpoint -> shape."""
        a, b = (self.rank, self.in_size), (sum(self.rows.values()), self.rank)
        if self.num_experts:
            a, b = (self.num_experts, *a[::-1]), (self.num_experts, *b[::-1])
        return {f"{self.name}.A": a, f"{self.name}.B": b}

    def pairs(self, factors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name of a changed weight of the base model, its A (R, in), its B (out, R)); views, not copies."""
        a, b = factors[f"{self.name}.A"], factors[f"{self.name}.B"]
        by_expert = [(f"{self.parent}.{e}", a[e].t(), b[e].t()) for e in range(self.num_experts)]
        for parent, a_whole, b_whole in by_expert or [(self.parent, a, b)]:
            blocks = b_whole.split(list(self.rows.values()))
            for module, block in zip(self.rows, blocks, strict=True):
                yield f"{parent}.{module}.weight", a_whole, block


def adapted_modules(arch: Architecture, lora: LoraConfig) -> Iterator[Adapted]:
    """Every module of ``arch`` that ``lora`` trains, in the order of the layers."""
    found: dict[str, Adapted] = {}
    for name, shape in weights_hf.tensor_shapes(arch).items():
        parent, _, module = name.removesuffix(".weight").rpartition(".")
        target, fused = FUSED.get(module, ("", ""))
        if target in lora.targets:
            parent, is_expert = re.subn(r"\.experts\.\d+$", ".experts", parent)
            rank, num_experts = (lora.expert_rank or lora.rank, arch.num_experts) if is_expert else (lora.rank, 0)
            adapted = Adapted(parent, fused, {}, shape[1], rank, num_experts)
            found.setdefault(adapted.name, adapted).rows[module] = shape[0]
    yield from found.values()


# ------------------------------------------------------------------------------- copies of one piece on several ranks


Pieces = dict[tuple[str, str], Tensor]  # (name of the whole tensor, which piece of it) -> this rank's tensor


def adapter_pieces(adapters: dict[str, Adapter], parallel: Parallel) -> Pieces:
    """Every LoRA factor of this rank, under the name that checkpoints have for the whole factor."""
    pieces = {}
    for name, factor in lora_megatron.factors(adapters).items():
        shard = parallel.shards(factor.is_expert).rank if factor.shard_dim is not None else ""
        experts = f" of experts {parallel.expert_rank}" if factor.is_expert else ""
        pieces[hf_name(name), f"{shard}{experts}"] = factor
    return pieces


def all_pieces(model: torch.nn.Module, arch: Architecture, adapters: dict[str, Adapter], parallel: Parallel) -> Pieces:
    """Every LoRA factor of this rank, and every frozen weight under the Hugging Face name of its first block."""
    pieces = adapter_pieces(adapters, parallel)
    for slot in weights_hf.slots(model, arch, parallel):
        shard = parallel.shards(slot.expert is not None).rank if slot.dim is not None else ""
        pieces[slot.names[0], str(shard)] = slot.weight
    return pieces


@torch.no_grad()
def differing(pieces: Pieces, parallel: Parallel) -> str:
    """Names the pieces that are not equal on all ranks that hold them; "" if there are none. Collective."""
    own = {piece: _checksum(tensor) for piece, tensor in pieces.items()}
    held: dict[tuple[str, str], dict[int, int]] = {}  # the checksum of a piece on each rank that holds it
    for rank, checksums in enumerate(parallel.gather_objects(own)):
        for piece, checksum in checksums.items():
            held.setdefault(piece, {})[rank] = checksum
    unequal = [
        f"{name} of ranks {', '.join(map(str, by_rank))}"
        for (name, _), by_rank in held.items()
        if len(set(by_rank.values())) > 1
    ]
    return f"{first_three(unequal)}: not the same on all ranks that hold it" if unequal else ""


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _checksum_at(
    name: str,
    factor: torch.nn.Parameter,
    value: Tensor,
    arch: Architecture,
    parallel: Parallel,
    place: tuple[tuple[str, Any], ...],
) -> int:
    """The checksum of the piece of the whole tensor ``value`` at another ``place``: (a rank in Parallel, its value)."""
    return _checksum(_piece(name, factor, value, arch, dataclasses.replace(parallel, **dict(place))))


@torch.no_grad()
def not_saved(
    saved: Checkpoint | None,
    adapters: dict[str, Adapter],
    live: Mapping[str, Mapping[str, Tensor]],
    counts: dict[str, int],
    arch: Architecture,
    parallel: Parallel,
) -> str:
    """Names adapters, moments or counts that are not those of the checkpoint; "" if there are none. Collective.

    ``live``: ending of the names in the file -> factor name -> tensor of this rank. Rank 0 alone needs ``saved``: it
    cuts each of its tensors into the pieces of all ranks, and compares their checksums. So what `whole` puts together
    is compared by its inverse, one tensor at a time.
    """
    factors = lora_megatron.factors(adapters)
    sums = {(name, ending): _checksum(values[name]) for ending, values in live.items() for name in factors}
    place = {key: getattr(parallel, key) for key in ("tensor_rank", "expert_rank", "expert_tensor_rank")}
    by_rank, found = parallel.gather_objects((place, sums)), []
    if parallel.rank == 0 and saved is not None:
        found = [
            f"{key} {count} for {saved.state.get(key)}"
            for key, count in counts.items()
            if count != saved.state.get(key)
        ]
        stored = {f"{kind} {name}": value for kind, named in saved.tensors.items() for name, value in named.items()}
        for name, ending in sums:
            factor, label = factors[name], f"{'optimizer' if ending else 'adapter'} {hf_name(name)}{ending}"
            value = stored.pop(label, None)
            fits = value is not None and tuple(value.shape) == whole_shape(factor, parallel)
            # A piece is cut once, however many ranks hold it.
            keys = ("expert_rank", "expert_tensor_rank") if factor.is_expert else ("tensor_rank",)
            cut = functools.cache(functools.partial(_checksum_at, name, factor, value, arch, parallel))
            fits = fits and all(
                cut(tuple((key, there[key]) for key in keys)) == own[name, ending] for there, own in by_rank
            )
            found += [] if fits else [label]
        found += sorted(stored)
    return parallel.gather_objects(f"{first_three(found)}: not what {saved.path} holds" if found else "")[0]
