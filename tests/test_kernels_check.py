"""checks/kernels_check.py names a slightly wrong operator with its dtype and pass.

Sound ones pass in tests/on_device/test_operators.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path

import operators
import pytest
import torch
from gpu_attention import FORMS, as_on_a_gpu
from planting import after
from torch import Tensor

from checks import kernels_check
from checks.kernels_check import Case
from hardware import kernels
from inputs import hf_config
from inputs.config import load_config

CONFIGS = Path(__file__).parents[1] / "configs"
CPU = torch.device("cpu")
SMALL = ["optim.tokens_per_micro_batch=352", "rollout.max_new_tokens=24"]  # 4 rows of 88 tokens


def small_cases(quantisation: str = "none") -> list[Case]:
    cfg = load_config(CONFIGS / "tiny_cpu.yaml", [*SMALL, f"model.quantisation={quantisation}"])
    return operators.cases(cfg, hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0], 2, seed=0)


def table() -> dict[tuple[str, str], list[str]]:
    """(operator, dtype) -> which passes are wrong."""
    results = [result for case in small_cases() for result in kernels_check.check_operator(case, CPU, 0)]
    return {(row["operator"], row["dtype"]): row["wrong"] for row in kernels_check.summary(results)}


def test_every_operator_of_kernels_is_checked() -> None:
    functions = inspect.getmembers(kernels, inspect.isfunction)
    public = {name for name, f in functions if not name.startswith("_") and f.__module__ == kernels.__name__}
    checked = {case.name.split()[0] for case in [*small_cases(), *small_cases("int4")]}
    assert public - {"attention_mask", "sequences"} - {"on_gpu", "takes_sequences"} == checked  # arguments; questions


@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_takes_the_attention_of_sequences(form: str, monkeypatch) -> None:
    """The operator of a GPU, with its formula in place of the kernel, against the formula with a mask."""
    as_on_a_gpu(monkeypatch, form)
    taken = after(kernels, "sequence_attention", lambda out, *_: calls.append(out.shape) or out)
    calls: list[torch.Size] = []
    taken(monkeypatch)
    assert not any(table()[operator, "fp32"] for operator in ("sequence_attention", "masked_attention", "take"))
    assert calls


@pytest.mark.parametrize(
    ("dtype", "roundings", "terms", "expected"),
    [  # half an epsilon is 2^-8 in bf16 and 2^-24 in fp32; INSIDE adds 8 roundings in fp32
        (torch.bfloat16, 2, 64, 2 * 2**-8 + (8 + 8) * 2**-24),
        (torch.float32, 3, 1, (3 + 1 + 8) * 2**-24),
    ],
)
def test_tolerance_follows_from_epsilon_and_the_length_of_the_sum(dtype, roundings, terms, expected) -> None:
    assert math.isclose(kernels_check.tolerance(dtype, roundings, terms), expected, rel_tol=1e-12)


class _Scaled(torch.autograd.Function):
    """Multiplies the answer by ``forward`` and the gradient by ``backward``."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor, None, None


def off(real: Callable[..., Tensor], dtype: torch.dtype, forward: float, backward: float) -> Callable[..., Tensor]:
    """``real``, but in ``dtype`` its answer is multiplied by ``forward`` and its gradients by ``backward``."""

    def faulty(x: Tensor, *args, **kwargs) -> Tensor:
        out = real(x, *args, **kwargs)
        return _Scaled.apply(out, forward, backward) if x.dtype == dtype else out

    return faulty


@pytest.mark.parametrize(
    "operator",
    [
        "rms_norm",
        "causal_attention",
        "masked_attention",
        "swiglu",
        "weighted_swiglu",
        "rotary",
        "grouped_mm",
        "quantised_grouped_mm",
        "dispatch_rows",
        "combine_rows",
        "take",
    ],
)
@pytest.mark.parametrize(
    ("dtype", "which", "forward", "backward"),
    [
        ("bf16", "forward", 1.03, 1.0),
        ("bf16", "backward", 1.0, 0.97),
        ("fp32", "forward", 1 + 2e-5, 1.0),
        ("fp32", "backward", 1.0, -1.0),
    ],
)
def test_an_operator_that_is_off_is_named_with_its_dtype_and_pass(
    operator, dtype, which, forward, backward, monkeypatch
) -> None:
    real = getattr(kernels, operator)
    monkeypatch.setattr(kernels, operator, off(real, kernels_check.devices.DTYPES[dtype], forward, backward))
    every = small_cases("int4" if operator == "quantised_grouped_mm" else "none")
    mine = [case for case in every if case.name.startswith(operator)]
    rows = kernels_check.summary([result for case in mine for result in kernels_check.check_operator(case, CPU, 3)])
    assert {(row["dtype"], *row["wrong"]) for row in rows} == {(dtype, which), ("bf16" if dtype == "fp32" else "fp32",)}
    text = kernels_check.as_text(rows)
    assert f"WRONG: {which}, on rank 3" in text and text.count("WRONG") == len(mine)


def test_one_wrong_row_or_number_is_enough(monkeypatch) -> None:
    (case,) = [case for case in small_cases() if case.name == "grouped_mm (fc2)"]
    real = kernels.grouped_mm
    for spoil in (lambda row: row.mul(1.02), lambda row: row.masked_fill(torch.arange(len(row)) == 5, math.nan)):

        def faulty(*args, spoil=spoil) -> Tensor:
            out = real(*args)
            return torch.cat([out[:17], spoil(out[17])[None], out[18:]])

        monkeypatch.setattr(kernels, "grouped_mm", faulty)
        assert all("forward" in result["wrong"] for result in kernels_check.check_operator(case, CPU, 0))


def test_an_operator_that_refuses_its_input_is_named_and_the_others_are_still_checked(monkeypatch) -> None:
    def refuse(*args, **kwargs) -> Tensor:
        raise RuntimeError("npu_rotary_mul: unsupported\nmore")

    monkeypatch.setattr(kernels, "rotary", refuse)
    rows = kernels_check.summary([r for case in small_cases() for r in kernels_check.check_operator(case, CPU, 1)])
    errors = {row["operator"]: row["error"] for row in rows if row["wrong"]}
    assert errors == {"rotary": "npu_rotary_mul: unsupported"} and len(rows) == 30
    assert "WRONG: forward and backward, on rank 1 (npu_rotary_mul: unsupported)" in kernels_check.as_text(rows)


def test_gradients_that_a_frozen_weight_does_not_need_are_not_asked_for() -> None:
    trained = {case.name: case.trained for case in small_cases()}
    assert trained["grouped_mm (fc1)"] == ("x",) and trained["grouped_mm (LoRA A)"] == ("x", "weight")
