"""The start and the memory of a device, and experts in 4 bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lora_reference
import pytest
import reference
import torch
import world
from adapted import load
from measured import measure_quantised
from safetensors.torch import load_file, save_file
from saved import config_in
from tiers import asked, ci, nightly
from torch import Tensor

from facts.exits import InputError
from facts.limits import INT4_GROUP
from hardware import device as devices
from hardware import kernels, quantisation
from parallel_setup import Parallel
from run import run
from runlog.log import RunLog
from runlog.progress import Heartbeat, StepTimer

# --------------------------------------------------------------------------------------------------------------- device
# Operations of kernels.py and hardware/device.py: exact sums, norms as in transformers, and the start of a device.
#
# tests/machines/on_device/test_operators.py compares every operation with its formula.

ROOT = Path(__file__).parents[3]


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
    x[0] = 0  # only eps keeps the result finite
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


# ------------------------------------------------------------------------------------------------ start-up


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("npu", "device: npu: torch_npu is not installed; install requirements/npu.txt"),
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
    with pytest.raises(InputError, match="NCCL_ALGO is Tree in the environment; set it to Ring, or unset it"):
        devices.set_environment("auto", deterministic=True)


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
print(version, *(name for name in sys.argv[1:] if name in sys.modules))
import torch.distributed.fsdp
from torch.distributed._tensor import DTensor
print(DTensor.__name__, torch.distributed.fsdp.fully_shard.__name__)
"""


COMPILER, DISTRIBUTED_TENSORS = ("torch._dynamo", "torch._inductor"), ("torch.distributed.tensor", "sympy")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("version", "slow"), [("0.16.1", [*COMPILER, *DISTRIBUTED_TENSORS]), nightly("0.19.2", COMPILER)]
)
def test_importing_megatron_leaves_slow_parts_of_torch_alone(version, slow, request):
    """They would take more time than all other imports. Who imports distributed tensors later gets the real ones.

    Megatron 0.19.2 also imports torch's checkpoints, which need them.
    """
    new = [request.getfixturevalue("new_megatron")] if version == "0.19.2" else []
    path = os.pathsep.join(map(str, [ROOT, *new]))
    command, environment = [sys.executable, "-c", IMPORT, *slow], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [version, "DTensor fully_shard"]


def test_a_gpu_is_selected_without_the_attention_of_cudnn(monkeypatch) -> None:
    """Its backward pass returns NaN at some shapes (pytorch issue 196678)."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    devices.select(torch.device("cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# -------------------------------------------------------------------------------------------------------- device memory


def test_memory_in_use_is_torchs_peak_plus_memory_outside_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = []
    module = SimpleNamespace(
        mem_get_info=lambda: (40 * 2**30, 61 * 2**30),  # 21 GiB are taken, 16 of them by torch's pool
        memory_reserved=lambda: 16 * 2**30,
        max_memory_allocated=lambda: 12 * 2**30,
        reset_peak_memory_stats=lambda: reset.append(1),
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    assert devices.peak_memory_gib(SimpleNamespace(type="npu")) == 17.0 and reset == [1]
    assert devices.peak_memory_gib(torch.device("cpu")) is None


def test_a_step_has_the_peak_of_its_fullest_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([3.0, 1.0, 4.0, 5.5, 2.0])
    monkeypatch.setattr(devices, "peak_memory_gib", lambda device: next(peaks))
    monkeypatch.setattr(devices, "moment", lambda device: 0.0)
    heartbeat = Heartbeat(0, RunLog(config_in(tmp_path), 0))
    timer = StepTimer(heartbeat, 0, torch.device("meta"))
    for phase in ("sync", "generate", "update", "update"):
        timer.end_phase(phase)
    heartbeat.stop()
    assert timer.peaks == {"between_steps": 3.0, "sync": 1.0, "generate": 4.0, "update": 5.5}
    assert timer.peak() == (5.5, "update")
    assert run.device_memory((5.5, "update")) == {"perf/peak_device_gib": 5.5, "perf/peak_device_phase": "update"}
    monkeypatch.undo()
    assert StepTimer(heartbeat, 0, torch.device("cpu")).peak() == () and run.device_memory(()) == {}


def test_a_phase_ends_when_the_device_has_done_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is done at once; the device ends its work after 1, 3, 6 and 10 s, and the step after 15 s."""
    times = iter([0.0, 1e3, 3e3, 6e3, 10e3, 15e3])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = next(times)

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: Event) -> float:
            return later.time - self.time

    monkeypatch.setattr(torch, "npu", SimpleNamespace(Event=Event), raising=False)
    monkeypatch.setattr(devices, "peak_memory_gib", lambda device: None)
    timer = StepTimer(Heartbeat(0, RunLog(config_in(tmp_path), 0)), 0, SimpleNamespace(type="npu"))
    for phase in ("sync", "reference", "update", "reference"):
        timer.end_phase(phase)
    timing = timer.timing(new_tokens=30)
    seconds = {"timing/sync_s": 1, "timing/reference_s": 2 + 4, "timing/update_s": 3, "timing/step_s": 15}
    assert timing == seconds | {"perf/tokens_per_s": 2}


# --------------------------------------------------------------------------------------------------------------- 4 bits

LAYOUTS = ["TP2_EP2_DP2", ci("TP1"), nightly("EP2_DP4")]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
TOLERANCE = 1e-4  # of a gradient, relative to its largest element
SIZES = {"moe_intermediate_size": 128}  # a quarter of it is a whole group


# ---------------------------------------------------------------- the format


