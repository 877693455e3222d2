"""Operations of kernels.py and hardware/device.py: exact sums, norms as in transformers, and the start of a device.

tests/on_device/test_operators.py compares every operation with its formula.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from facts.exits import InputError
from hardware import device as devices
from hardware import kernels

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("num_tokens", "num_experts", "experts_per_token"), [(9, 8, 3), (1, 5, 5), (40, 4, 1)])
def test_rows_are_sorted_by_expert_and_then_by_token(num_tokens, num_experts, experts_per_token):
    """Equal to the last bit, gradients too: the gradients of the rows are whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(num_tokens, 6, generator=generator, requires_grad=True)
    probs = torch.rand(num_tokens, num_experts, generator=generator, requires_grad=True)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(experts_per_token).indices
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)
    pairs = [(e, n) for e in range(num_experts) for n in range(num_tokens) if e in chosen[n]]
    of_expert, of_token = torch.tensor(pairs).unbind(1)

    rows, row_probs, order = devices._permute(tokens, routing_map, probs, num_tokens * experts_per_token)
    assert order.rows.tolist() == of_token.tolist()
    assert order.inverse.tolist() == [
        [i for i, (_, token) in enumerate(pairs) if token == n] for n in range(num_tokens)
    ]
    out_grads = [torch.randint(-9, 9, x.shape, generator=generator).float() for x in (rows, row_probs)]
    found = torch.autograd.grad([rows, row_probs], [tokens, probs], out_grads)
    expected = tokens[of_token], probs[of_token, of_expert]
    for mine, true in zip((rows, row_probs), expected, strict=True):
        assert torch.equal(mine, true)
    for mine, true in zip(found, torch.autograd.grad(expected, [tokens, probs], out_grads), strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_experts", "experts_per_token", "width"), [(7, 8, 2, 64), (33, 64, 8, 128)])
def test_the_rows_of_a_token_are_summed_with_one_rounding(dtype, num_tokens, num_experts, experts_per_token, width):
    """The sum is fp64's, rounded, but for the roundings of a sum in fp32. On a CPU the bits are those of Megatron's
    index_add_, and the gradient of the dispatched rows is such a sum, too."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(experts_per_token).indices
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)
    tokens = torch.randn(num_tokens, width, generator=generator).to(dtype).requires_grad_()
    dispatched, _, order = devices._permute(tokens, routing_map, routing_map.float(), chosen.numel())
    values = torch.randn(chosen.numel(), width, generator=generator).to(dtype).requires_grad_()
    summed, zeros = kernels.combine_rows(values, order), torch.zeros(num_tokens, width, dtype=dtype)
    exact = torch.zeros(num_tokens, width, dtype=torch.float64).index_add_(0, order.rows, values.detach().double())
    bound = 2**-8 * exact.abs() if dtype == torch.bfloat16 else 0.0  # half of the spacing of bf16
    assert ((summed.double() - exact).abs() <= bound + 1e-5).all()
    assert torch.equal(summed, zeros.index_add(0, order.rows, values.detach()))

    summed.backward(tokens.detach())
    assert torch.equal(values.grad, dispatched)
    dispatched.backward(values.detach())
    assert torch.equal(tokens.grad, zeros.index_add(0, order.rows, values.detach()))


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
        in_fp32 = kernels.rms_norm(x, norm.weight.float(), 1e-5)
        assert in_fp32.dtype == dtype and torch.equal(in_fp32, found)
    else:
        torch.testing.assert_close(found, norm(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(50, 64), (7, 3, 4, 16)], ids=["hidden states", "heads"])
def test_gradients_of_rms_norm_are_those_of_its_formula_in_float64(shape):
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(shape, generator=generator) * 10 for _ in range(2))
    x[0] = 0  # a row of zeros: only eps keeps the result finite
    weight = torch.randn(shape[-1], generator=generator)
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight)]
    kernels.rms_norm(*leaves, 1e-5).backward(grad)
    exact = [leaf.double().requires_grad_() for leaf in (x, weight)]
    (exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[1]).backward(grad.double())
    for one, other in zip(leaves, exact, strict=True):
        true = other.grad.float()
        torch.testing.assert_close(one.grad, true, rtol=1e-5, atol=1e-5 * float(true.abs().mean()))


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


def test_deterministic_sets_what_is_unset_and_refuses_the_contrary(monkeypatch):
    # The user's value, which is as good as ours, is kept.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "THP_MEM_ALLOC_ENABLE": "0"}
    monkeypatch.setattr(os, "environ", environment)
    asked = dict(environment)
    devices.set_environment("auto", deterministic=False)
    devices.make_deterministic(torch.device("cpu"))
    assert environment == asked and not torch.are_deterministic_algorithms_enabled()
    devices.set_environment("cuda", deterministic=True)
    assert environment == asked | {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    environment["NCCL_ALGO"] = "Tree"
    with pytest.raises(InputError, match="NCCL_ALGO is Tree in the environment; needed: Ring, or unset"):
        devices.set_environment("auto", deterministic=True)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_a_profiler_watches_the_host_and_its_device(kind, monkeypatch):
    """With the names of torch.profiler and of torch_npu.profiler; neither CUDA nor an NPU is here."""
    activities = SimpleNamespace(CPU="host", CUDA="gpu", NPU="chip")
    module = SimpleNamespace(profile=lambda activities: activities, ProfilerActivity=activities)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(profiler=module))
    monkeypatch.setattr(torch, "profiler", module if kind != "npu" else None)
    watched = {"cpu": ["host"], "cuda": ["host", "gpu"], "npu": ["host", "chip"]}[kind]
    assert devices.profiler(SimpleNamespace(type=kind)) == watched


IMPORT = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
from hardware import device
compiler = torch.compile
device.import_megatron(torch.device("cpu"))
import megatron.core
assert torch.compile is compiler
version = megatron.core.__version__.partition("+")[0]
print(version, *(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules))
"""


@pytest.mark.ci
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_importing_megatron_leaves_torchs_compiler_alone(version, request):
    """The compiler would take more time than all other imports."""
    new = [request.getfixturevalue("new_megatron")] if version == "0.19.2" else []
    path = os.pathsep.join(map(str, [ROOT, *new]))
    command, environment = [sys.executable, "-c", IMPORT], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [version]


def test_a_gpu_is_selected_without_the_attention_of_cudnn(monkeypatch) -> None:
    """Its backward pass returns NaN at some shapes (pytorch issue 196678)."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    devices.select(torch.device("cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
