"""Call every operator with the real torch_npu on tensors without data, in a separate process, and print JSON.

    python tests/support/npu_schema.py '{"name": ["configs/qwen3.yaml", ["parallel.tensor=4"], 16]}'

For each training run (configuration, overrides, ranks), it calls the operators at the sizes of a rank, forward and
backward, in bf16, on an NPU and on the CPU. cann_stub.py makes the environment of the process, and
tests/machines/test_npu.py checks the answers.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import warnings
from pathlib import Path

import fake_npu
import operators
import torch
import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from facts.architectures import Architecture

sys.path.insert(0, str(Path(__file__).parents[2]))

from checks import kernels_check  # noqa: E402
from checks.kernels_check import Case  # noqa: E402
from facts.exits import InputError  # noqa: E402
from facts.limits import HCCL_BUFFER_MIB  # noqa: E402
from hardware import device as devices  # noqa: E402
from hardware import kernels  # noqa: E402
from inputs import hf_config  # noqa: E402
from inputs.config import Config, load_config  # noqa: E402
from inputs.rules import refuse_first, trainer_problems  # noqa: E402
from model import packing  # noqa: E402
from plan import grid, memory  # noqa: E402

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


def packed_line(cfg: Config, arch: Architecture, ranks: int, mode: FakeTensorMode) -> Case:
    """The attention of a full, packed micro-batch of one prompt's completions, the last of which trains nothing."""
    layout = grid.of(cfg.parallel, cfg.rollout, ranks)
    rows = max(
        2, memory.micro_batch_tokens(cfg.optim, layout, cfg.rollout.group_size, cfg.row_tokens) // cfg.row_tokens
    )
    own = cfg.rollout.max_new_tokens
    tokens, mask = torch.ones(rows, cfg.row_tokens, dtype=torch.long), torch.zeros(rows, cfg.row_tokens)
    for row in range(rows - 1):
        mask[row, -own : cfg.row_tokens - row % (own - 1)] = 1  # rows of several lengths
    packed = packing.pack(tokens, mask, layout.tensor)
    fields = {name: value for name, value in vars(packed).items() if isinstance(value, Tensor)}
    names = tuple(fields)
    heads, kv_heads = arch.num_heads // layout.tensor, max(1, arch.num_kv_heads // layout.tensor)
    M, d = len(packed.source), arch.head_dim

    def attention(query: Tensor, key: Tensor, value: Tensor, *places: Tensor) -> Tensor:
        line = packing.Packing(**dict(zip(names, places, strict=True)))
        return line.attention(query, key, value, d**-0.5)

    sizes = {"query": heads, "key": kv_heads, "value": kv_heads}
    with mode:
        inputs = {name: torch.empty(M, count, d) for name, count in sizes.items()}
    inputs |= {name: mode.from_tensor(x) for name, x in fields.items()}
    return Case("Packing.attention", attention, attention, inputs, ("query", "key", "value"), (0, 0), (0, 0))


def answers(trainings: dict[str, list], mode: FakeTensorMode) -> list[dict]:
    """A row for each operator and each set of sizes. ``layouts``: the trainings that have it."""
    rows: dict[tuple, dict] = {}
    for name, (path, overrides, ranks) in trainings.items():
        cfg = load_config(Path(path), overrides)
        arch = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0]
        refuse_first(trainer_problems(cfg, arch, ranks))
        line = packed_line(cfg, arch, ranks, mode)
        with mode:
            cases = kernels_check.cases_of(cfg, arch, ranks, seed=0)
            for case in [*cases, *operators.more_cases(cases), line]:
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
    """Keyword of the kernel's call in kernels.py -> the outcome of a grouped product with it."""
    inputs = {"x": torch.empty(64, 32), "weight": torch.empty(4, 32, 16), "counts": torch.tensor([16] * 4)}
    case = Case("grouped_mm", kernels.grouped_mm, kernels.grouped_mm, inputs, ("x", "weight"), (0, 0), (0, 0))
    real, found = torch_npu.npu_grouped_matmul, {}
    for keyword in ("group_type", "group_typ"):
        torch_npu.npu_grouped_matmul = lambda *args, group_type, keyword=keyword, **kwargs: real(
            *args, **kwargs | {keyword: group_type}
        )
        found[keyword] = outcome(case, "npu")
    torch_npu.npu_grouped_matmul = real
    return found


def stand_in() -> list[str]:
    """What fake_npu.py has and the real package has not: names of torch.npu, keywords of kernels and their defaults."""
    module = fake_npu.torch_npu_module()
    wrong = [f"torch.npu.{name}" for name in vars(module) if not name.startswith("__") and not hasattr(torch.npu, name)]
    for kernel in fake_npu.FUNCTIONS:
        schema = getattr(torch.ops.npu, kernel.__name__).default._schema
        real = {argument.name: argument.default_value for argument in schema.arguments}
        for name, parameter in inspect.signature(kernel).parameters.items():
            given, known = parameter.default, real.get(name, "unknown")
            close = isinstance(given, float) and isinstance(known, float) and math.isclose(known, given, rel_tol=1e-6)
            if given is not parameter.empty and given != known and not close:
                wrong.append(f"{kernel.__name__}: {name}={given}, really {known}")
    return wrong


def start_up() -> dict:
    """What hardware/device.py finds on the stub, which has 16 devices, and whether Megatron can be imported there."""
    npu, found = devices.resolve("npu"), {"auto": str(devices.resolve("auto"))}
    os.environ["LOCAL_RANK"] = "16"
    try:
        devices.select(npu)
    except InputError as error:
        found["rank 16"] = str(error)
    os.environ["LOCAL_RANK"] = "15"
    devices.select(npu)
    devices.make_deterministic(npu)
    devices.synchronize(npu)
    found["peak memory"] = devices.peak_memory_gib(npu)
    devices.adapt(npu)  # torch.cuda then means the NPU
    found["cuda devices"] = torch.cuda.device_count()
    warnings.simplefilter("ignore")
    devices.import_megatron(npu)
    return found | {"megatron": "megatron.core.models.gpt" in sys.modules}


def main(trainings: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    operators = answers(json.loads(trainings), mode)
    with mode:
        found = {"faults": planted_faults()}
    found |= {
        "versions": [torch.__version__, torch_npu.__version__],
        "operators": operators,
        "stand-in": stand_in(),
        "start-up": start_up(),
        "buffers": {name: devices.group_options(DEVICES["npu"], name).hccl_config for name in HCCL_BUFFER_MIB},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
