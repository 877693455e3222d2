"""Whole LoRA tensors under Hugging Face names <-> this rank's shards: what checkpoints hold, so any layout loads any.

A whole factor is named after the fused Hugging Face module, e.g. `model.layers.0.self_attn.qkv_proj.B` with rows
[q; k; v], or `model.layers.0.mlp.experts.gate_up_proj.A` (E, in, R). Optimizer moments have their factor's shape and
travel the same way. E experts, R rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import lora_megatron
import weights_hf
from checkpoint import Checkpoint, Pending
from hf_config import Architecture
from input_files import InputError
from knobs import LoraConfig
from parallel_setup import Parallel

HF_NAMES = {  # Megatron module -> the Hugging Face module, or the fused one that stands for several
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


def hf_name(name: str) -> str:
    """decoder.layers.3.mlp.experts.linear_fc1.A -> model.layers.3.mlp.experts.gate_up_proj.A"""
    _, _, layer, rest = name.split(".", 3)
    module, _, letter = rest.rpartition(".")
    return f"model.layers.{layer}.{HF_NAMES[module]}.{letter}"


@torch.no_grad()
def gather(
    adapters: dict[str, torch.nn.Module], values: dict[str, Tensor], arch: Architecture, parallel: Parallel
) -> dict[str, Tensor]:
    """Whole tensors from every rank's ``values`` (by factor name, shaped as the factors). Collective; same on all."""
    factors = lora_megatron.factors(adapters)
    return {hf_name(name): whole(name, factors[name], values[name], arch, parallel).clone() for name in factors}


