"""The factors in the dtype of the passes: computed once an update, with the gradients of the fp32 factors."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_megatron import Adapter
from parallel_setup import Factor

CPU = torch.device("cpu")
SCALE = 1.5  # alpha / R


class Conversions(TorchDispatchMode):
    """Counts the operations in its block that cast or scale."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.mul)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def adapter() -> Adapter:
    """An adapter of 3 inputs and 5 outputs with rank 2."""
    made = Adapter(2, 2 * SCALE, merges=False)
    made.A, made.B = Factor.zeros(CPU, (2, 3)), Factor.zeros(CPU, (5, 2))
    with torch.no_grad():
        for factor in (made.A, made.B):
            factor.normal_(generator=torch.Generator().manual_seed(1))
    return made


def update(adapter: Adapter, x: Tensor) -> Tensor:
    first, second = adapter.working_factors(torch.bfloat16)
    return x @ first.t() @ second.t()


def test_factors_are_cast_once_until_one_of_them_changes(adapter: Adapter) -> None:
    x = torch.ones(4, 3, dtype=torch.bfloat16)
    for change in (None, adapter.A, adapter.B):
        if change is not None:
            with torch.no_grad():
                change.add_(1)
        with Conversions() as made:
            with torch.no_grad():
                before = update(adapter, x)
            assert torch.equal(update(adapter, x), before)
        assert made.count == 2
        expected = x @ adapter.A.bfloat16().t() @ (SCALE * adapter.B).bfloat16().t()
        assert torch.equal(before, expected)


def test_factors_are_computed_again_for_another_dtype(adapter: Adapter) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        first, second = adapter.working_factors(dtype)
        assert torch.equal(first, adapter.A.to(dtype)) and torch.equal(second, (SCALE * adapter.B).to(dtype))
        assert first.dtype == second.dtype == dtype


def test_each_backward_pass_adds_its_gradient_in_fp32(adapter: Adapter) -> None:
    """Also if the factors were cast in a pass without gradients."""
    xs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)]
    with torch.no_grad():
        update(adapter, xs[0])
    for x in xs:
        update(adapter, x).float().sum().backward()
    a, b = (factor.detach().double() for factor in (adapter.A, adapter.B))
    ones, total = torch.ones(4, 5, dtype=torch.double), torch.cat(xs).double()
    for factor, expected in (
        (adapter.A, SCALE * (torch.cat([ones] * 3) @ b).t() @ total),
        (adapter.B, SCALE * torch.cat([ones] * 3).t() @ (total @ a.t())),
    ):
        assert factor.grad.dtype == torch.float32
        torch.testing.assert_close(factor.grad.double(), expected, rtol=0.02, atol=0.02)
