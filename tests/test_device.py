"""The operations of kernels.py against the plain formula of each, forward and backward.

N rows, E experts, h input width, o output width, b rows, T tokens, d head size.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import device as devices
import kernels
from input_files import InputError

ROOT = Path(__file__).parents[1]


def plain_grouped(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Each row times the matrix of its expert, row by row."""
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return torch.stack([row @ weight[expert] for row, expert in zip(x, expert_of_row, strict=True)])


@pytest.mark.parametrize("widths", [(16, 32), (4, 8), (5, 3), (16, 6), (2, 16)], ids=str)
@pytest.mark.parametrize("counts", [[3, 4, 5], [0, 12, 0], [12, 0, 0], [0, 0, 12], [1, 0, 11]], ids=str)
def test_grouped_mm_multiplies_each_row_by_its_experts_matrix(widths, counts):
    """The kernel takes multiples of 16 bytes as widths, the loop all others: here (5, 3), (16, 6) and (2, 16)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, widths[0], generator=generator)
    weight = torch.randn(3, *widths, generator=generator)
    out_grad = torch.randn(12, widths[1], generator=generator)
    found, expected = [], []
    for operation, gradients in ((kernels.grouped_mm, found), (plain_grouped, expected)):
        leaf_x, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        given = torch.tensor(counts) if operation is kernels.grouped_mm else counts
        out = operation(leaf_x, leaf_weight, given)
        out.backward(out_grad)
        gradients += [out.detach(), leaf_x.grad, leaf_weight.grad]
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-5)


@pytest.mark.parametrize("widths", [(16, 32), (5, 3)], ids=str)
def test_grouped_mm_of_no_rows_is_empty_and_differentiable(widths):
    x = torch.zeros(0, widths[0], requires_grad=True)
    weight = torch.ones(3, *widths, requires_grad=True)
    out = kernels.grouped_mm(x, weight, torch.zeros(3, dtype=torch.long))
    assert out.shape == (0, widths[1])
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad is None or not weight.grad.any()


def test_grouped_mm_takes_rows_that_are_not_contiguous():
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1)).t()
    weight = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(2))
    counts = [5, 0, 7]
    torch.testing.assert_close(kernels.grouped_mm(x, weight, torch.tensor(counts)), plain_grouped(x, weight, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(dtype):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(50, 64, generator=generator) * 10).to(dtype)
    norm = Qwen3MoeRMSNorm(64, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator))
    found = kernels.rms_norm(x, norm.weight, 1e-5)
    assert found.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(found, norm(x))  # rounded at the same places
    else:
        torch.testing.assert_close(found, norm(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trained", ["input", "weight", "input and weight"])
@pytest.mark.parametrize("shape", [(50, 64), (7, 3, 4, 16)], ids=["hidden states", "heads"])
def test_gradients_of_rms_norm_are_those_of_its_formula_in_float64(shape, trained):
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(shape, generator=generator) * 10 for _ in range(2))
    x[0] = 0  # a row of zeros: only eps keeps the result finite
    inputs = [x, torch.randn(shape[-1], generator=generator)]
    wanted = [name in trained for name in ("input", "weight")]

    def gradients(norm, dtype: torch.dtype) -> list:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
        norm(*leaves).backward(grad.to(dtype))
        return [leaf.grad for leaf in leaves]

    def formula(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    found = gradients(lambda x, weight: kernels.rms_norm(x, weight, 1e-5), torch.float32)
    expected = gradients(formula, torch.float64)
    for one, other, want in zip(found, expected, wanted, strict=True):
        assert (one is not None) == want
        if want:
            torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5 * float(other.abs().mean()))


def test_rms_norm_of_a_bf16_weight_kept_in_fp32_has_the_same_bits():
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((50, 64), (64,)))
    found = kernels.rms_norm(x, weight.float(), 1e-5)
    assert found.dtype == torch.bfloat16 and torch.equal(found, kernels.rms_norm(x, weight, 1e-5))
    slightly = kernels.rms_norm(x, weight.float() * 1.001, 1e-5)
    assert not torch.equal(slightly, found), "what fp32 adds to the weight is not lost before the product"


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_causal_attention_is_softmax_over_the_past(kv_heads):
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(2, 8, 5, 6, generator=generator)
    key, value = (torch.randn(2, kv_heads, 5, 6, generator=generator) for _ in range(2))
    found = kernels.causal_attention(query, key, value, scale=0.3)
    for row in range(2):
        for head in range(8):
            k, v = (x[row, head // (8 // kv_heads)] for x in (key, value))
            for t in range(5):
                weights = torch.softmax(0.3 * k[: t + 1] @ query[row, head, t], 0)
                torch.testing.assert_close(found[row, head, t], weights @ v[: t + 1], rtol=1e-5, atol=1e-5)


def test_swiglu_gates_the_second_half_with_the_first():
    gate_up = torch.randn(5, 8, generator=torch.Generator().manual_seed(5))
    gate, up = gate_up[:, :4], gate_up[:, 4:]
    torch.testing.assert_close(kernels.swiglu(gate_up), gate / (1 + torch.exp(-gate)) * up)


def test_rotary_turns_each_pair_by_its_angle():
    """Element i of the first half and element i of the second half are a point in the plane."""
    generator = torch.Generator().manual_seed(6)
    x, angle = torch.randn(2, 5, 3, 8, generator=generator), torch.randn(1, 5, 1, 4, generator=generator)
    doubled = torch.cat([angle, angle], -1)
    found = kernels.rotary(x, doubled.cos(), doubled.sin())
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], -1))


# ------------------------------------------------------------------------------------------------ start-up


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("npu", "device: npu: torch_npu is not installed; needed: requirements/npu.txt"),
        ("cuda", r"device: cuda: torch .* has no CUDA|sees no GPU"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(name, words):
    with pytest.raises(InputError, match=words):
        devices.resolve.__wrapped__(name)  # not from the cache


def test_deterministic_changes_nothing_on_a_cpu(monkeypatch):
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    devices.set_environment("cpu", deterministic=True)
    devices.make_deterministic(torch.device("cpu"))
    assert environment == {"THP_MEM_ALLOC_ENABLE": "1"} and not torch.are_deterministic_algorithms_enabled()


def test_deterministic_sets_what_is_unset_and_refuses_the_contrary(monkeypatch):
    environment = {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "THP_MEM_ALLOC_ENABLE": "0",
    }  # the user's value, which is as good as ours, is kept
    monkeypatch.setattr(os, "environ", environment)
    asked = dict(environment)
    devices.set_environment("auto", deterministic=False)
    assert environment == asked
    devices.set_environment("cuda", deterministic=True)
    assert environment == asked | {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    environment["NCCL_ALGO"] = "Tree"
    with pytest.raises(InputError, match="NCCL_ALGO is Tree in the environment; needed: Ring, or unset"):
        devices.set_environment("auto", deterministic=True)


IMPORT = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch, device
compiler = torch.compile
device.import_megatron(torch.device("cpu"))
import megatron.core
assert torch.compile is compiler
print(megatron.core.__version__, *(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules))
"""


@pytest.mark.parametrize("version", ["0.16.1", "0.12.1"])
def test_importing_megatron_leaves_torchs_compiler_alone(version, request):
    """The compiler would take more time than all other imports."""
    old = [request.getfixturevalue("old_megatron")] if version == "0.12.1" else []
    path = os.pathsep.join(map(str, [ROOT, *old]))
    command, environment = [sys.executable, "-c", IMPORT], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [version]
