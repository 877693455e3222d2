"""Compares kernels.py and the start-up of device.py on fake_npu.py with the CPU, in its own process; prints JSON."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import fake_npu
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import device as devices  # noqa: E402
import environment  # noqa: E402
import kernels  # noqa: E402

COUNTS = torch.tensor([5, 0, 7])


def operations() -> dict[str, tuple[Callable, list[Tensor]]]:
    """Name -> (function, its differentiable arguments on the CPU)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def angles(*shape: int) -> tuple[Tensor, Tensor]:
        angle = random(*shape[:-1], shape[-1] // 2).repeat(*(1 for _ in shape[:-1]), 2)
        return angle.cos(), angle.sin()

    trained = [random(5, 3, 4, 8), *angles(5, 1, 1, 8)]
    prefilled = [random(2, 5, 4, 8), *angles(1, 5, 1, 8)]
    decoded = [random(7, 4, 8), *angles(7, 1, 8)]
    return {
        "rms_norm": (lambda x, weight: kernels.rms_norm(x, weight, 1e-5), [random(6, 16), random(16)]),
        "causal_attention": (
            lambda *args: kernels.causal_attention(*args, scale=0.3),
            [random(2, 4, 7, 8), random(2, 2, 7, 8), random(2, 2, 7, 8)],
        ),
        "masked_attention": (
            lambda *args: kernels.masked_attention(*args, mask_of(args[0].device), scale=0.3),
            [random(2, 4, 3, 8), random(2, 2, 7, 8), random(2, 2, 7, 8)],
        ),
        "swiglu": (kernels.swiglu, [random(6, 12)]),
        "swiglu of a strided tensor": (lambda x: kernels.swiglu(x.t()), [random(12, 6)]),
        "weighted_swiglu, no rows": (kernels.weighted_swiglu, [random(0, 12), random(0)]),
        "rotary of the trainer": (kernels.rotary, trained),
        "rotary of a prefill": (kernels.rotary, prefilled),
        "rotary of a decode": (kernels.rotary, decoded),
        "grouped_mm": (lambda x, w: kernels.grouped_mm(x, w, COUNTS.to(x.device)), [random(12, 16), random(3, 16, 8)]),
        "grouped_mm, widths of 5 and 3": (
            lambda x, w: kernels.grouped_mm(x, w, COUNTS),
            [random(12, 5), random(3, 5, 3)],
        ),
        "grouped_mm, transposed weight": (
            lambda x, w: kernels.grouped_mm(x, w.transpose(1, 2), COUNTS),
            [random(12, 16), random(3, 8, 16)],
        ),
        "grouped_mm, one expert": (
            lambda x, w: kernels.grouped_mm(x, w, torch.tensor([12])),
            [random(12, 16), random(1, 16, 8)],
        ),
        "grouped_mm, no rows": (
            lambda x, w: kernels.grouped_mm(x, w, torch.tensor([0, 0, 0])),
            [random(0, 16), random(3, 16, 8)],
        ),
    }


def mask_of(device: torch.device) -> Tensor:
    """Of two rows, 3 own tokens after prompts of 1 and 4 tokens."""
    last_seen = torch.tensor([1, 4])[:, None, None, None] + torch.arange(3)[:, None]
    return kernels.attention_mask((torch.arange(7) > last_seen).to(device))


def apart(function: Callable, given: list[Tensor]) -> list[float]:
    """Largest differences between npu and CPU: of the result, and of the gradient of each argument."""
    found = {}
    for where in ("cpu", "npu"):
        leaves = [x.to(where).detach().requires_grad_() for x in given]
        out = function(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(where))
        assert out.device.type == where
        found[where] = [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]
    pairs = zip(found["cpu"], found["npu"], strict=True)
    return [(a - b).abs().max().item() if a.numel() else float(a.shape != b.shape) for a, b in pairs]


def patches_in_force() -> dict[str, bool]:
    """MindSpeed's patches lose a write into a view and a float64 reduction; the stand-in must lose them too."""
    columns = torch.zeros(2, 3, device="npu")
    columns.t().view(6).copy_(torch.ones(6).to("npu"))
    group, total = dist.new_group([0], backend="hccl"), torch.ones(2, device="npu", dtype=torch.float64)
    dist.all_reduce(total, group=group)
    named = "cuda" in torch.ones(1, device="npu").type()
    return {"write lost": not columns.cpu().any().item(), "no error": total.tolist() == [1.0, 1.0], "named": named}


def norms_of_two_types() -> int:
    """Number of calls of the norm's kernel with a weight of another type. Its formula serves these."""
    fake_npu.KERNELS.clear()
    for x, weight in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        kernels.rms_norm(torch.ones(4, 8, dtype=x).to("npu"), torch.ones(8, dtype=weight).to("npu"), 1e-6)
    return fake_npu.KERNELS.get("npu_rms_norm", 0)


def kernel_calls(frozen: bool) -> int:
    """Number of grouped products in one forward and backward pass."""
    x = torch.randn(12, 16).to("npu").requires_grad_()
    weight = torch.randn(3, 16, 8).to("npu").requires_grad_(not frozen)
    fake_npu.KERNELS.clear()
    kernels.grouped_mm(x, weight, COUNTS).sum().backward()
    return fake_npu.KERNELS["npu_grouped_matmul"]


def refusals() -> dict[str, str]:
    """Attempt -> the message with which it is refused."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], backend="hccl")
    on_npu = torch.ones(4, device="npu")
    mask = torch.ones(4, 4, dtype=torch.bool, device="npu").triu(1)
    heads = torch.ones(1, 2, 4, 8, device="npu")
    attend = sys.modules["torch_npu"].npu_fusion_attention
    attempts = {
        "two devices": lambda: on_npu + torch.ones(4),
        "float64 reduction": lambda: group.allreduce([on_npu.double()]),  # dist.all_reduce is patched, see fake_npu.py
        "CPU tensor over hccl": lambda: dist.all_reduce(torch.ones(4), group=group),
        "npu tensor over the world": lambda: dist.all_reduce(on_npu),
        "numpy": lambda: on_npu.numpy(),
        "own mask": lambda: attend(heads, heads, heads, 2, "BNSD", atten_mask=mask, sparse_mode=2),
        "Megatron first": lambda: megatron_first(),
        "transformers first": lambda: transformers_first(),
        "third of two devices": lambda: third_of_two(),
        "contradiction": lambda: contradiction(),
    }
    return {name: _message(attempt) for name, attempt in (attempts | refused_tensors()).items()}


def refused_tensors() -> dict[str, Callable]:
    """Calls of kernels.py with tensors that an NPU refuses, though the meta kernels of torch_npu take them."""

    def npu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(*shape, device="npu", dtype=dtype)

    counts, half = torch.tensor([2, 2], device="npu"), torch.bfloat16
    heads, mask = npu(1, 4, 4, 8), npu(1, 1, 4, 4, dtype=torch.bool)
    angles = npu(4, 1, 1, 8)

    def grouped(x: Tensor, weight: Tensor, counts: Tensor = counts) -> Callable:
        return lambda: kernels.grouped_mm(x, weight, counts)

    def attend(query: Tensor = heads, key: Tensor = heads, value: Tensor = heads, scale: float = 1.0) -> Callable:
        return lambda: kernels.causal_attention(query, key, value, scale=scale)

    def masked(mask: Tensor) -> Callable:
        return lambda: kernels.masked_attention(heads, heads, heads, mask, scale=1.0)

    def rotary(x: Tensor, cos: Tensor = angles) -> Callable:
        return lambda: kernels.rotary(x, cos, cos)

    return {
        "grouped: inner sizes": grouped(npu(4, 8), npu(2, 6, 8)),
        "grouped: two types": grouped(npu(4, 8, dtype=half), npu(2, 8, 8)),
        "grouped: int32 list": lambda: kernels._npu_grouped(npu(4, 8), npu(2, 8, 8), counts.int()),
        "grouped: sizes of other groups": grouped(npu(4, 8), npu(3, 8, 8)),
        "grouped: 1025 groups": grouped(npu(4, 1), npu(1025, 1, 1), torch.zeros(1025, dtype=torch.long).to("npu")),
        "grouped: width of 65536": grouped(npu(4, 1), npu(2, 1, 65536)),
        "grouped: sum of the sizes": grouped(npu(5, 8), npu(2, 8, 8)),
        "norm: another weight": lambda: kernels.rms_norm(npu(4, 8), npu(4), 1e-6),
        "norm: one axis": lambda: kernels.rms_norm(npu(8), npu(8), 1e-6),
        "swiglu: odd width": lambda: kernels.swiglu(npu(4, 7)),
        "attention: two types": attend(query=npu(1, 4, 4, 8, dtype=half)),
        "attention: head size of 769": attend(*(npu(1, 4, 4, 769),) * 3),
        "attention: 257 heads": attend(*(npu(1, 257, 4, 8),) * 3),
        "attention: 4 heads on 3": attend(key=npu(1, 3, 4, 8), value=npu(1, 3, 4, 8)),
        "attention: other batch": attend(query=npu(2, 4, 4, 8)),
        "attention: no rows": attend(*(npu(0, 4, 4, 8),) * 3),
        "mask: fp32": masked(mask.float()),
        "mask: of other keys": masked(mask[..., :3]),
        "mask: a query without keys": masked(mask),
        "rotary: odd head size": rotary(npu(4, 1, 2, 7), npu(4, 1, 1, 7)),
        "rotary: head size of 896": rotary(npu(4, 1, 2, 896), npu(4, 1, 1, 896)),
        "rotary: angles of each head": rotary(npu(4, 1, 2, 8), npu(4, 1, 2, 8)),
        "rotary: two types": rotary(npu(4, 1, 2, 8, dtype=half)),
        "rotary: batch of 1000": rotary(npu(4, 1000, 2, 8)),
        "rotary: 1000 heads": rotary(npu(4, 1, 1000, 8)),
    }


def megatron_first() -> None:
    sys.modules["megatron.core"] = types.ModuleType("megatron.core")
    try:
        devices.adapt(torch.device("npu"))
    finally:
        del sys.modules["megatron.core"]


def transformers_first() -> None:
    mindspeed = types.ModuleType("mindspeed")
    mindspeed.__spec__ = importlib.machinery.ModuleSpec("mindspeed", None)
    sys.modules |= {"mindspeed": mindspeed, "transformers": types.ModuleType("transformers")}
    try:
        devices.adapt(torch.device("npu"))
    finally:
        del sys.modules["mindspeed"], sys.modules["transformers"]


def third_of_two() -> None:
    os.environ |= {"LOCAL_RANK": "2", "ASCEND_RT_VISIBLE_DEVICES": "4,5"}
    try:
        devices.select(torch.device("npu"))
    finally:
        del os.environ["LOCAL_RANK"], os.environ["ASCEND_RT_VISIBLE_DEVICES"]


def contradiction() -> None:
    os.environ["HCCL_DETERMINISTIC"] = "false"
    try:
        devices.set_environment("npu", deterministic=True)
    finally:
        del os.environ["HCCL_DETERMINISTIC"]


def _message(attempt: Callable) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main() -> None:
    fake_npu.install()
    answers = {
        "auto": str(devices.resolve("auto")),
        "apart": {name: apart(*operation) for name, operation in operations().items()},
        "calls": {"frozen": kernel_calls(True), "trained": kernel_calls(False), "norms": norms_of_two_types()},
        "refused": refusals(),
    }
    answers["patches"] = patches_in_force()
    devices.set_environment("npu", deterministic=True)
    devices.make_deterministic(torch.device("npu"))
    answers["variables"] = {v.name: os.environ.get(v.name) for v in environment.DETERMINISTIC["npu"]}
    answers["deterministic"] = torch.are_deterministic_algorithms_enabled()
    answers["buffers"] = {
        name: getattr(devices.group_options(torch.device("npu"), name), "hccl_config", None) for name in ("tp", "pp")
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
