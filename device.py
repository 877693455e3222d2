"""The device the code runs on: its choice and start-up, and what Megatron needs on a CPU. Operations: kernels.py.

Only the CPU, and the NPU's Python on a stand-in for the device (tests/fake_npu.py), have been run; CUDA has not.
parallel_setup.open_world calls the start-up in this order, which matters: set_environment -> resolve (torch_npu) ->
adapt (MindSpeed, before Megatron) -> select (set_device) -> make_deterministic -> the groups -> the seeds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

import environment
import kernels
from input_files import InputError

# Which devices of the machine a process sees. Read by the drivers, set by whoever starts the job, never here.
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}

# MiB of an HCCL communicator's buffer, by Megatron's name of the group; it takes two of them on every rank. A smaller
# one only cuts a transfer into more slices. The default, 200, is what a group not named here gets; Megatron's other
# groups carry nothing, and HCCL builds a communicator at its first use.
HCCL_BUFFER_MIB = {
    "tp": 64,  # 8192 tokens x 2048 x 2 bytes = 32 MiB, gathered and scattered
    "ep": 128,  # 2048 tokens x 8 experts x 2048 x 2 bytes = 64 MiB if balanced, twice that if not
    "ep_tp": 128,  # expert_tensor > 1: what "ep" brought, gathered
    "tp_ep_mp": 4,  # expert_tensor > 1: numbers of tokens an expert, 16 KiB
    "dp": 50,  # fp32 gradients of the attention's LoRA, 39 MiB at rank 32
    "ep_dp": 50,  # fp32 gradients of the experts' LoRA, in slices
}


# ------------------------------------------------------------------------------------------------ start-up


def set_environment(name: str, deterministic: bool) -> None:
    """Set the variables that must be there before the first operation; ``name`` as in resolve.

    A value that the user has set stays. InputError if it contradicts train.deterministic.
    """
    # torch then asks Linux for huge pages where a tensor fills some: on a CPU the heap stays smaller.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    kinds = ("npu", "cuda") if name == "auto" else (name,)
    for kind in kinds if deterministic else ():
        for variable in environment.DETERMINISTIC[kind]:
            found = os.environ.setdefault(variable.name, variable.value)
            if not variable.allows(found):
                raise InputError(
                    f"train.deterministic: true, but {variable.name} is {found} in the environment; needed: "
                    f"{' or '.join((variable.value, *variable.accepted))}, or unset"
                )


@functools.cache
def resolve(name: str) -> torch.device:
    """The device for `device: auto | npu | cuda | cpu`; auto is the first of npu, cuda and cpu that is there.

    Cached: what was decided first holds, since torch.cuda answers for the NPU once MindSpeed is imported. InputError if
    the device cannot be used, and under auto also if torch_npu is installed but does not work: on such a machine a
    training on the CPU is not what was meant.
    """
    if name == "npu" or (name == "auto" and importlib.util.find_spec("torch_npu")):
        _open_npu(name)
        return torch.device("npu")
    if name == "cuda" and not torch.cuda.is_available():
        build = f"is built for CUDA {torch.version.cuda} and sees no GPU" if torch.version.cuda else "has no CUDA"
        raise InputError(f"device: cuda: torch {torch.__version__} {build}; {VISIBLE['cuda']} is {_visible('cuda')}")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _open_npu(name: str) -> None:
    if importlib.util.find_spec("torch_npu") is None:
        raise InputError(f"device: {name}: torch_npu is not installed; needed: requirements/npu.txt")
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            f"device: {name}: torch_npu does not load ({error}); needed: CANN's variables, `source set_env.sh` of its "
            "toolkit and of nnal/atb"
        ) from None
    if not torch.npu.is_available():
        raise InputError(
            f"device: {name}: torch_npu sees no NPU; needed: one that npu-smi lists; {VISIBLE['npu']} is "
            f"{_visible('npu')}"
        )


def _visible(kind: str) -> str:
    return os.environ.get(VISIBLE[kind], "unset")


@functools.cache  # once a process
def adapt(device: torch.device) -> None:
    """Make Megatron's CUDA calls mean the NPU; before the first import of Megatron, or RuntimeError.

    With MindSpeed by its adaptor. MindSpeed is not required: of all that it replaces, our model needs torch.cuda to
    mean torch.npu and torch.compile to be left alone. torch_npu's own transfer_to_npu does the first, import_megatron
    the second; norms, attention, rotary embedding and experts are ours (below), and Transformer Engine, apex and the
    CUDA kernels that MindSpeed replaces are switched off in model_megatron.py. With it present it is used: it is what
    Ascend tests Megatron with, and corrects what we have not met.
    """
    if device.type != "npu":
        return
    early = sorted(name for name in sys.modules if name.split(".")[0] == "megatron")
    if early:
        raise RuntimeError(
            f"device.adapt: {early[0]} is imported already; MindSpeed must be imported before the first of Megatron, "
            "or it silently adapts only a part of it"
        )
    if importlib.util.find_spec("mindspeed") is None:
        from torch_npu.contrib import transfer_to_npu  # noqa: F401

        return
    if "transformers" in sys.modules:
        raise RuntimeError(
            "device.adapt: transformers is imported already; MindSpeed asks every imported module for the names that "
            "it replaces, and transformers answers by importing all its models, which fails without torchvision"
        )
    arguments, sys.argv = sys.argv, sys.argv[:1]  # it would parse ours, and put unknown ones into every model's config
    try:
        from mindspeed.megatron_adaptor import repatch

        repatch({"use_flash_attn": True})  # what verl asks for; our attention calls the same kernel
    finally:
        sys.argv = arguments


def select(device: torch.device) -> None:
    """Make the LOCAL_RANK-th visible device the current one. InputError if there is none."""
    if device.type == "cpu":
        return
    module = getattr(torch, device.type)
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), module.device_count()
    if local_rank >= count:
        raise InputError(
            f"LOCAL_RANK: {local_rank} needs {local_rank + 1} {device.type} devices on this host, found {count} "
            f"({VISIBLE[device.type]} is {_visible(device.type)}); needed: --nproc_per_node of at most {count}"
        )
    module.set_device(local_rank)


def make_deterministic(device: torch.device) -> None:
    """Have torch choose deterministic kernels; it warns at one that has none (cumsum of the embedded sampler on CUDA).

    Nothing to do on a CPU. set_environment has set what torch does not reach.
    """
    if device.type != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)


def synchronize(device: torch.device) -> None:
    """Wait for all that ``device`` was asked to do."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def median_milliseconds(job: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of ``job`` on ``device`` in ``repeats`` runs, each waited for."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        job()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def peak_memory_gib(device: torch.device) -> float | None:
    """Most of the device in use since the last call, GiB: torch's tensors, and what lies outside of torch's pool now.

    That is the runtime, the driver and the communicators' buffers. None on a CPU, which does not count.
    """
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type)
    free, total = module.mem_get_info()
    outside = total - free - module.memory_reserved()
    peak = module.max_memory_allocated() + outside
    module.reset_peak_memory_stats()
    return peak / 2**30


