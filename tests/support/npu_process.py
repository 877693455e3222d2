"""What runs on fake_npu.py, in a process of its own: operations, the start-up of hardware/device.py, and trainings.

    python tests/support/npu_process.py FOLDER [MINDSPEED_DIR]

FOLDER/operations.json gets what the operations gave. FOLDER/life/config.yaml makes its tiny model, is trained,
evaluated and exported, and has two layers compared. Every FOLDER/LAYOUT/config.yaml is a training, on every rank,
interrupted in step INTERRUPTED and then resumed. Rank r writes the groups and the kernels that it used to
FOLDER/LAYOUT/answer-r. All of them are forked, so that torch and Megatron are imported only once. With a real
MindSpeed, every rank imports MindSpeed and Megatron itself, in the order of a run, and only the trainings are run. The
exit code is 1 if a rank failed.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import fake_npu
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from facts import variables  # noqa: E402
from hardware import device as devices  # noqa: E402
from hardware import kernels  # noqa: E402

COUNTS = torch.tensor([5, 0, 7])
INTERRUPTED = 2

# ------------------------------------------------------------------------------------------------ operations


def kernel_calls(kernel: str, function: Callable) -> int:
    """How often ``function()`` calls a kernel."""
    before = fake_npu.KERNELS.get(kernel, 0)
    function()
    return fake_npu.KERNELS.get(kernel, 0) - before


def grouped_pass(frozen: bool) -> None:
    """A forward and a backward pass of a grouped product."""
    x, weight = torch.randn(12, 16).to("npu").requires_grad_(), torch.randn(3, 16, 8).to("npu")
    kernels.grouped_mm(x, weight.requires_grad_(not frozen), COUNTS).sum().backward()


def patches_in_force(group: dist.ProcessGroup) -> dict[str, bool]:
    """MindSpeed's patches lose a write into a view and a float64 reduction; the stand-in must lose them too."""
    columns, total = torch.zeros(2, 3, device="npu"), torch.ones(2, device="npu", dtype=torch.float64)
    columns.t().view(6).copy_(torch.ones(6).to("npu"))
    dist.all_reduce(total, group=group)
    named = "cuda" in torch.ones(1, device="npu").type()
    return {"write lost": not columns.cpu().any().item(), "no error": total.tolist() == [1.0, 1.0], "named": named}


# ------------------------------------------------------------------------------------------------ refusals


def npu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, device="npu", dtype=dtype)


