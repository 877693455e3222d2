"""The operations of device.py against the plainest formula for each, forward and backward.

N rows, E experts, h input width, o output width, b rows, T tokens, d head size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import device as devices


def plain_grouped(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Each row times its expert's matrix, row by row."""
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return torch.stack([row @ weight[expert] for row, expert in zip(x, expert_of_row, strict=True)])


@pytest.mark.parametrize("widths", [(16, 32), (4, 8), (5, 3), (16, 6), (2, 16)], ids=str)
@pytest.mark.parametrize("counts", [[3, 4, 5], [0, 12, 0], [12, 0, 0], [0, 0, 12], [1, 0, 11]], ids=str)
def test_grouped_mm_multiplies_each_row_by_its_experts_matrix(widths, counts):
    """The kernel takes widths of whole 16 bytes, the loop all others: (5, 3), (16, 6) and (2, 16) here."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, widths[0], generator=generator)
    weight = torch.randn(3, *widths, generator=generator)
    out_grad = torch.randn(12, widths[1], generator=generator)
    found, expected = [], []
    for operation, gradients in ((devices.grouped_mm, found), (plain_grouped, expected)):
        leaf_x, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        given = torch.tensor(counts) if operation is devices.grouped_mm else counts
        out = operation(leaf_x, leaf_weight, given)
        out.backward(out_grad)
        gradients += [out.detach(), leaf_x.grad, leaf_weight.grad]
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-5)


@pytest.mark.parametrize("widths", [(16, 32), (5, 3)], ids=str)
def test_grouped_mm_of_no_rows_is_empty_and_differentiable(widths):
    x = torch.zeros(0, widths[0], requires_grad=True)
    weight = torch.ones(3, *widths, requires_grad=True)
    out = devices.grouped_mm(x, weight, torch.zeros(3, dtype=torch.long))
    assert out.shape == (0, widths[1])
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad is None or not weight.grad.any()


def test_grouped_mm_takes_rows_that_are_not_contiguous():
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1)).t()
    weight = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(2))
    counts = [5, 0, 7]
    torch.testing.assert_close(devices.grouped_mm(x, weight, torch.tensor(counts)), plain_grouped(x, weight, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(dtype):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(50, 64, generator=generator) * 10).to(dtype)
    norm = Qwen3MoeRMSNorm(64, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator))
    found = devices.rms_norm(x, norm.weight, 1e-5)
    assert found.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(found, norm(x))  # rounded in the same places
    else:
        torch.testing.assert_close(found, norm(x), rtol=1e-6, atol=1e-6)


def test_rms_norm_of_a_bf16_weight_kept_in_fp32_has_the_same_bits():
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((50, 64), (64,)))
    found = devices.rms_norm(x, weight.float(), 1e-5)
    assert found.dtype == torch.bfloat16 and torch.equal(found, devices.rms_norm(x, weight, 1e-5))
    slightly = devices.rms_norm(x, weight.float() * 1.001, 1e-5)
    assert not torch.equal(slightly, found), "what fp32 adds to the weight is not lost before the product"


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_causal_attention_is_softmax_over_the_past(kv_heads):
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(2, 8, 5, 6, generator=generator)
    key, value = (torch.randn(2, kv_heads, 5, 6, generator=generator) for _ in range(2))
    found = devices.causal_attention(query, key, value, scale=0.3)
    for row in range(2):
        for head in range(8):
            k, v = (x[row, head // (8 // kv_heads)] for x in (key, value))
            for t in range(5):
                weights = torch.softmax(0.3 * k[: t + 1] @ query[row, head, t], 0)
                torch.testing.assert_close(found[row, head, t], weights @ v[: t + 1], rtol=1e-5, atol=1e-5)