def backend(device: torch.device) -> str:
    """The torch.distributed backend that moves this device's tensors."""
    return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device.type]


def group_options(device: torch.device, name: str):
    """Options of the process group that Megatron calls ``name``: its buffer's size on HCCL, else None."""
    if device.type != "npu" or name not in HCCL_BUFFER_MIB:
        return None
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()  # a fresh one: torch_npu writes into it
    options.hccl_config = {"hccl_buffer_size": HCCL_BUFFER_MIB[name]}
    return options


# ------------------------------------------------------------------------------------------------ Megatron


def import_megatron(device: torch.device) -> None:
    """Import all of Megatron that the model needs, and correct what it assumes and ``device`` does not have.

    Megatron decorates functions with torch.compile while it is imported, which loads torch's compiler: a second of
    start-up, for kernels that we switch off, and that an NPU could not run. Inside, torch.compile does nothing.
    """
    if device.type == "cpu":
        _redirect_cuda()
    compiler = torch.compile
    torch.compile = lambda model=None, **options: model if model is not None else lambda function: function
    try:
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.tensor_parallel
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
    finally:
        torch.compile = compiler
    _correct_megatron(device)


class _NoStream:
    """Stands in for torch.cuda.Stream and Event: every method does nothing and returns the object itself."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _redirect_cuda() -> None:
    """Redirect the torch.cuda calls that megatron.core makes while it is imported, built or run, on a CPU."""
    no_stream = _NoStream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = lambda *args: no_stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all, and so itself for ever.
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def _correct_megatron(device: torch.device) -> None:
    """Correct what megatron.core binds at import: RNG state, split sizes as numpy, and gathers that gloo lacks."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.attention as attention
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads this name without importing it when there is no TE
        moe_utils.te_general_gemm = None
    # model_megatron.build has the model compute both once a forward; Megatron would in every layer, for q and for k.
    attention.apply_rotary_pos_emb = lambda x, cos_sin, *args, **kwargs: kernels.rotary(x, *cos_sin)
    if device.type != "cpu" or getattr(mappings._gather_along_first_dim, "padded", False):
        return
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # all_to_all_single takes no tensors as split sizes; Megatron converts them only when they are CUDA tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    even_gather = mappings._gather_along_first_dim

    def gather(x, group=None, output_split_sizes=None, use_global_buffer=False):
        """gloo has no all-gather of unequal shares (expert_tensor > 1): pad each to the longest, then cut."""
        if output_split_sizes is None:
            return even_gather(x, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: len(x)] = x
        out = x.new_empty((len(sizes) * max(sizes), *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(out, padded, group=group)
        return torch.cat([share[:size] for share, size in zip(out.split(max(1, max(sizes))), sizes, strict=False)])

    gather.padded = True
    mappings._gather_along_first_dim = gather