def packed_by_compressed_tensors(weight: Tensor) -> dict[str, Tensor]:
    """Codes and scales of a matrix by the package compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=INT4_GROUP)
    groups = weight.unflatten(-1, (-1, INT4_GROUP))
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, None)
    codes = quantize(x=weight, scale=scales, zero_point=None, args=args, dtype=torch.int8)
    return {"codes": pack_to_int32(codes, 4), "scales": scales}


def edges(dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices at the ends of what a scale can be: zero as a whole or in part, denormal, near to zero, and large."""
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    mixed = 0.05 * weight
    mixed[3], mixed[5, :64] = 0, 0
    mixed[7, ::2] *= 1000
    mixed[9, :16] = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0] * 2)
    found = {"zero": 0 * weight.abs(), "-0": -0.0 * weight.abs(), "zeros in part": mixed}
    found |= {f"{size:g}": weight * size for size in (1e-44, 1e-38, 7.9e-36, 1e-20, 1e37)}
    found["rows of all sizes"] = weight * torch.logspace(-44, 37, 24)[:, None]
    return {name: matrix.to(dtype) for name, matrix in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_scales_are_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors", reason="comes with vLLM (bash run_cpu.sh --vllm)")
    for what, weight in edges(dtype).items():
        found, expected = quantisation.quantise(weight), packed_by_compressed_tensors(weight)
        for field, value in expected.items():
            assert getattr(found, field).float().equal(value.float()), (what, field)
        assert found.scales.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_denormal_and_large_matrices_stay_finite_and_keep_their_zeros(dtype: torch.dtype) -> None:
    for what, weight in edges(dtype).items():
        value = quantisation.quantise(weight).checked(what).dequantised()
        assert value.isfinite().all() and not value[weight == 0].any(), what
        assert (value - weight).abs().max() <= 0.26 * weight.abs().max() + 3e-35, what  # near 0 all may become 0


def test_a_weight_that_int4_cannot_hold_is_named(tmp_path: Path) -> None:
    """3.4e38 is the largest number of fp32; int4 has no code for +7.5 of its steps, and -8 of them are more."""
    weight = torch.full((2, 32), -3.4e38)
    with pytest.raises(
        InputError, match=rf"{EXPERT}: in int4 its scales, or the weights that they give, have .* in float32; use"
    ):
        quantisation.frozen({EXPERT: weight}, EXPERT, torch.float32, "int4")
    path = reference.save("qwen3_moe", tmp_path / "whole", **SIZES)
    broken = load_file(path / "model.safetensors") | {EXPERT: -3.4e38 * torch.ones(128, 64)}
    save_file(broken, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=f"{EXPERT}: in int4 its scales, or the weights that they give, have values"):
        world.in_layouts(["TP1"], loads, path)


def loads(parallel: Parallel, path: Path) -> None:
    load(path, parallel, quantisation="int4")


@pytest.mark.parametrize("every", [1, 3, 7, 32])
def test_some_inputs_are_those_of_the_whole(every: int) -> None:
    packed = quantisation.quantise(torch.randn(3, 16, 96, generator=torch.Generator().manual_seed(0)))
    assert packed.inputs(every).equal(packed.dequantised()[..., ::every])


# ---------------------------------------------------------------- every layout


def twin(path: Path, folder: Path) -> dict[str, Tensor]:
    """A copy of the model at ``path`` in ``folder``, with the experts that the codes stand for; its tensors."""
    tensors = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        if ".mlp.experts." in key:
            tensors[key] = quantisation.quantise(tensor).dequantised()
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("kind", ["qwen2_moe", nightly("qwen3_moe")])
def test_log_probs_and_gradients_are_those_of_the_model_that_the_codes_stand_for(kind: str, tmp_path: Path) -> None:
    path, tokens = reference.save(kind, tmp_path / "whole", **SIZES), reference.tokens()
    tensors = twin(path, tmp_path / "twin")
    expected = lora_reference.compute(tmp_path / "twin", tokens)
    found = world.in_layouts(asked(LAYOUTS), measure_quantised, path, tensors, expected, tokens)
    for rank in (rank for ranks in found.values() for rank in ranks):
        assert rank["unequal"] == []  # to the last bit, also from shards
        assert len(rank["errors"]) == 3  # plain, with recompute, and with merged weights
        for logp_error, error in rank["errors"]:
            assert logp_error < 1e-4 and error < TOLERANCE
        assert rank["merged error"] < 1e-5
        assert all(name.endswith((".A", ".B")) for name in rank["trained"]) and rank["trained"]


# ---------------------------------------------------------------- bounded pieces


def test_bounded_pieces_give_the_product_and_the_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 192, 256, generator=generator)
    packed = quantisation.empty((5, 192, 256), torch.float32)
    for expert in range(5):
        packed[expert].copy_(quantisation.quantise(weight[expert]))
    counts, seen = torch.tensor([3, 0, 4, 1, 0]), []
    x, grad = (torch.randn(8, size, generator=generator) for size in (256, 192))
    whole = packed.dequantised()
    assert (whole - weight).abs().max() < 0.8
    rows = torch.arange(5).repeat_interleave(counts)
    expected = torch.einsum("ni,noi->no", x, whole[rows]), torch.einsum("no,noi->ni", grad, whole[rows])
    real = quantisation.Packed.dequantised
    monkeypatch.setattr(
        quantisation.Packed, "dequantised", lambda self: (seen.append(self.shape.numel() * 4), real(self))[1]
    )
    monkeypatch.setattr(
        kernels, "PIECE", 5 * 256 * 128 * 4
    )  # 128 of 192 rows at a time, then 170 -> 128 of 256 columns
    x.requires_grad_()
    y = kernels.quantised_grouped_mm(x, packed, counts)
    y.backward(grad)
    assert torch.allclose(y, expected[0], atol=1e-4) and torch.allclose(x.grad, expected[1], atol=1e-4)
    assert len(seen) == 4 and max(seen) <= kernels.PIECE and sum(seen) == 2 * whole.numel() * 4
