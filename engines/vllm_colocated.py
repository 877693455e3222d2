"""One vLLM engine over all ranks, on the trainer's devices and with the trainer's shards (rollout.expert_parallel).

Attention is tensor x data parallel, and the experts are split over all ranks. In each MoE layer every rank exchanges
tokens with every other rank. So all ranks must enter each `sample` together, even ranks without prompts; vLLM keeps
them in step inside the call. A rank that fails ends its process, and torchrun ends the others. This has not run on an
NPU yet; the lockstep and the layout of groups and experts were tested on a CPU.

A push needs no communication. In vLLM and in the trainer, tensor rank t has the same heads, columns and tokens of the
vocabulary, and expert rank r the same experts. So each rank copies its shards. Their names are those of vLLM's
parameters, and their layout is the one that vLLM's NPU kernels read. E is the number of local experts, h the hidden
size, and w the expert width.

The tokens of a sample are drawn with its row in the table of uniform numbers (drawing.py), as in other layouts. So the
ranks of a tensor group draw the same tokens, and the layout changes nothing but rounding.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from engines import vllm_inside
from engines.vllm_engine import VllmEngine
from facts.architectures import Architecture
from facts.exits import InputError
from parallel_setup import Parallel
from weights import huggingface
from weights.huggingface import WeightShard

# vllm-ascend 0.30 computes the router's logits with a copy of its weight (ops/fused_moe/fused_moe.py, forward).
FP32_COPY = ".weight_fp32"


class ColocatedEngine(VllmEngine):
    """A VllmEngine into which each rank pushes its shards, under vLLM's names (see shards)."""

    lockstep = True

    def __init__(self, arch: Architecture, model_dir: str | Path, **options) -> None:
        super().__init__(arch, model_dir, **options)
        (self.parameters,) = self.llm.collective_rpc(vllm_inside.parameters)
        self.take_parameters_as_they_are()

    def take_parameters_as_they_are(self) -> None:
        """Require each push to bring the parameters of the loaded model, under vLLM's names and in vLLM's shapes."""
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        if self.arch.tied_head:
            self.shapes.pop("lm_head.weight", None)  # load_weights copies the embedding to it
        # load_weights sets biases to 0, and _hand_over writes the copies in fp32.
        left_out = (FP32_COPY,) if self.arch.qkv_bias else (FP32_COPY, ".bias")
        self.shapes = {name: shape for name, shape in self.shapes.items() if not name.endswith(left_out)}

    def _more_arguments(self, tensor: int, ranks: int, **more) -> dict:
        return super()._more_arguments(tensor, ranks, **more) | {
            "data_parallel_size": ranks // tensor,
            "enable_expert_parallel": True,
        }

    def _hand_over(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors into vLLM's parameters in place, because captured graphs read from their addresses."""
        with torch.no_grad():
            for name, tensor in stream:
                self.parameters[name].copy_(tensor)
                if (copy := self.parameters.get(name.removesuffix(".weight") + FP32_COPY)) is not None:
                    copy.copy_(tensor)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor on the engine's device, with its dtype unchanged.

        Raises InputError unless the parameter's dtype can represent all values of the tensor's dtype. The parameter's
        dtype may be wider, for example fp32 for a router.
        """
        wanted = self.parameters[name].dtype
        if torch.promote_types(tensor.dtype, wanted) != wanted:
            raise InputError(f"load_weights: {name} is {tensor.dtype}; push {wanted}, or a narrower dtype")
        return tensor.detach().to(self.device)


# ------------------------------------------------------------------------------------------------ the push


@torch.no_grad()
def shards(
    model: torch.nn.Module,
    arch: Architecture,
    parallel: Parallel,
    *,
    only: Collection[str] | None = None,
    experts: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shards of the model's tensors, under vLLM's names and with LoRA merged.

    This is not a collective. Each shard equals the slice that vLLM's loader would cut from the whole tensors. ``only``
    and ``experts`` choose tensors as in huggingface.export. The routed experts of a layer are two tensors in the
    trainer's layout: w13 (E, h, 2w), with gate before up, and w2 (E, w, h).
    """
    todo = list(huggingface.slots(model, arch, parallel))
    if only is not None:
        todo = huggingface.changing(todo, only, experts=experts)
    for name, members in groupby(todo, key=vllm_name):
        slots = list(members)
        values = [huggingface.merged(slot) for slot in slots]
        value = values[0] if len(values) == 1 else torch.cat(values)
        yield name, huggingface.separate_qkv(value, slots[0].qkv_groups, arch) if slots[0].qkv_groups else value


def vllm_name(slot: WeightShard) -> str:
    """Return the name of vLLM's parameter for the weight of ``slot``."""
    name = slot.names[0]
    if slot.experts is not None:
        return f"{name.partition('.experts.')[0]}.experts.{'w13' if len(slot.blocks[0]) == 2 else 'w2'}_weight"
    if slot.qkv_groups:
        return name.replace(".q_proj.", ".qkv_proj.")
    return name.replace(".gate_proj.", ".gate_up_proj.")
