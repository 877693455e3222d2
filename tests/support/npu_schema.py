"""Calls every operator with the real torch_npu on tensors without data, in a process of its own; prints JSON.

    python tests/support/npu_schema.py '{"name": ["configs/qwen3.yaml", ["parallel.tensor=4"], 16]}'

For each training (configuration, overrides, ranks): the operators at the sizes of a rank, forward and backward, in
bf16, on an NPU and on the CPU. cann_stub.py makes the environment of the process; tests/test_npu_schema.py judges the
answers.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import fake_npu
import torch
import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[2]))

import device as devices  # noqa: E402
import hf_config  # noqa: E402
import kernels  # noqa: E402
import packing  # noqa: E402
from config import Config, load_config  # noqa: E402
from config_rules import check_layout  # noqa: E402
from input_files import InputError  # noqa: E402
from plan import grid, kernels_check, memory  # noqa: E402
from plan.kernels_check import Case  # noqa: E402

BF16 = torch.bfloat16
DEVICES = {"npu": torch.device("npu", 0), "cpu": torch.device("cpu")}


def described(x: Tensor) -> list:
    return [list(x.shape), str(x.dtype).removeprefix("torch."), str(x.device)]


def outcome(case: Case, where: str) -> list | str:
    """The result of ``case`` and the gradients of its trained inputs: shape, type, device. A text if it was refused."""

    def cast(name: str, x: Tensor) -> Tensor:
        dtype = x.dtype if not x.is_floating_point() or name == "probs" else BF16  # the router's probabilities are fp32
        # On the NPU without data: FakeTensorMode keeps the data of small constants, and would copy it to the device.
        moved = x.to(dtype) if where == "cpu" else torch.empty(x.shape, dtype=dtype, device=DEVICES[where])
        return moved.requires_grad_(name in case.trained)

    inputs = {name: cast(name, x) for name, x in case.inputs.items()}
    try:
        out = case.operator(*inputs.values())
        gradients = torch.autograd.grad(out, [inputs[name] for name in case.trained], torch.empty_like(out))
        return [described(x) for x in (out, *gradients)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------------ the operators


def more_cases(cases: list[Case]) -> list[Case]:
    """Uses that kernels_check leaves out: experts without rows, one expert, and the rotary embedding of the sampler."""
    by_name, found = {case.name: case for case in cases}, []

    def use(of: str, note: str, **inputs: Tensor) -> None:
        if of in by_name:
            found.append(by_name[of]._replace(name=f"{of}, {note}", inputs=by_name[of].inputs | inputs))

    turned = by_name["rotary"].inputs
    T, _, heads, d = turned["x"].shape
    use("rotary", "prefill", x=torch.empty(3, T, heads, d), cos=turned["cos"].view(1, T, 1, d),
        sin=turned["sin"].view(1, T, 1, d))  # fmt: skip
    use("rotary", "decode", **{name: x[:, 0] for name, x in turned.items()})
    if "weighted_swiglu" in by_name:
        given = by_name["weighted_swiglu"].inputs
        use("weighted_swiglu", "no rows", **{name: x[:0] for name, x in given.items()})
    for name in [name for name in by_name if name.startswith("grouped_mm")]:
        x, weight, counts = by_name[name].inputs.values()
        use(name, "no rows", x=x[:0], counts=torch.tensor([0] * len(weight)))
        use(name, "one expert", weight=weight[:1], counts=torch.tensor([len(x)]))
        use(name, "int32 counts", counts=counts.int())
    return found


def packed_line(cfg: Config, arch: hf_config.Architecture, ranks: int, mode: FakeTensorMode) -> Case:
    """The attention of packing.py: a full micro-batch of one prompt's completions, the last of which trains nothing."""
    layout = grid.of(cfg, ranks)
    rows = max(2, memory.micro_batch_tokens(cfg, layout) // cfg.row_tokens)
    own = cfg.rollout.max_new_tokens
    tokens, mask = torch.ones(rows, cfg.row_tokens, dtype=torch.long), torch.zeros(rows, cfg.row_tokens)
    for row in range(rows - 1):
        mask[row, -own : cfg.row_tokens - row % (own - 1)] = 1  # rows of several lengths
    packed = packing.pack(tokens, mask, layout.tensor)
    fields = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
    names = tuple(fields)
    heads, kv_heads = arch.num_heads // layout.tensor, max(1, arch.num_kv_heads // layout.tensor)
    M, d = len(packed.source), arch.head_dim

    def attention(query: Tensor, key: Tensor, value: Tensor, *places: Tensor) -> Tensor:
        line = packing.Packing(**dict(zip(names, places, strict=True)))
        return line.attention(query, key, value, d**-0.5)

    with mode:
        inputs = {"query": torch.empty(M, heads, d)} | {n: torch.empty(M, kv_heads, d) for n in ("key", "value")}
    inputs |= {name: mode.from_tensor(x) for name, x in fields.items()}
    return Case("Packing.attention", attention, attention, inputs, ("query", "key", "value"), (0, 0), (0, 0))


def answers(trainings: dict[str, list], mode: FakeTensorMode) -> list[dict]:
    """A row for each operator and each set of sizes. ``layouts``: the trainings that have it."""
    rows: dict[tuple, dict] = {}
    for name, (path, overrides, ranks) in trainings.items():
        cfg = load_config(Path(path), overrides)
        arch = hf_config.planned(cfg)[0]
        check_layout(cfg, arch, ranks)
        line = packed_line(cfg, arch, ranks, mode)
        with mode:
            cases = kernels_check.cases(cfg, arch, ranks, seed=0)
            for case in [*cases, *more_cases(cases), line]:
                sizes = {key: list(x.shape) for key, x in case.inputs.items()}
                row = rows.setdefault((case.name, str(sizes)), {"operator": case.name, "sizes": sizes, "layouts": []})
                row["layouts"].append(name)
                if "npu" not in row:
                    # Without data, the CPU's loop over experts cannot run; the test knows what to expect there.
                    looped = case.name.startswith("grouped_mm") and case.name.endswith("no rows")
                    row |= {where: outcome(case, where) for where in DEVICES if where == "npu" or not looped}
    return list(rows.values())


# ------------------------------------------------------------------------------------------------ planted faults


def planted_faults() -> dict[str, list | str]:
    """Fault in kernels.py -> the outcome of a grouped product with it."""
    inputs = {"x": torch.empty(64, 32), "weight": torch.empty(4, 32, 16), "counts": torch.tensor([16] * 4)}
    case = Case("grouped_mm", kernels.grouped_mm, kernels.grouped_mm, inputs, ("x", "weight"), (0, 0), (0, 0))
    real, real_package = kernels._npu_grouped, kernels._npu

    class Package:
        """torch_npu, but its grouped product is called with another keyword."""

        @staticmethod
        def npu_grouped_matmul(*args, group_type: int, **kwargs) -> list[Tensor]:
            return torch_npu.npu_grouped_matmul(*args, group_typ=group_type, **kwargs)

    faults = {
        "none": {},
        "inner size": {"_npu_grouped": lambda x, w, counts, group_type=0: real(x[:, 1:], w, counts, group_type)},
        "int32 list": {"_npu_grouped": lambda x, w, counts, group_type=0: real(x, w, counts.int(), group_type)},
        "fp32 weight": {"_npu_grouped": lambda x, w, counts, group_type=0: real(x, w.float(), counts, group_type)},
        "group_type 1": {"_npu_grouped": lambda x, w, counts, group_type=0: real(x, w, counts, 1 - group_type // 2)},
        "unknown keyword": {"_npu": lambda: Package},
    }
    found = {}
    for name, replaced in faults.items():
        vars(kernels).update(replaced)
        found[name] = outcome(case, "npu")
        kernels._npu_grouped, kernels._npu = real, real_package
    return found


def accepted_without_data() -> dict[str, bool]:
    """Call that a device refuses or computes wrongly -> whether torch_npu accepts it on tensors without data."""

    def npu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="npu")

    x, weight, counts, heads = npu(64, 32), npu(4, 32, 16), npu(4, dtype=torch.int64), npu(2, 8, 64, 128)

    def grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Callable:
        chosen = {"split_item": 3, "group_type": 0, "group_list_type": 1}
        return lambda: torch_npu.npu_grouped_matmul([x], [weight], group_list=counts, **chosen)

    def attention(heads: Tensor, mask: Tensor) -> Callable:
        return lambda: torch_npu.npu_fusion_attention(heads, heads, heads, heads.shape[1], "BNSD", atten_mask=mask)

    calls = {
        "grouped: inner size": grouped(x[:, 1:], weight, counts),
        "grouped: int32 list": grouped(x, weight, counts.int()),
        "grouped: fp32 weight": grouped(x, weight.float(), counts),
        "grouped: 1025 groups": grouped(x, npu(1025, 32, 16), npu(1025, dtype=torch.int64)),
        "norm: weight of another width": lambda: torch_npu.npu_rms_norm(x, npu(16)),
        "norm: bf16 weight beside fp32": lambda: torch_npu.npu_rms_norm(x.float(), npu(32)),
        "swiglu: odd width": lambda: torch_npu.npu_swiglu(npu(64, 31)),
        "rotary: head size of 896": lambda: torch_npu.npu_rotary_mul(npu(8, 1, 2, 896), *(npu(8, 1, 1, 896),) * 2),
        "rotary: angles of other tokens": lambda: torch_npu.npu_rotary_mul(npu(8, 1, 2, 64), *(npu(7, 1, 1, 64),) * 2),
        "attention: head size of 769": attention(npu(2, 8, 64, 769), npu(2, 1, 64, 64, dtype=torch.bool)),
        "attention: 257 heads": attention(npu(2, 257, 64, 8), npu(2, 1, 64, 64, dtype=torch.bool)),
        "attention: mask of other keys": attention(heads, npu(2, 1, 64, 63, dtype=torch.bool)),
        "attention: bf16 mask": attention(heads, npu(2, 1, 64, 64)),
    }
    return {name: _accepts(call) for name, call in calls.items()}


def _accepts(call: Callable) -> bool:
    try:
        call()
    except Exception:
        return False
    return True


def stand_in() -> list[str]:
    """What fake_npu.py has and the real package has not: names of torch.npu, keywords of kernels and their defaults."""
    module = fake_npu.torch_npu_module()
    wrong = [f"torch.npu.{name}" for name in vars(module) if not name.startswith("__") and not hasattr(torch.npu, name)]
    for kernel in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_fusion_attention", "npu_grouped_matmul"):
        schema = getattr(torch.ops.npu, kernel).default._schema
        real = {argument.name: argument.default_value for argument in schema.arguments}
        for name, parameter in inspect.signature(getattr(fake_npu, kernel)).parameters.items():
            if parameter.default is parameter.empty:
                continue
            same = name in real and (
                math.isclose(real[name], parameter.default, rel_tol=1e-6)
                if isinstance(parameter.default, float)
                else real[name] == parameter.default
            )
            if not same:
                wrong.append(f"{kernel}: {name}={parameter.default}, really {real.get(name, 'unknown')}")
    return wrong


def start_up() -> dict:
    """What device.py finds on the stub, which has 16 devices, and whether Megatron can be imported there."""
    npu, found = devices.resolve("npu"), {"auto": str(devices.resolve("auto"))}
    for rank in ("15", "16"):
        os.environ["LOCAL_RANK"] = rank
        try:
            devices.select(npu)
            found[rank] = "selected"
        except InputError as error:
            found[rank] = str(error)
    devices.make_deterministic(npu)
    devices.synchronize(npu)
    found["peak memory"] = devices.peak_memory_gib(npu)
    devices.adapt(npu)  # torch.cuda then means the NPU
    found["cuda devices"] = torch.cuda.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        devices.import_megatron(npu)
    return found | {"megatron": "megatron.core.models.gpt" in sys.modules}


def main(trainings: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    operators = answers(json.loads(trainings), mode)
    with mode:
        faults, accepted = planted_faults(), accepted_without_data()
    found = {
        "versions": [torch.__version__, torch_npu.__version__],
        "operators": operators,
        "faults": faults,
        "accepted": accepted,
        "stand-in": stand_in(),
        "start-up": start_up(),
        "buffers": {name: devices.group_options(DEVICES["npu"], name).hccl_config for name in devices.HCCL_BUFFER_MIB},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
