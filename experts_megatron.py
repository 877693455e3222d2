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
        if x.device.type == "npu":  # whose kernel differentiates itself
            return self.linear_fc2(kernels.swiglu(gate_up) * probs.unsqueeze(-1).to(x.dtype), tokens_per_expert), None
        return self.linear_fc2(_WeightedSwiglu.apply(gate_up, probs), tokens_per_expert), None


class _WeightedSwiglu(torch.autograd.Function):
    """silu(gate) * up * probs.  (N, 2 w), (N,) -> (N, w)

    It keeps its inputs and nothing else, and its gradient is written where it belongs: autograd's own would keep two
    more (N, w) and put the gradient together from two halves.
    """

    @staticmethod
    def forward(ctx, gate_up: Tensor, probs: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, probs)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up).mul_(probs.unsqueeze(-1).to(gate.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, probs = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
        torch.mul(grad, activated, out=grad_up)  # of the product before the probability
        grad_probs = (grad_up * up).sum(-1, dtype=probs.dtype)
        weight = probs.unsqueeze(-1).to(grad.dtype)
        grad_up.mul_(weight)
        torch.ops.aten.silu_backward.grad_input((grad * up).mul_(weight), gate, grad_input=grad_gate)
        return grad_gate_up, grad_probs
