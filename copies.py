"""What several ranks hold in common, and what a resumed run has taken up: compared, so that neither differs unnoticed.

Ranks that hold the same piece of a weight or of a LoRA factor must hold the same bytes. Checksums of the bytes are
compared at the start and before each checkpoint. After each step sums of the LoRA factors are, which costs little; only
where these differ, checksums decide. A resumed run's state is gathered again and held against its checkpoint. The
functions that compare are collective, and return the same text on every rank: "" if all is well.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import adapter_weights
import lora_megatron
import weights_hf
from checkpoint import Checkpoint, Pending
from hf_config import Architecture
from parallel_setup import Parallel


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
        pieces.append(Piece(adapter_weights.hf_name(name), place, factor))
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
