"""Operations that mean the same on all devices. torch computes them on a CPU or GPU, and torch_npu on an NPU.

The CPU code has run, and the CUDA code on one H200 (docs/gpu.md). The NPU code has run on imitations of the kernels of
torch_npu (tests/support/fake_npu.py), and with the real torch_npu on tensors without data (tests/machines/test_npu.py).

The models of facts/architectures.py satisfy the documented rules of these kernels, which the imitation checks at each
call. N is the number of rows, E the number of local experts, h the input width, and o the output width. In attention, b
is the number of sequences in a batch, T their length in tokens, and d the size of a head.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from facts.limits import PIECE
from hardware.quantisation import Packed

HALF = (torch.bfloat16, torch.float16)


def on_gpu(device: torch.device) -> bool:
    """Return whether ``device`` is a GPU. checks/dry_run.py replaces this function to simulate a GPU."""
    return device.type == "cuda"


def _npu():
    import torch_npu

    return torch_npu


def grouped_mm(x: Tensor, weight: Tensor, tokens_per_expert: Tensor, ends: Tensor | None = None) -> Tensor:
    """Multiply row block e of ``x`` by ``weight[e]``.  (N, h), (E, h, o), (E,) -> (N, o)

    The rows are sorted by expert. Autograd computes a weight gradient only for a weight that requires it, so frozen
    experts need no (E, h, o) gradient. ``ends`` is the cumulative sum of ``tokens_per_expert`` in int32, if the caller
    has computed it.
    """
    if x.device.type == "npu":
        if len(weight) == 1 or not len(x):  # the kernel needs at least two groups and one row
            return x @ weight[0]
        return _GroupedMatmul.apply(x, weight, tokens_per_expert.to(x.device, torch.int64))
    if len(x) and _grouped_mm_takes(weight):
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(x.device) if ends is None else ends
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    blocks = x.split(tokens_per_expert.tolist())
    return torch.cat([block @ weight[e] for e, block in enumerate(blocks)])


def quantised_grouped_mm(x: Tensor, packed: Packed, tokens_per_expert: Tensor) -> Tensor:
    """Multiply row block e of ``x`` by the transpose of the frozen int4 matrix e.  (N, in) -> (N, out)

    The forward and backward passes dequantise at most PIECE bytes at a time: some rows or columns of all experts. If a
    piece had whole matrices of some experts, the CPU would need the row counts of these experts, and would wait for the
    device. The NPU kernels that accept int4 codes have no backward pass for scales per group, so all devices multiply
    with grouped_mm.
    """
    return _QuantisedGroupedMatmul.apply(x, packed, tokens_per_expert)


class _QuantisedGroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, packed: Packed, tokens_per_expert: Tensor) -> Tensor:
        ctx.packed, ctx.tokens_per_expert = packed, tokens_per_expert
        pieces = packed.pieces(PIECE, along_out=True)
        return torch.cat([grouped_mm(x, w.dequantised().transpose(1, 2), tokens_per_expert) for w in pieces], dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad, pieces = grad.contiguous(), ctx.packed.pieces(PIECE, along_out=False)
        return torch.cat([grouped_mm(grad, w.dequantised(), ctx.tokens_per_expert) for w in pieces], dim=1), None, None


def _grouped_mm_takes(weight: Tensor) -> bool:
    """Return whether torch's kernel accepts ``weight``.

    Each row and each column must be a multiple of 16 bytes long, and on CUDA the dtype must be bf16.
    """
    aligned = all(width * weight.element_size() % 16 == 0 for width in weight.shape[1:])
    return aligned and (weight.device.type == "cpu" or weight.dtype == torch.bfloat16)


class _GroupedMatmul(torch.autograd.Function):
    """grouped_mm with torch_npu's kernel.

    MindSpeed's version also computes the gradient of frozen experts. That takes as long as the forward pass, and needs
    a tensor as large as all local experts.
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
    """Compute the grouped product with torch_npu.

    group_type 0 splits the rows of ``x`` into groups; group_type 2 sums over the rows of each group. group_list_type 1
    means that ``counts`` has the sizes of the groups, and split_item 3 that there is one output tensor.
    """
    return _npu().npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=3, group_type=group_type, group_list_type=1
    )[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight, with the mean square in fp32 as in transformers.  (..., h) -> (..., h)

    For bf16 ``x`` the product with the weight is rounded once. So a weight that bf16 can represent gives the same bits
    in fp32 and bf16.
    """
    if x.device.type == "npu" and x.dtype == weight.dtype:  # other pairs of types use the formula
        return _npu().npu_rms_norm(x, weight, eps)[0]
    if on_gpu(x.device) and x.dtype == weight.dtype:  # one kernel instead of seven
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    if x.dtype != torch.float32:
        wide = x.float()
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)).to(x.dtype)
    if x.requires_grad or weight.requires_grad:
        return _RmsNorm.apply(x, weight, eps)
    return (x * _reciprocal_rms(x, eps)).mul_(weight)


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """Compute 1 / rms(x).  (..., h) -> (..., 1)"""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _scalar(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # as in _causal_mask
        return torch.tensor(value, device=device)


class _RmsNorm(torch.autograd.Function):
    """rms_norm in fp32.

    torch has no fused kernel for a CPU. With autograd over the separate operations, both passes would take three times
    as long.
    """

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


# ------------------------------------------------------------------------------------------------ experts' rows


class Order(NamedTuple):
    """The order of the experts' rows: by expert, then by token. There are n tokens, each with k experts."""

    rows: Tensor  # (n k,) the token of each row
    inverse: Tensor  # (n, k) the rows of each token, by ascending expert


def dispatch_rows(tokens: Tensor, order: Order) -> Tensor:
    """Copy each token's row once for each of its experts, in ``order``.  (n, h) -> (n k, h)"""
    return _DispatchRows.apply(tokens, *order)


def combine_rows(rows: Tensor, order: Order) -> Tensor:
    """Sum the rows of each token in a fixed order, and round once.  (n k, h) -> (n, h)

    Megatron's scatter_add_ rounds after each row in bf16, and adds in any order on an accelerator.
    """
    return _CombineRows.apply(rows, *order)


class _DispatchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return tokens.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, ctx.inverse), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.rows = rows
        return _summed(values, inverse)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.rows), None, None