def refused_tensors() -> dict[str, Callable]:
    """Words of a refusal -> a call of kernels.py with tensors that an NPU refuses, though torch_npu takes them.

    One call for each rule of kernels.py. Two are refused by the device alone: the sum of sizes, a query without keys.
    """
    counts, half = torch.tensor([2, 2], device="npu"), torch.bfloat16
    heads, mask = npu(1, 4, 4, 8), npu(1, 1, 4, 4, dtype=torch.bool)
    angles = npu(4, 1, 1, 8)

    def grouped(x: Tensor, weight: Tensor, counts: Tensor = counts) -> Callable:
        return lambda: kernels.grouped_mm(x, weight, counts)

    def attend(query: Tensor = heads, key: Tensor = heads) -> Callable:
        return lambda: kernels.causal_attention(query, key, key, scale=1.0)

    def masked(mask: Tensor) -> Callable:
        return lambda: kernels.masked_attention(heads, heads, heads, mask, scale=1.0)

    def rotary(x: Tensor, cos: Tensor = angles) -> Callable:
        return lambda: kernels.rotary(x, cos, cos)

    return {
        "npu_grouped_matmul: found (4, 8) float32, (2, 6, 8) float32; needed: 2-D x": grouped(npu(4, 8), npu(2, 6, 8)),
        "(2, 8, 8) float32; needed: x and weight of one type": grouped(npu(4, 8, dtype=half), npu(2, 8, 8)),
        "found (2,) int32; needed: the sizes of 2 to 1024": lambda: kernels._npu_grouped(
            npu(4, 8), npu(2, 8, 8), counts.int()
        ),
        "found (1025,) int64; needed: the sizes of 2 to 1024 groups": grouped(
            npu(4, 1), npu(1025, 1, 1), torch.zeros(1025, dtype=torch.long).to("npu")
        ),
        "found (3, 8, 8) float32, (2,) int64; needed: a matrix for each group": grouped(npu(4, 8), npu(3, 8, 8)),
        "needed: widths below 65536": grouped(npu(4, 1), npu(2, 1, 65536)),
        "npu_grouped_matmul: [2, 2] of torch.Size([5, 8])": grouped(npu(5, 8), npu(2, 8, 8)),
        "npu_rms_norm: found (4, 8) float32, (4,) float32; needed: x": lambda: kernels.rms_norm(npu(4, 8), npu(4), 1),
        "npu_rms_norm: found (8,) float32, (8,) float32; needed: x": lambda: kernels.rms_norm(npu(8), npu(8), 1),
        "npu_swiglu: found (4, 7) float32; needed: two halves": lambda: kernels.swiglu(npu(4, 7)),
        "needed: one type, batch and head size; key and value of one shape": attend(npu(2, 4, 4, 8)),
        "(1, 4, 4, 769) float32; needed: a head size up to 768": attend(*(npu(1, 4, 4, 769),) * 2),
        "(1, 257, 4, 8) float32; needed: a head size up to 768; up to 256": attend(*(npu(1, 257, 4, 8),) * 2),
        "found (1, 4, 4, 8) float32, (1, 3, 4, 8) float32; needed: a head size": attend(key=npu(1, 3, 4, 8)),
        "needed: a row or more, of 1 to 2^20 tokens": attend(*(npu(0, 4, 4, 8),) * 2),
        "(1, 1, 4, 4) float32; needed: a bool mask of (b, 1, queries, keys)": masked(mask.float()),
        "(1, 1, 4, 3) bool; needed: a bool mask of (b, 1, queries, keys)": masked(mask[..., :3]),
        "npu_fusion_attention: a query sees no key": masked(mask),
        "found (4, 1, 2, 7) float32; needed: heads of an even": rotary(npu(4, 1, 2, 7), npu(4, 1, 1, 7)),
        "found (4, 1, 2, 896) float32; needed: heads of an even": rotary(npu(4, 1, 2, 896), npu(4, 1, 1, 896)),
        "(4, 1, 2, 8) float32; needed: x of four axes; angles of its type": rotary(npu(4, 1, 2, 8), npu(4, 1, 2, 8)),
        "found (4, 1, 2, 8) bfloat16, (4, 1, 1, 8) float32": rotary(npu(4, 1, 2, 8, dtype=half)),
        "found (4, 1000, 2, 8) float32; needed: a batch and": rotary(npu(4, 1000, 2, 8)),
        "found (4, 1, 1000, 8) float32; needed: a batch and": rotary(npu(4, 1, 1000, 8)),
    }


def refused_by_the_device(group: dist.ProcessGroup) -> dict[str, Callable]:
    """Words of a refusal -> an attempt that fails on the hardware, so the stand-in must refuse it."""
    mask, heads = npu(4, 4, dtype=torch.bool).triu(1), npu(1, 2, 4, 8)
    attend = sys.modules["torch_npu"].npu_fusion_attention
    return {
        "at least two devices, npu:0 and cpu": lambda: npu(4) + torch.ones(4),
        "unsupported data type torch.float64": lambda: group.allreduce([npu(4).double()]),  # all_reduce is patched
        "No backend type associated with device type cpu": lambda: dist.all_reduce(torch.ones(4), group=group),
        "No backend type associated with device type npu": lambda: dist.all_reduce(npu(4)),
        "can't convert npu:0": lambda: npu(4).numpy(),
        "not the causal mask": lambda: attend(heads, heads, heads, 2, "BNSD", atten_mask=mask, sparse_mode=2),
    }


def refused_at_the_start(device: torch.device) -> dict[str, Callable]:
    """Words of a refusal -> an attempt to start wrongly."""

    def with_modules(*names: str) -> None:
        modules = {name: types.ModuleType(name) for name in names}
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        with mock.patch.dict(sys.modules, modules):
            devices.adapt(device)

    def with_variables(function: Callable, *args, **variables: str) -> None:
        with mock.patch.dict(os.environ, variables):
            function(*args)

    return {
        "RuntimeError: device.adapt: megatron.core is imported already": lambda: with_modules("megatron.core"),
        "RuntimeError: device.adapt: transformers is imported": lambda: with_modules("mindspeed", "transformers"),
        "InputError: LOCAL_RANK: 2 needs 3 npu devices on this host, found 2 (ASCEND_RT_VISIBLE_DEVICES is 4,5)": (
            lambda: with_variables(devices.select, device, LOCAL_RANK="2", ASCEND_RT_VISIBLE_DEVICES="4,5")
        ),
        "InputError: train.deterministic: true, but HCCL_DETERMINISTIC is false": (
            lambda: with_variables(devices.set_environment, "npu", True, HCCL_DETERMINISTIC="false")
        ),
    }


