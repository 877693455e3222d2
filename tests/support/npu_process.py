"""Run operations, the start-up of hardware/device.py and training runs on fake_npu.py, in a separate process.

    python tests/support/npu_process.py FOLDER [MINDSPEED_DIR]
    python tests/support/npu_process.py FOLDER MINDSPEED_DIR vllm

FOLDER/operations.json gets the results of the operations. FOLDER/life/config.yaml makes its tiny model, is trained,
evaluated and exported, and two of its layers are compared. Every FOLDER/LAYOUT/config.yaml is a training run on every
rank, interrupted in step INTERRUPTED and then resumed. Rank r writes the groups and the kernels that it used to
FOLDER/LAYOUT/answer-r. All ranks are forked, so that torch and Megatron are imported only once. With a real MindSpeed,
every rank imports MindSpeed and Megatron itself, in the order of a run, and only the training runs are made. The exit
code is 1 if a rank failed.

With `vllm`, MindSpeed adapts the fake NPU in this process, which then trains FOLDER/config.yaml on its CPU, with vLLM.
It writes what MindSpeed has left, and what transformers finds, to FOLDER/answer.json.
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

import cann_stub
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


def refused_by_the_device(group: dist.ProcessGroup) -> dict[str, Callable]:
    """Words of a refusal -> an attempt that fails on the hardware, so the stand-in must refuse it."""
    mask, heads = npu(4, 4, dtype=torch.bool), npu(1, 2, 4, 8)
    attend, counts = sys.modules["torch_npu"].npu_fusion_attention, torch.tensor([2, 2], device="npu")
    hidden = mask.expand(1, 1, 4, 4).contiguous()
    return {
        "at least two devices, npu:0 and cpu": lambda: npu(4) + torch.ones(4),
        "unsupported data type torch.float64": lambda: group.allreduce([npu(4).double()]),  # all_reduce is patched
        "No backend type associated with device type cpu": lambda: dist.all_reduce(torch.ones(4), group=group),
        "No backend type associated with device type npu": lambda: dist.all_reduce(npu(4)),
        "can't convert npu:0": lambda: npu(4).numpy(),
        "not the causal mask": lambda: attend(heads, heads, heads, 2, "BNSD", atten_mask=mask.triu(1), sparse_mode=2),
        "a query sees no key": lambda: kernels.masked_attention(heads, heads, heads, hidden, scale=1.0),
        "[2, 2] of torch.Size([5, 8])": lambda: kernels.grouped_mm(npu(5, 8), npu(2, 8, 8), counts),
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
        "InputError: LOCAL_RANK: 2 needs 3 npu devices on this host, which has 2 (ASCEND_RT_VISIBLE_DEVICES is 4,5)": (
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
    attempts = refused_by_the_device(group) | refused_at_the_start(device)
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

    training.lighten()
    if interrupted:
        real_update = Learner.update
        Learner.update = lambda self, *args: (interrupt if args[3] == INTERRUPTED else real_update)(self, *args)
    try:
        train_grpo.launch(config.load_config(folder / "config.yaml"))
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


def train_with_vllm(folder: Path) -> int:
    """Train FOLDER/config.yaml, whose device is a CPU, in this process, which MindSpeed has adapted to an NPU.

    vLLM has no NPU here, and its CPU has no forward pass on the stand-in's tensors. So the device of the run is a CPU.
    """
    npu_device = devices.resolve("npu")
    devices.adapt(npu_device)
    devices.import_megatron(npu_device)
    cann_stub.remove_stand_ins("scipy", "torchair", "triton")
    from transformers.utils import is_flash_attn_2_available

    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    dummies = sorted(name for name, file in files.items() if file == "mindspeed.dummy_module.py")
    answer = {"patched": "mindspeed.megatron_adaptor" in sys.modules, "dummies": dummies}
    try:
        answer["flash_attn"] = is_flash_attn_2_available()
    except Exception as error:
        answer["flash_attn"] = repr(error)
    (folder / "answer.json").write_text(json.dumps(answer))
    import world

    return max(world.as_torchrun(1, train, folder, False))


def main(folder: str, mindspeed: str = "", engine: str = "") -> int:
    if mindspeed:  # torch would take the stand-in for triton for a real one
        import torch._inductor.compile_fx
        import torch.utils.flop_counter  # noqa: F401
    fake_npu.install(stubs=bool(mindspeed))
    sys.path[1:1] = [mindspeed] if mindspeed else []
    import training
    import world

    if engine:
        return train_with_vllm(Path(folder))
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
