"""The routed experts of one MoE layer as 3-D weights: the `experts` slot of Megatron's MoE layer spec.

N dispatched rows sorted by expert, E local experts, h hidden size, w expert width (over expert_tensor ranks).
Router, dispatcher and everything around stay Megatron's.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kernels


class GroupedLinear(torch.nn.Module):
    """One weight matrix per expert, stored the way it multiplies: row block e of x times weight[e]."""

    def __init__(self, num_experts: int, in_size: int, out_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_experts, in_size, out_size, dtype=dtype))

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """(N, in), (E,) -> (N, out)"""
        return kernels.grouped_mm(x, self.weight, tokens_per_expert)


class GroupedExperts(torch.nn.Module):
    """SwiGLU experts, each row's output times its routing probability."""

    def __init__(self, num_local_experts: int, config, submodules=None, pg_collection=None) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self.linear_fc1 = GroupedLinear(num_local_experts, config.hidden_size, 2 * width, config.params_dtype)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, config.hidden_size, config.params_dtype)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """(N, h), (E,), (N,) -> (N, h) and no bias.  With expert_tensor > 1 the dispatcher adds up the parts."""
        gate_up = self.linear_fc1(x, tokens_per_expert)  # (N, 2 w)
        # The second matrix is linear, so the probability may as well come before it, where rows are narrower.
        return self.linear_fc2(kernels.weighted_swiglu(gate_up, probs), tokens_per_expert), None