def message(attempt: Callable) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def operate(folder: Path) -> None:
    """Write FOLDER/operations.json."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, device = dist.new_group([0], backend="hccl"), torch.device("npu")
    norm_of_two_types = lambda: kernels.rms_norm(npu(4, 8, dtype=torch.bfloat16), npu(8), 1e-6)  # noqa: E731
    attempts = refused_tensors() | refused_by_the_device(group) | refused_at_the_start(device)
    answers = {
        "auto": str(devices.resolve("auto")),
        "products": [kernel_calls("npu_grouped_matmul", lambda f=f: grouped_pass(f)) for f in (True, False)],
        "norms": kernel_calls("npu_rms_norm", norm_of_two_types),
        "refused": {words: message(attempt) for words, attempt in attempts.items()},
        "patches": patches_in_force(group),
        "buffers": [getattr(devices.group_options(device, name), "hccl_config", None) for name in ("tp", "pp")],
    }
    devices.set_environment("npu", deterministic=True)
    devices.make_deterministic(device)
    answers["variables"] = {v.name: os.environ.get(v.name) for v in variables.DETERMINISTIC["npu"]}
    answers["deterministic"] = torch.are_deterministic_algorithms_enabled()
    (folder / "operations.json").write_text(json.dumps(answers))


# ------------------------------------------------------------------------------------------------ trainings


class Interrupted(Exception):
    """The planned interruption of the run."""


def interrupt(*args) -> None:
    raise Interrupted


def train(folder: Path, interrupted: bool) -> None:
    """One rank, with the variables that torchrun sets."""
    import training

    import train_grpo
    from inputs import config
    from learner import Learner
    from run import command

    training.lighten()
    if interrupted:
        real_update = Learner.update
        Learner.update = lambda self, *args: (interrupt if args[3] == INTERRUPTED else real_update)(self, *args)
    try:
        command.start(config.load_config(folder / "config.yaml"), train_grpo.train)
    except Interrupted:
        return
    answers = {
        "groups": {group.group_desc: (len(group.members), group.buffer_mib) for group in fake_npu.GROUPS if group.used},
        "kernels": fake_npu.KERNELS,
        "patched": [],
        "megatron": sys.modules["megatron.core"].__version__,
    }
    if "mindspeed" in sys.modules:  # the names that its adaptor has replaced
        from mindspeed.patch_utils import MindSpeedPatchesManager

        answers["patched"] = sorted(MindSpeedPatchesManager.patches_info)
    (folder / f"answer-{os.environ['RANK']}").write_text(json.dumps(answers))


def after_the_training(folder: Path) -> int:
    """The highest exit code of both exports of the run of FOLDER and of an evaluation of its base, on one rank."""
    import evaluate
    import export
    from inputs import config

    (run,) = Path(config.load_config(folder / "config.yaml").train.out_dir).glob("tiny-*")
    (run / "config.yaml").write_text((folder / "config.yaml").read_text())  # training.lighten leaves it out
    exports = [export.main([str(run), f"--{kind}", str(folder / kind)]) for kind in ("merged", "adapter")]
    return max(*exports, evaluate.main([str(folder / "config.yaml"), "parallel.expert=1"]))


def layers(folder: Path) -> int:
    """The exit code of `preflight.py --layers` on this rank."""
    from checks import layers_check

    return layers_check.main([str(folder / "config.yaml"), "--folder", str(folder / "layers")])


def life(folder: Path) -> list[int]:
    """The exit codes of all that a user does with FOLDER/config.yaml on two ranks, from its tiny model on."""
    import world

    codes = world.as_torchrun(2, train, folder, True) + world.as_torchrun(2, train, folder, False)
    return codes + world.as_torchrun(1, after_the_training, folder) + world.as_torchrun(2, layers, folder)


def main(folder: str, mindspeed: str = "") -> int:
    fake_npu.install(stubs=bool(mindspeed))
    sys.path[1:1] = [mindspeed] if mindspeed else []
    import training
    import world

    codes = []
    if not mindspeed:
        codes += world.as_torchrun(1, operate, Path(folder))
        training.import_before_the_fork()
        npu_device = devices.resolve("npu")
        devices.adapt(npu_device)
        devices.import_megatron(npu_device)
    for path in sorted(Path(folder).glob("[!a-z]*/config.yaml")):
        for interrupted in (True, False):
            codes += world.as_torchrun(world.LAYOUTS[path.parent.name][0], train, path.parent, interrupted)
    if Path(folder, "life").exists():
        codes += life(Path(folder, "life"))
    return int(any(codes))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main(*sys.argv[1:]))