def _summed(values: Tensor, inverse: Tensor) -> Tensor:
    return values.index_select(0, inverse.flatten()).unflatten(0, inverse.shape).sum(1)


# ------------------------------------------------------------------------------------------------ attention


class Sequences(NamedTuple):
    """S sequences, concatenated. Each sequence has keys for all of its tokens, but queries only for its last tokens."""

    query_ends: Tensor  # (S + 1,) int32, from 0
    key_ends: Tensor  # (S + 1,) int32, from 0
    longest_query: int
    longest_key: int


def sequences(queries: list[int], keys: list[int], device: torch.device) -> Sequences:
    """Return the Sequences that have these numbers of ``queries`` and ``keys``."""
    query_ends, key_ends = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device) for lengths in (queries, keys)
    )
    return Sequences(query_ends, key_ends, max(queries), max(keys))


def takes_sequences(query: Tensor) -> bool:
    """Return whether sequence_attention has a kernel for ``query``: torch's flash attention, on a GPU in 16 bits.

    The head size must be a multiple of 8 and at most 256, and torch must be 2.11 or later.
    """
    d = query.shape[-1]
    return on_gpu(query.device) and query.dtype in HALF and d % 8 == 0 and d <= 256 and _varlen_attention() is not None


@functools.cache
def _varlen_attention() -> Callable[..., Tensor] | None:
    """Return torch's attention for sequences of different lengths, or None before torch 2.11.

    If there are fewer key/value heads than query heads, versions after 2.11 need a flag.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return None
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in known else varlen_attn


def sequence_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale: float) -> Tensor:
    """Compute causal attention within each sequence, without a mask or padding.

    takes_sequences must be true for ``query``. The last query of a sequence sees all of the sequence's keys. Tq and Tk
    are the numbers of queries and keys in all sequences together.

    (Tq, heads, d), (Tk, kv heads, d) twice -> (Tq, heads, d)
    """
    return _varlen_attention()(query, key, value, *sequences, scale=scale, window_size=(-1, 0))


def sortable(numbers: Tensor) -> Tensor:
    """Return integers below 2^24 in a dtype that their device can sort.

    An NPU sorts int64 on the host's CPU. So on an NPU the integers are converted to fp32, which is exact for these
    numbers, as in MindSpeed's permute (moe_utils.py).
    """
    return numbers.float() if numbers.device.type == "npu" else numbers


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index]. ``index`` may repeat a row number.  (M, ...), (K,) -> (K, ...)

    On a GPU, the gradients for the same row are summed in fp32 and in a fixed order, because index_put_ sorts the row
    numbers. The backward pass of index_select would add them in any order.
    """
    return _Take.apply(x, index) if on_gpu(x.device) else x.index_select(0, index)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.size = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        total = torch.zeros(ctx.size, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_put_((ctx.index,), grad.float(), accumulate=True).to(grad.dtype), None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute causal attention. A group of query heads may share a key/value head.

    (b, heads, T, d), (b, kv heads, T, d) twice -> (b, heads, T, d)
    """
    if query.device.type == "npu":  # sparse_mode 2: causal, aligned at the first query and key
        return _npu_attention(query, key, value, scale, _causal_mask(query.device), sparse_mode=2)
    return _torch_attention(query, key, value, scale, is_causal=True)


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, **kind: Any) -> Tensor:
    """Compute attention with torch. On a GPU each query head gets a separate copy of its keys and values.

    device.select switches off cuDNN's kernels on a GPU. Only one other kernel accepts shared key/value heads together
    with a mask or in fp32, and it stores all scores in memory.
    """
    if on_gpu(query.device):
        key, value = (_for_each_head(x, query.shape[1]) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1], **kind
    )


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for its query heads.  (b, kv heads, T, d) -> (b, heads, T, d)

    The backward pass of expand sums the gradients in a fixed order.
    """
    b, kv_heads, tokens, d = x.shape
    return x[:, :, None].expand(b, kv_heads, heads // kv_heads, tokens, d).flatten(1, 2)


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the mask that sparse_mode 2 needs, the same for every T. It is true where a query must not attend.

    -> (2048, 2048)
    """
    with torch.inference_mode(False):  # the sampler may create it, and the trainer's backward pass use it
        return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Compute attention where ``mask``, a result of attention_mask, allows it.

    Every query must see at least one key; otherwise its result is undefined. S and T are the numbers of queries and
    keys.

    (b, heads, S, d), (b, kv heads, T, d) twice, (b, 1, S, T) -> (b, heads, S, d)
    """
    if query.device.type == "npu":  # sparse_mode 0 accepts any mask; by default its band covers all keys
        return _npu_attention(query, key, value, scale, mask, sparse_mode=0)
    return _torch_attention(query, key, value, scale, attn_mask=mask.to(query.dtype))


def attention_mask(hidden: Tensor) -> Tensor:
    """Return the mask that masked_attention needs; ``hidden`` is true where a query must not attend.

    On an NPU the mask is bool. With a mask of any other dtype, torch_npu's op-plugin would compute attention by its
    formula, in fp32. On other devices it is fp32, with -inf where a query must not attend; a layer in bf16 casts it.
    """
    if hidden.device.type == "npu":
        return hidden
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _npu_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor, sparse_mode: int) -> Tensor:
    """Call torch_npu's attention kernel, which has its own backward pass."""
    return _npu().npu_fusion_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        query.shape[1],
        "BNSD",
        scale=scale,
        atten_mask=hidden,
        sparse_mode=sparse_mode,
        keep_prob=1.0,
    )[0]


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(first half) * second half.  (..., 2 w) -> (..., w)"""
    if gate_up.device.type == "npu" and gate_up.numel():  # the kernel refuses the empty tensor of experts without rows
        return _npu().npu_swiglu(gate_up.contiguous(), dim=-1)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """Compute swiglu(gate_up) times the probability of each row.  (N, 2 w), (N,) -> (N, w)"""
    if gate_up.device.type == "npu":  # npu_swiglu has its own backward pass
        return swiglu(gate_up) * probs.unsqueeze(-1).to(gate_up.dtype)
    return _WeightedSwiglu.apply(gate_up, probs)


class _WeightedSwiglu(torch.autograd.Function):
    """weighted_swiglu on a CPU or GPU. It saves only its inputs, and writes its gradient into one tensor.

    Autograd over the separate operations would save two more tensors (N, w), and join two halves of the gradient.
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
    """Compute the rotary embedding x cos + (-second, first) sin. First and second are the halves of each head.

    ``x`` is (T, b, heads, d), (b, T, heads, d) or (T, heads, d). ``cos`` and ``sin`` have size 1 for b and heads.
    The result has the shape of ``x``.
    """
    if x.device.type == "npu":
        if x.dim() == 3:  # as (T, 1, heads, d), because older versions of the kernel need four axes
            return _npu().npu_rotary_mul(x[:, None].contiguous(), cos[:, None], sin[:, None])[:, 0]
        return _npu().npu_rotary_mul(x.contiguous(), cos, sin)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-second, first], dim=-1), sin)
