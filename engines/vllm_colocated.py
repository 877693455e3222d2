"""One vLLM engine over all ranks, on the same dies as the trainer and with the same shards (rollout.expert_parallel).

Tensor x data parallel attention, experts over all ranks: every rank meets every other in each MoE layer, so all must
enter each `sample` together, those without prompts too; vLLM itself keeps them in step inside. A rank that fails ends
its process, and torchrun the others. Not run yet on an NPU; the lockstep and the placement have been, on a CPU.

Every sample has its own generator, as in other layouts, so the ranks of a tensor group draw the same tokens and a
layout changes nothing but rounding. vllm-ascend pays one small kernel a sample and token for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from engines import vllm_ascend, vllm_inside
from engines.vllm_engine import MAX_SEQUENCES, VllmEngine
from hf_config import Architecture
from input_files import InputError
from weights_hf import fused_group


def check(arch: Architecture, *, device_type: str, ranks: int, tensor: int) -> None:
    """Raise InputError for a device whose kernels want another layout than the trainer's, or cannot take the model."""
    if device_type != "npu":
        raise InputError(
            f"rollout.expert_parallel: on {device_type} vLLM packs its weights for its kernels, so a shard cannot be "
            "written in place; needed: device npu (or rollout.expert_parallel false)"
        )
    vllm_ascend.check_dispatch(arch, ranks, -(-MAX_SEQUENCES // tensor))  # tensor ranks share out the tokens


class ColocatedEngine(VllmEngine):
    """A VllmEngine that takes this rank's shards under vLLM's own names (vllm_shards.shards)."""

    lockstep = True

    def __init__(self, arch: Architecture, model_dir: str | Path, **options) -> None:
        super().__init__(arch, model_dir, **options)
        (self.parameters,) = self.llm.collective_rpc(vllm_inside.parameters)
        self.take_parameters_as_they_are()

    def take_parameters_as_they_are(self) -> None:
        """What a push must bring: every parameter of the loaded model, in its shape."""
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        if self.arch.tied_head:
            self.shapes.pop("lm_head.weight", None)  # load_weights gives it the embedding
        self.members = {}
        for name in self.shapes:
            self.members.setdefault(fused_group(name), set()).add(name)

    def placement(self) -> dict:
        """See vllm_inside.placement."""
        return self.llm.collective_rpc(vllm_inside.placement)[0]

    def _more_arguments(self, tensor: int, ranks: int, **more) -> dict:
        one_engine = {
            "data_parallel_size": ranks // tensor,
            "enable_expert_parallel": True,
            "async_scheduling": False,  # untried under data parallelism
        }
        return super()._more_arguments(tensor, ranks, **more) | one_engine

    def _hand_over(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Into vLLM's parameters, in place: captured graphs go on reading where they did."""
        with torch.no_grad():
            for name, tensor in stream:
                self.parameters[name].copy_(tensor)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """As it is, since the trainer has cast it; into a wider parameter (a router in fp32) it goes without loss."""
        wanted = self.parameters[name].dtype
        if torch.promote_types(tensor.dtype, wanted) != wanted:
            raise InputError(f"load_weights: {name}: found {tensor.dtype}; needed: {wanted}, or what it holds exactly")
        return tensor.detach().to(self.device)
