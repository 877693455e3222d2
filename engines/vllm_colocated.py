"""One vLLM engine over all ranks, on the trainer's devices and with the trainer's shards (rollout.expert_parallel).

Attention is tensor x data parallel, and the experts are split over all ranks. In each MoE layer every rank exchanges
tokens with every other, so all ranks must enter each `sample` together, also ranks without prompts; vLLM keeps them in
step inside the call. A rank that fails ends its process, and torchrun ends the others. This has not run on an NPU yet;
the lockstep and the placement were tested on a CPU.

Every sample has its own generator, as in other layouts. So the ranks of a tensor group draw the same tokens, and the
layout changes nothing but rounding. For vllm-ascend this costs one small kernel for each sample and token.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from engines import vllm_ascend, vllm_inside
from engines.vllm_engine import MAX_SEQUENCES, VllmEngine
from hf_config import Architecture
from input_files import InputError


def check(arch: Architecture, *, device_type: str, ranks: int, tensor: int) -> None:
    """Raise InputError for a device whose kernels need another layout than the trainer's, or cannot run the model."""
    if device_type != "npu":
        raise InputError(
            f"rollout.expert_parallel: on {device_type} vLLM packs its weights for its kernels, so a shard cannot be "
            "written in place; needed: device npu (or rollout.expert_parallel false)"
        )
    vllm_ascend.check_dispatch(arch, ranks, -(-MAX_SEQUENCES // tensor))  # the tensor ranks split the tokens


class ColocatedEngine(VllmEngine):
    """A VllmEngine into which each rank pushes its own shards, under vLLM's names (vllm_shards.shards)."""

    lockstep = True

    def __init__(self, arch: Architecture, model_dir: str | Path, **options) -> None:
        super().__init__(arch, model_dir, **options)
        (self.parameters,) = self.llm.collective_rpc(vllm_inside.parameters)
        self.take_parameters_as_they_are()

    def take_parameters_as_they_are(self) -> None:
        """Let a push bring every parameter of the loaded model, in its shape."""
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        if self.arch.tied_head:
            self.shapes.pop("lm_head.weight", None)  # load_weights copies the embedding to it

    def placement(self) -> dict[str, list[int]]:
        return self.llm.collective_rpc(vllm_inside.placement)[0]

    def _more_arguments(self, tensor: int, ranks: int, **more) -> dict:
        return super()._more_arguments(tensor, ranks, **more) | {
            "data_parallel_size": ranks // tensor,
            "enable_expert_parallel": True,
            "async_scheduling": False,  # not tried with data parallelism
        }

    def _hand_over(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Copy into vLLM's parameters in place, because captured graphs read from their addresses."""
        with torch.no_grad():
            for name, tensor in stream:
                self.parameters[name].copy_(tensor)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as it is. The parameter must hold its values exactly; it may be wider, as a router in fp32."""
        wanted = self.parameters[name].dtype
        if torch.promote_types(tensor.dtype, wanted) != wanted:
            raise InputError(f"load_weights: {name}: found {tensor.dtype}; needed: {wanted}, or a narrower dtype")
        return tensor.detach().to(self.device)
