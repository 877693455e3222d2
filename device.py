"""The one file that knows which device the code runs on: backend, fused operations, and what Megatron needs on a CPU.

Only the CPU has been run. Megatron-core 0.12 and 0.16 assume CUDA in a dozen places; `before_megatron` and
`after_megatron` redirect exactly those, and only where there is no accelerator.
N rows, E local experts, h input width, o output width.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from config import InputError


def resolve(name: str) -> torch.device:
    """The device for `device: auto | cpu | cuda | npu`. Raises InputError for what has not been built yet."""
    if name in ("cuda", "npu"):
        raise InputError(f"device: {name} is not supported yet; only cpu has been run (use device: cpu)")
    return torch.device("cpu")


def backend(device: torch.device) -> str:
    """The torch.distributed backend that moves this device's tensors."""
    return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device.type]


# ------------------------------------------------------------------------------------------------ operations


def grouped_mm(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Row block e of ``x`` times ``weight[e]``.  (N, h), (E, h, o), (E,) -> (N, o)

    Rows are sorted by expert. Autograd forms a weight gradient only for a weight that requires one, so frozen
    experts cost no (E, h, o) gradient.
    """
    if _grouped_mm_takes(weight) and len(x):
        ends = tokens_per_expert.cumsum(0).to(device=x.device, dtype=torch.int32)
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    blocks = x.split(tokens_per_expert.tolist())
    return torch.cat([block @ weight[e] for e, block in enumerate(blocks)])


def _grouped_mm_takes(weight: Tensor) -> bool:
    # The kernel wants every row of every operand to start on a 16-byte boundary.
    return all(width * weight.element_size() % 16 == 0 for width in weight.shape[1:])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, the mean square taken in fp32 as transformers does.  (..., h) -> (..., h)

    An fp32 weight on bf16 ``x``: one rounding, so a weight that bf16 holds gives the same bits in either dtype.
    """
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)).to(x.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, the key/value heads shared by groups of query heads.  (b, heads, T, d) -> (b, heads, T, d)"""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


# ------------------------------------------------------------------------------------------------ Megatron on a CPU


class _NoStream:
    """Stands in for torch.cuda.Stream and Event: every method does nothing and returns the object itself."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def before_megatron() -> None:
    """Redirect the torch.cuda calls that megatron.core makes while it is imported or built. A no-op with CUDA."""
    if torch.cuda.is_available():
        return
    no_stream = _NoStream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = lambda *args: no_stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all, and so itself for ever.
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def after_megatron() -> None:
    """Correct what megatron.core binds at import: RNG state, split sizes as numpy, and gathers that gloo lacks."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads this name without importing it when there is no TE
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available() or getattr(mappings._gather_along_first_dim, "padded", False):
        return
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # all_to_all_single takes no tensors as split sizes; Megatron converts them only when they are CUDA tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    even_gather = mappings._gather_along_first_dim

    def gather(x, group=None, output_split_sizes=None, use_global_buffer=False):
        """gloo has no all-gather of unequal shares (expert_tensor > 1): pad each to the longest, then cut."""
        if output_split_sizes is None:
            return even_gather(x, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: len(x)] = x
        out = x.new_empty((len(sizes) * max(sizes), *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(out, padded, group=group)
        return torch.cat([share[:size] for share, size in zip(out.split(max(1, max(sizes))), sizes, strict=False)])

    gather.padded = True
    mappings._gather_along_first_dim = gather