@torch.no_grad()
def whole(
    name: str, factor, value: Tensor, arch: Architecture, parallel: Parallel, join_on_host: bool = False
) -> Tensor:
    """The whole tensor whose shard on this rank is ``value``, shaped as ``factor``; it may be ``value`` itself.

    Collective. The shards are received in one tensor, which for experts is the result. Those of other tensors, or of
    experts with expert_tensor > 1, are joined in a copy, which ``join_on_host`` keeps off the device: there then is one
    such tensor beside the own shard, and with expert_tensor > 1 a share of it that was gathered over experts first.
    """
    if factor.is_expert and parallel.expert > 1:
        experts = value.new_empty((parallel.expert * len(value), *value.shape[1:]))
        dist.all_gather_into_tensor(experts, value.contiguous(), group=parallel.expert_group)
        value = experts
    dim, (size, _, group) = factor.shard_dim, _group(factor, parallel)
    if dim is None or (size == 1 and not name.endswith("linear_qkv.B")):
        return value
    shards = weights_hf.gather(value, size, group)
    if join_on_host:
        shards = [shard.cpu() for shard in shards]
    if name.endswith("linear_qkv.B"):
        shards = [weights_hf.separate_qkv(shard, arch.num_kv_heads // size, arch) for shard in shards]
    joined = shards[0].new_empty(whole_shape(factor, parallel))
    start, blocks = 0, [block // size for block in _block_sizes(joined.shape[dim], name, arch)]
    for place, block in enumerate(blocks):
        for shard in shards:
            joined.narrow(dim, start, block).copy_(shard.narrow(dim, sum(blocks[:place]), block))
            start += block
    return joined


def whole_shape(factor, parallel: Parallel) -> tuple[int, ...]:
    """Shape of the whole tensor that ``factor`` is a shard of."""
    shape = list(factor.shape)
    if factor.is_expert:
        shape[0] *= parallel.expert
    if factor.shard_dim is not None:
        shape[factor.shard_dim] *= _group(factor, parallel)[0]
    return tuple(shape)


@torch.no_grad()
def scatter(
    adapters: dict[str, torch.nn.Module],
    wholes: Mapping[str, Tensor],
    arch: Architecture,
    parallel: Parallel,
    end: str = "",
) -> dict[str, Tensor]:
    """This rank's piece of every whole tensor whose name has this ``end``, by factor name; one is read at a time.

    Raises InputError when names or shapes are not those of these adapters.
    """
    factors = lora_megatron.factors(adapters)
    expected, found = {hf_name(name) + end for name in factors}, {name for name in wholes if name.endswith(end)}
    if expected != found:
        odd = sorted(expected ^ found)
        raise InputError(f"checkpoint: the adapters do not match lora.targets; {odd[0]} is on one side only")
    pieces = {}
    for name, factor in factors.items():
        value, shape = wholes[hf_name(name) + end], whole_shape(factor, parallel)
        if tuple(value.shape) != shape:
            raise InputError(
                f"checkpoint: {hf_name(name) + end} has shape {list(value.shape)}, the model needs {list(shape)}"
            )
        size, rank, _ = _group(factor, parallel)
        if factor.is_expert:
            value = value.chunk(parallel.expert)[parallel.expert_rank]
        if factor.shard_dim is not None:
            blocks = value.split(_block_sizes(value.shape[factor.shard_dim], name, arch), factor.shard_dim)
            value = torch.cat([block.chunk(size, factor.shard_dim)[rank] for block in blocks], factor.shard_dim)
            if name.endswith("linear_qkv.B"):
                value = weights_hf.interleave_qkv(value, arch.num_kv_heads // size, arch)
        negative = end == ".exp_avg_sq" and bool((value < 0).any())
        if not value.is_floating_point() or not value.isfinite().all() or negative:
            raise InputError(f"checkpoint: {hf_name(name) + end} holds what is no finite number, or a negative square")
        pieces[name] = value.contiguous()
    return pieces


def _group(factor, parallel: Parallel):
    """Size of the group that shares the factor, this rank's place in it, and the group."""
    if factor.is_expert:
        return parallel.expert_tensor, parallel.expert_tensor_rank, parallel.expert_tensor_group
    return parallel.tensor, parallel.tensor_rank, parallel.tensor_group


def _block_sizes(size: int, name: str, arch: Architecture) -> list[int]:
    """Sizes, in the whole tensor, of the fused blocks along the dimension that is split."""
    if name.endswith("linear_qkv.B"):
        kv = arch.num_kv_heads * arch.head_dim
        return [arch.num_heads * arch.head_dim, kv, kv]
    if name.endswith("linear_fc1.B"):
        return [size // 2, size // 2]  # gate, up
    return [size]


# ------------------------------------------------------------------------------------- by weights of the base model


@dataclass(frozen=True)
class Adapted:
    """A module that the checkpoint holds an A and a B for, and the base model's weights that these change."""

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
        out_size = sum(self.rows.values())
        if self.num_experts:
            a, b = (self.num_experts, self.in_size, self.rank), (self.num_experts, self.rank, out_size)
        else:
            a, b = (self.rank, self.in_size), (out_size, self.rank)
        return {f"{self.name}.A": a, f"{self.name}.B": b}

    def pairs(self, factors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(weight of the base model, A (R, in), B (out, R)) for each weight that this changes; views, not copies."""
        a, b = factors[f"{self.name}.A"], factors[f"{self.name}.B"]
        by_expert = [(f"{self.parent}.{e}", a[e].t(), b[e].t()) for e in range(self.num_experts)]
        for parent, a_whole, b_whole in by_expert or [(self.parent, a, b)]:
            blocks = b_whole.split(list(self.rows.values()))
            for module, block in zip(self.rows, blocks, strict=True):
                yield f"{parent}.{module}.weight", a_whole, block


def adapted_modules(arch: Architecture, lora: LoraConfig) -> Iterator[Adapted]:
    """Every module of ``arch`` that ``lora`` trains, in the order of the layers."""
    hidden, heads, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim

    def swiglu(parent: str, width: int, rank: int, num_experts: int = 0) -> Iterator[Adapted]:
        if "linear_fc1" in lora.targets:
            yield Adapted(parent, "gate_up_proj", {"gate_proj": width, "up_proj": width}, hidden, rank, num_experts)
        if "linear_fc2" in lora.targets:
            yield Adapted(parent, "down_proj", {"down_proj": hidden}, width, rank, num_experts)

    for i, is_moe in enumerate(arch.moe_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        if "linear_qkv" in lora.targets:
            yield Adapted(attention, "qkv_proj", {"q_proj": heads, "k_proj": kv, "v_proj": kv}, hidden, lora.rank)
        if "linear_proj" in lora.targets:
            yield Adapted(attention, "o_proj", {"o_proj": hidden}, heads, lora.rank)
        if not is_moe:
            yield from swiglu(mlp, arch.dense_ffn_size, lora.rank)
            continue
        if "router" in lora.targets:
            yield Adapted(mlp, "gate", {"gate": arch.num_experts}, hidden, lora.rank)
        yield from swiglu(f"{mlp}.experts", arch.expert_ffn_size, lora.expert_rank or lora.rank, arch.num_experts)
        if arch.shared_expert_ffn_size:
            yield from swiglu(f"{mlp}.shared_expert", arch.shared_expert_ffn_size, lora.rank)


# --------------------------------------------------------------------------------- copies of one piece on several ranks


class Piece(NamedTuple):
    """A tensor of this rank, and which piece of the whole tensor it is."""

    name: str  # of the whole tensor
    place: str  # the same on all ranks that hold this piece
    tensor: Tensor


def everything(
    model: torch.nn.Module, arch: Architecture, modules: dict[str, torch.nn.Module], parallel: Parallel
) -> list[Piece]:
    """Every frozen weight of this rank, under the Hugging Face name of its first block, and every LoRA factor."""
    pieces = adapters(modules, parallel)
    for slot in weights_hf.slots(model, arch, parallel):
        rank = parallel.tensor_rank if slot.expert is None else parallel.expert_tensor_rank
        pieces.append(Piece(slot.names[0], "" if slot.dim is None else str(rank), slot.weight))
    return pieces


def adapters(modules: dict[str, torch.nn.Module], parallel: Parallel) -> list[Piece]:
    """Every LoRA factor of this rank, under the name that checkpoints have for the whole one."""
    pieces = []
    for name, factor in lora_megatron.factors(modules).items():
        rank = parallel.expert_tensor_rank if factor.is_expert else parallel.tensor_rank
        place = "" if factor.shard_dim is None else str(rank)
        if factor.is_expert:
            place += f" of experts {parallel.expert_rank}"
        pieces.append(Piece(hf_name(name), place, factor))
    return pieces


@torch.no_grad()
def differing(pieces: list[Piece], parallel: Parallel, exact: bool = True) -> str:
    """Which pieces are not the same on all ranks that hold them. All ranks bring the same number of pieces.

    Not ``exact``: sums choose the pieces whose bytes are compared, which misses changes that are lost in rounding.
    """
    mine = [zlib.crc32(f"{name} {place}".encode()) for name, place, _ in pieces]
    keys, suspects = parallel.gather_rows(torch.tensor(mine)), set(mine)
    if not exact:
        sums = torch.stack([_weighted_sum(tensor) for _, _, tensor in pieces])
        suspects = _apart(keys, parallel.gather_rows(sums)).keys()
        if not suspects:
            return ""
    checksums = [_checksum(tensor) if key in suspects else 0 for key, (_, _, tensor) in zip(mine, pieces, strict=True)]
    apart = _apart(keys, parallel.gather_rows(torch.tensor(checksums)))
    if not apart:
        return ""
    names: list[dict[int, str]] = [{}] * parallel.world_size
    dist.all_gather_object(names, {key: piece.name for key, piece in zip(mine, pieces, strict=True)})
    known = {key: name for by_rank in names for key, name in by_rank.items()}
    found = [f"{known[key]} of ranks {', '.join(map(str, ranks))}" for key, ranks in apart.items()]
    return _listed(found, "not the same on all ranks that hold it")


def _apart(keys: Tensor, values: Tensor) -> dict[int, list[int]]:
    """Key -> ranks that hold it, of the keys whose values differ.  (ranks, n) twice; NaN is no difference."""
    held: dict[int, dict[int, float]] = {}
    for rank, row in enumerate(zip(keys.tolist(), values.tolist(), strict=True)):
        for key, value in zip(*row, strict=True):
            held.setdefault(key, {})[rank] = value
    return {key: list(by_rank) for key, by_rank in held.items() if len({repr(v) for v in by_rank.values()}) > 1}


def _weighted_sum(tensor: Tensor) -> Tensor:
    """A sum that the order of the elements changes, fp32.  -> ()"""
    weights = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.int32).remainder_(8191) + 1
    return (tensor.detach().flatten().float() * weights).sum()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@torch.no_grad()
def not_restored(
    saved: Checkpoint, tensors: dict[str, dict[str, Pending]], counts: dict[str, int], parallel: Parallel
) -> str:
    """Which adapters, moments or counts are not the checkpoint's; ``tensors``, ``counts``: Learner.state()."""
    found = [f"{key} {counts[key]} for {saved.state.get(key)}" for key in counts if counts[key] != saved.state.get(key)]
    for kind, named in tensors.items():
        theirs: Mapping[str, Tensor] = saved.tensors.get(kind, {})
        for name, pending in named.items():
            value = pending.make()  # collective
            if parallel.rank == 0 and not (name in theirs and torch.equal(value.cpu(), theirs[name])):
                found.append(f"{kind} {name}")
    said = [_listed(found, f"not what {saved.path} holds")]
    dist.broadcast_object_list(said)
    return said[0]


def _listed(found: list[str], fault: str) -> str:
    """One line for what was found, the first three by name."""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{', '.join(found[:3])}{more}: {fault}" if found else ""
