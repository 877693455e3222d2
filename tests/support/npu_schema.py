"""Calls every operator with the real torch_npu on tensors without data, in a process of its own; prints JSON.

    python tests/support/npu_schema.py '{"name": ["configs/qwen3.yaml", ["parallel.tensor=4"], 16]}'

For each training (configuration, overrides, ranks): the operators at the sizes of a rank, forward and backward, in bf16,
on an NPU and on the CPU. tests/support/cann_stub.py makes the environment; tests/test_npu_schema.py judges the answers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

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
from plan import grid, kernels_check, memory  # noqa: E402
from plan.kernels_check import Case  # noqa: E402

BF16 = torch.bfloat16
DEVICES = {"npu": torch.device("npu", 0), "cpu": torch.device("cpu")}


def described(x: Tensor) -> list:
    return [list(x.shape), str(x.dtype).removeprefix("torch."), x.device.type]


def outcome(case: Case, where: str) -> list | str:
    """The result of ``case`` and the gradients of its trained inputs: shape, type, device. A text if it was refused."""

    def cast(name: str, x: Tensor) -> Tensor:
        kept = not x.is_floating_point() or name == "probs"  # the router's probabilities are fp32
        return x.to(DEVICES[where], x.dtype if kept else BF16).requires_grad_(name in case.trained)

    inputs = {name: cast(name, x) for name, x in case.inputs.items()}
    try:
        out = case.operator(*inputs.values())
        return [described(x) for x in (out, *torch.autograd.grad(out.sum(), [inputs[n] for n in case.trained]))]
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
    hidden = fields.pop("mask") < 0
    names = tuple(fields)
    heads, kv_heads = arch.num_heads // layout.tensor, max(1, arch.num_kv_heads // layout.tensor)
    M, d = len(packed.source), arch.head_dim

    def attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, *places: Tensor) -> Tensor:
        line = packing.Packing(**dict(zip(names, places, strict=True)), mask=kernels.attention_mask(hidden))
        return line.attention(query, key, value, d**-0.5)

    with mode:
        inputs = {"query": torch.empty(M, heads, d)} | {n: torch.empty(M, kv_heads, d) for n in ("key", "value")}
    inputs |= {name: mode.from_tensor(x) for name, x in ({"hidden": hidden} | fields).items()}
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
                    row |= {where: outcome(case, where) for where in DEVICES}
    return list(rows.values())


def main(trainings: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = {
        "versions": [torch.__version__, torch_npu.__version__],
        "operators": answers(json.loads(trainings), mode),
        "buffers": {name: devices.group_options(DEVICES["npu"], name).hccl_config for name in devices.HCCL_BUFFER_MIB},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
