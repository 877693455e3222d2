"""Operations with one meaning on all devices: by torch on a CPU or GPU, by torch_npu on an NPU.

The CPU code has run. The NPU code has run on a stand-in for the kernels of torch_npu (tests/support/fake_npu.py). The
CUDA code has not run. N rows, E local experts, h input width, o output width.
"""

import functools

import torch
from torch import Tensor


def _npu():
    import torch_npu

    return torch_npu


def grouped_mm(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Row block e of ``x`` times ``weight[e]``.  (N, h), (E, h, o), (E,) -> (N, o)

    The rows are sorted by expert. Autograd computes a weight gradient only for a weight that requires it, so frozen
    experts need no (E, h, o) gradient.
    """
    if x.device.type == "npu":
        if len(weight) == 1 or not len(x):  # the kernel needs at least two groups and one row
            return x @ weight[0]
        return _GroupedMatmul.apply(x, weight, tokens_per_expert.to(x.device, torch.int64))
    if len(x) and _grouped_mm_takes(weight):
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(x.device)
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    blocks = x.split(tokens_per_expert.tolist())
    return torch.cat([block @ weight[e] for e, block in enumerate(blocks)])


def _grouped_mm_takes(weight: Tensor) -> bool:
    """Whether torch's kernel takes this weight: rows that start on 16-byte boundaries, and on CUDA bf16."""
    aligned = all(width * weight.element_size() % 16 == 0 for width in weight.shape[1:])
    return aligned and (weight.device.type == "cpu" or weight.dtype == torch.bfloat16)


class _GroupedMatmul(torch.autograd.Function):
    """grouped_mm by torch_npu's kernel.

    MindSpeed's version computes the gradient of frozen experts too, which costs as much as the forward pass and a
    tensor as large as all local experts.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts)
        return _npu_grouped(x.contiguous(), weight, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, counts = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = _npu_grouped(grad, weight.transpose(1, 2), counts)
        if ctx.needs_input_grad[1]:
            grad_weight = _npu_grouped(x.contiguous().t(), grad, counts, group_type=2)
        return grad_x, grad_weight, None


def _npu_grouped(x: Tensor, weight: Tensor, counts: Tensor, group_type: int = 0) -> Tensor:
    """The grouped product. group_type 0 splits the rows of ``x`` into groups; 2 sums over the rows of each group.

    group_list_type 1: ``counts`` are the sizes of the groups. split_item 3: one output tensor.
    """
    return _npu().npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=3, group_type=group_type, group_list_type=1
    )[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, with the mean square in fp32 as in transformers.  (..., h) -> (..., h)

    For bf16 ``x`` the product with the weight is rounded once, so a weight that bf16 can represent gives the same bits
    in fp32 and bf16.
    """
    if x.device.type == "npu" and x.dtype == weight.dtype:
        return _npu().npu_rms_norm(x, weight, eps)[0]
    if x.dtype != torch.float32:
        wide = x.float()
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)).to(x.dtype)
    if x.requires_grad or weight.requires_grad:
        return _RmsNorm.apply(x, weight, eps)
    return (x * _reciprocal_rms(x, eps)).mul_(weight)


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """1 / rms(x).  (..., h) -> (..., 1)"""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _scalar(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # as in _causal_mask
        return torch.tensor(value, device=device)


class _RmsNorm(torch.autograd.Function):
    """rms_norm in fp32. torch has no fused kernel for a CPU; with autograd over its parts, both passes take three times
    as long."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _reciprocal_rms(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:  # scale * (g - x * scale^2 * mean(g * x)), g = grad * weight
            wanted = grad * weight
            along_x = (wanted * x).sum(-1, keepdim=True).mul_(scale * scale)
            grad_x = wanted.addcmul_(x, along_x, value=-1 / x.shape[-1]).mul_(scale)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * x).mul_(scale).flatten(0, -2).sum(0)
        return grad_x, grad_weight, None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Causal attention; groups of query heads share a key/value head.  (b, heads, T, d) -> (b, heads, T, d)"""
    if query.device.type == "npu":
        return _npu().npu_fusion_attention(
            query.contiguous(), key.contiguous(), value.contiguous(), query.shape[1], "BNSD", scale=scale,
            atten_mask=_causal_mask(query.device), sparse_mode=2, keep_prob=1.0,
        )[0]  # fmt: skip
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """The mask that sparse_mode 2 needs for every T: true where a query must not attend.  -> (2048, 2048)"""
    with torch.inference_mode(False):  # the sampler may make it, and the trainer's backward pass use it
        return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half.  (..., 2 w) -> (..., w)"""
    if gate_up.device.type == "npu":
        return _npu().npu_swiglu(gate_up, dim=-1)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """swiglu(gate_up) times the probability of each row.  (N, 2 w), (N,) -> (N, w)"""
    if gate_up.device.type == "npu":  # npu_swiglu has its own backward
        return swiglu(gate_up) * probs.unsqueeze(-1).to(gate_up.dtype)
    return _WeightedSwiglu.apply(gate_up, probs)


class _WeightedSwiglu(torch.autograd.Function):
    """weighted_swiglu on a CPU or GPU. It saves only its inputs, and writes its gradient into one tensor.

    Autograd over its parts would save two more (N, w) and concatenate the gradient from two halves.
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
        torch.mul(grad, activated, out=grad_up)  # the gradient for `up` before the probability
        grad_probs = (grad_up * up).sum(-1, dtype=probs.dtype)
        weight = probs.unsqueeze(-1).to(grad.dtype)
        grad_up.mul_(weight)
        torch.ops.aten.silu_backward.grad_input((grad * up).mul_(weight), gate, grad_input=grad_gate)
        return grad_gate_up, grad_probs


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x cos + (-second, first) sin, of the two halves of each head.  (..., d) -> (..., d)

    ``x`` is (T, b, heads, d), (b, T, heads, d) or (T, heads, d); ``cos`` and ``sin`` have size 1 for b and heads.
    """
    if x.device.type == "npu":
        if x.dim() == 3:  # the kernel needs four axes
            return _npu().npu_rotary_mul(x[:, None].contiguous(), cos[:, None], sin[:, None])[:, 0]
        return _npu().npu_rotary_mul(x.contiguous(), cos, sin)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-second, first], dim=-1), sin)
