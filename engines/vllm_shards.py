"""The push without communication: trainer and vLLM hold the same shards on the same ranks, so each rank copies its own.

This holds where one vLLM engine spans all ranks as the trainer does (rollout.expert_parallel). Tensor rank t then has
the same heads, columns and tokens of the vocabulary in both, and expert rank r the same experts. The names are those of
vLLM's parameters; the layout is the one that its NPU kernels read. E local experts, h hidden size, w expert width.
"""

from collections.abc import Collection, Iterator
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

import weights_hf
from hf_config import Architecture
from input_files import InputError
from parallel_setup import Parallel
from weights_hf import Slot


@torch.no_grad()
def shards(
    model: torch.nn.Module, arch: Architecture, parallel: Parallel, *, only: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of what weights_hf.export gives, under vLLM's names, with LoRA merged. Not collective.

    Each shard equals the slice that vLLM's loader would cut from the whole tensors. ``only``: see weights_hf.export.
    The routed experts of a layer are two tensors in the trainer's layout: w13 (E, h, 2w), with gate before up, and w2
    (E, w, h).
    """
    todo = list(weights_hf.slots(model, arch, parallel))
    for name, members in groupby(todo if only is None else weights_hf.changing(todo, only), key=vllm_name):
        slots = list(members)
        if slots[0].expert is None:
            (slot,) = slots
            value = weights_hf.merged(slot)
            yield name, weights_hf.separate_qkv(value, slot.qkv_groups, arch) if slot.qkv_groups else value
        else:
            assert [slot.expert for slot in slots] == list(range(arch.num_experts // parallel.expert)), name
            yield name, torch.stack([weights_hf.merged(slot) for slot in slots])


def vllm_name(slot: Slot) -> str:
    """The name of vLLM's parameter that holds the weight of ``slot``."""
    name = slot.names[0]
    if slot.expert is not None:
        return f"{name.partition('.experts.')[0]}.experts.{'w13' if len(slot.names) == 2 else 'w2'}_weight"
    if slot.qkv_groups:
        return name.replace(".q_proj.", ".qkv_proj.")
    return name.replace(".gate_proj.", ".gate_up_proj.")


def check_placement(found: dict, arch: Architecture, parallel: Parallel) -> None:
    """Raise InputError unless this rank has the same groups and experts in vLLM (vllm_inside.placement) and trainer."""
    local = arch.num_experts // parallel.expert
    experts = list(range(parallel.expert_rank * local, (parallel.expert_rank + 1) * local))
    needed = {
        "tensor": dist.get_process_group_ranks(parallel.tensor_group),
        "data": dist.get_process_group_ranks(parallel.data_group),
        "expert": dist.get_process_group_ranks(parallel.expert_group),
        **{f"layer {i} experts": experts for i, is_moe in enumerate(arch.moe_layers) if is_moe},
    }
    for what in sorted(needed.keys() | found.keys()):
        if found.get(what) != needed.get(what):
            raise InputError(
                f"rollout.expert_parallel: rank {parallel.rank}: vLLM's {what}: {found.get(what)}; the trainer's: "
                f"{needed.get(what)}; needed: the same (or rollout.expert_parallel false)"
            )
