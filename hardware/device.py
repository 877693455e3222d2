"""Chooses and starts the device that the code runs on, and corrects Megatron for it. kernels.py has the operations.

The code has run on CPUs and on one GPU (docs/gpu.md). The code for the NPU has run only on an imitation of the device
(tests/support/fake_npu.py). The order of the start-up in parallel_setup.open_world matters: set_environment -> resolve
(torch_npu) -> adapt (MindSpeed, before Megatron) -> select (set_device) -> make_deterministic -> the groups.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from facts import variables
from facts.exits import InputError
from facts.limits import HCCL_BUFFER_MIB
from hardware import kernels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # model.dtype -> the type of the weights
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # type of the device -> its torch.distributed backend
# These variables limit the devices that a process sees. The driver reads them. Only the user sets them, never this
# code.
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


# ------------------------------------------------------------------------------------------------ start-up


def set_environment(name: str, deterministic: bool) -> None:
    """Set the environment variables that must exist before the first operation; ``name`` is as in `resolve`.

    Existing values are kept. Raises InputError if an existing value contradicts train.deterministic.
    """
    # torch asks Linux for huge pages for large tensors, which keeps the heap of a CPU run smaller.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    kinds = ("npu", "cuda") if name == "auto" else (name,)
    for kind in kinds if deterministic else ():
        for variable in variables.DETERMINISTIC[kind]:
            found = os.environ.setdefault(variable.name, variable.value)
            if not variable.allows(found):
                raise InputError(
                    f"train.deterministic: true, but {variable.name} is {found} in the environment; set it to "
                    f"{' or '.join((variable.value, *variable.accepted))}, or unset it"
                )


@functools.cache
def resolve(name: str) -> torch.device:
    """Return the device for `device: auto | npu | cuda | cpu`; auto is the first of npu, cuda and cpu that exists.

    The first answer for a name is cached, because torch.cuda means the NPU after MindSpeed is imported. Raises
    InputError if the device cannot be used. With auto, it is also raised if torch_npu is installed but does not work. A
    user who has installed torch_npu does not want to train on the CPU.
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
        raise InputError(f"device: {name}: torch_npu is not installed; install requirements/npu.txt")
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            f"device: {name}: torch_npu does not load ({error}); set CANN's variables with `source set_env.sh` of its "
            "toolkit and of nnal/atb"
        ) from None
    if not torch.npu.is_available():
        raise InputError(
            f"device: {name}: torch_npu sees no NPU; make one visible that npu-smi lists; {VISIBLE['npu']} is "
            f"{_visible('npu')}"
        )


def _visible(kind: str) -> str:
    return os.environ.get(VISIBLE[kind], "unset")


@functools.cache  # once per process
def adapt(device: torch.device) -> None:
    """Redirect Megatron's CUDA calls to the NPU. On other devices, do nothing.

    If MindSpeed is installed, its adaptor redirects them. Ascend tests Megatron with MindSpeed, which may correct
    faults that we have not seen. MindSpeed is not required, because our model needs only two of its corrections. Calls
    to torch.cuda must go to torch.npu; without MindSpeed, transfer_to_npu of torch_npu redirects them. torch.compile
    must do nothing while Megatron is imported; import_megatron ensures this. Norms, attention, rotary embedding and
    experts are our own, and model/megatron_model.py switches off Transformer Engine, apex and the CUDA kernels that
    MindSpeed replaces. Raises RuntimeError if Megatron, or with MindSpeed also transformers, is imported already.
    """
    if device.type != "npu":
        return
    if early := sorted(name for name in sys.modules if name.split(".")[0] == "megatron"):
        raise RuntimeError(
            f"device.adapt: {early[0]} is imported already; MindSpeed must be imported before any part of Megatron, "
            "otherwise it silently adapts only some of it"
        )
    if importlib.util.find_spec("mindspeed") is None:
        from torch_npu.contrib import transfer_to_npu  # noqa: F401

        return
    if "transformers" in sys.modules:
        raise RuntimeError(
            "device.adapt: transformers is imported already; MindSpeed looks up the names that it replaces in every "
            "imported module, and transformers then imports all its models, which fails without torchvision"
        )
    arguments, sys.argv = sys.argv, sys.argv[:1]  # MindSpeed would parse ours and put them into every model's config
    try:
        from mindspeed.megatron_adaptor import repatch

        repatch({"use_flash_attn": True})  # as in verl; our attention calls the same kernel
    finally:
        sys.argv = arguments
    _remove_dummies()


def _remove_dummies() -> None:
    """Remove the empty modules that MindSpeed has put into sys.modules for packages that are not installed.

    vLLM and transformers would use them as if they were real. For example, vLLM 0.23 imports flash_attn.ops if it finds
    flash_attn. A dummy inside an installed package stays, because it adds a name that this package lacks.
    """
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    dummies = {name for name, file in files.items() if file == "mindspeed.dummy_module.py"}
    for name in dummies:
        if name.partition(".")[0] in dummies:
            del sys.modules[name]


def select(device: torch.device) -> None:
    """Make the visible device with number LOCAL_RANK the current device. Raises InputError if it does not exist.

    On a GPU, this also switches off cuDNN's attention.
    """
    if device.type == "cpu":
        return
    module = getattr(torch, device.type)
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), module.device_count()
    if local_rank >= count:
        raise InputError(
            f"LOCAL_RANK: {local_rank} needs {local_rank + 1} {device.type} devices on this host, which has {count} "
            f"({VISIBLE[device.type]} is {_visible(device.type)}); use --nproc_per_node of at most {count}"
        )
    module.set_device(local_rank)
    if device.type == "cuda":
        # cuDNN's backward pass returns NaN at some shapes (pytorch issue 196678). Each new shape costs half a second.
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextlib.contextmanager
def internal_formats_restored(device: torch.device) -> Iterator[None]:
    """Restore torch_npu's setting for tiled tensors at the end of this block.

    The setting decides whether torch_npu may tile tensors. Importing vllm-ascend allows tiling for the whole process,
    including the trainer. The effect on the trainer is not known.
    """
    if device.type != "npu":
        yield
        return
    import torch_npu

    found = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
    yield
    torch.npu.config.allow_internal_format = found != b"disable"


def name(device: torch.device) -> str:
    """Return the driver's name for this rank's device, or "cpu" for a CPU."""
    return "cpu" if device.type == "cpu" else getattr(torch, device.type).get_device_name()


def make_deterministic(device: torch.device) -> None:
    """Make torch use deterministic kernels, and raise an error for operations that have none.

    If torch only warned, its attention would still add gradients in any order. On a CPU there is nothing to do.
    set_environment sets the variables of the libraries that torch does not control.
    """
    if device.type != "cpu":
        torch.use_deterministic_algorithms(True)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished all its operations."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def moment(device: torch.device) -> Any:
    """Mark the moment when ``device`` finishes all work that it has been given so far.

    The result is an event in the device's stream, or the current time on a CPU.
    """
    if device.type == "cpu":
        return time.perf_counter()
    event = getattr(torch, device.type).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, second: Any) -> float:
    """Return the seconds between two results of `moment`, after waiting for the later one."""
    if isinstance(first, float):
        return second - first
    second.synchronize()
    return first.elapsed_time(second) / 1e3


def median_milliseconds(job: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median wall time of ``repeats`` runs of ``job``, each of which ends when ``device`` has finished."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        job()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def release(device: torch.device) -> None:
    """Free the unused memory that torch keeps for later tensors, so that an engine can use it."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def peak_memory_gib(device: torch.device) -> float | None:
    """Return the peak GiB of device memory in use since the last call; None on a CPU, where it is not counted.

    The result is the peak of torch's tensors plus the memory that is now used outside of torch's pool, by runtime,
    driver and communicators.
    """
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type)
    free, total = module.mem_get_info()
    peak = module.max_memory_allocated() + total - free - module.memory_reserved()
    module.reset_peak_memory_stats()
    return peak / 2**30


def group_options(device: torch.device, name: str):
    """Return options for Megatron's process group ``name``, which set the size of its HCCL buffer.

    The result is None on devices other than NPUs, and for groups that are not in HCCL_BUFFER_MIB.
    """
    if device.type != "npu" or name not in HCCL_BUFFER_MIB:
        return None
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()  # a new one, because torch_npu writes into it
    options.hccl_config = {"hccl_buffer_size": HCCL_BUFFER_MIB[name]}
    return options


def profiler(device: torch.device) -> Any:
    """Return a profiler of the host and of ``device``, with the methods start, stop and export_chrome_trace(path).

    It comes from torch.profiler, or on an NPU from torch_npu, whose profiler has not been run.
    """
    if device.type == "npu":
        from torch_npu import profiler as module
    else:
        from torch import profiler as module
    kinds = {"CPU", device.type.upper()}
    return module.profile(activities=[getattr(module.ProfilerActivity, kind) for kind in sorted(kinds)])


# ------------------------------------------------------------------------------------------------ Megatron

# Modules of Megatron for features that we switch off. Those of FSDP import torch's distributed tensors and sympy, which
# takes 0.6 seconds; paged_stash, of versions from 0.18 on, imports triton.
UNUSED = (
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
    "megatron.core.distributed.torch_fully_sharded_data_parallel",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
    "megatron.core.transformer.moe.paged_stash",
)
DISTRIBUTED_TENSORS = "torch.distributed._tensor"


def import_megatron(device: torch.device) -> None:
    """Import the parts of Megatron that the model needs, and correct its assumptions that are wrong on ``device``.

    At its import, Megatron decorates functions with torch.compile, which loads torch's compiler. This takes a second,
    and serves only kernels that we switch off and that an NPU cannot run. So torch.compile does nothing during the
    import. A fake replaces each module in UNUSED. triton itself is not replaced, because torch would use a fake triton
    as if it were real. Megatron works without torch's distributed tensors, so this function makes Megatron's import of
    them fail, which saves time. Code that imports them later gets the real modules.
    """
    if device.type == "cpu":
        redirect_cuda()
    sys.modules |= {name: _NoStream() for name in UNUSED if name not in sys.modules}  # MindSpeed may import them first
    sys.modules.setdefault(DISTRIBUTED_TENSORS)  # with None its import raises ImportError, which Megatron catches
    compiler = torch.compile
    torch.compile = lambda model=None, **options: model if model is not None else lambda function: function
    try:
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.tensor_parallel
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
    finally:
        torch.compile = compiler
        if sys.modules[DISTRIBUTED_TENSORS] is None:
            del sys.modules[DISTRIBUTED_TENSORS]
    _correct_megatron(device)


class _NoStream:
    """A fake of torch.cuda.Stream, torch.cuda.Event or a module. Every method only returns the object itself."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def redirect_cuda() -> None:
    """Redirect megatron.core's torch.cuda calls to the CPU.

    megatron.core makes these calls when it is imported, and when it builds or runs a model.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = lambda *args: _NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # Not torch.manual_seed, which calls torch.cuda.manual_seed_all: that would be an endless recursion.
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def _correct_megatron(device: torch.device) -> None:
    """Replace megatron.core's functions for the rotary embedding and the order of the experts' rows.

    On a CPU, also replace those for the state of the random generator and for split sizes.
    """
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.attention as attention
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # Megatron 0.16.1 reads this name without importing it if Transformer Engine is not installed.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    # The model computes cos and sin once per forward pass (megatron_model.build), instead of twice in every layer.
    attention.apply_rotary_pos_emb = lambda x, cos_sin, *args, **kwargs: kernels.rotary(x, *cos_sin)
    returns_more = "align_size" in inspect.signature(moe_utils.permute).parameters  # as in 0.19.2
    token_dispatcher.permute = functools.partial(_permute, more=(None, None) if returns_more else ())
    token_dispatcher.unpermute = lambda rows, order, *args, **kwargs: kernels.combine_rows(rows, order)
    if device.type != "cpu":
        return
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # all_to_all_single does not accept tensors as split sizes, and Megatron converts CUDA tensors only.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, num_out_tokens: int, *, more: tuple = (), **unused
) -> tuple:
    """Return a row for each expert of each token, the rows' probabilities, and their order: by expert, then by token.

    Megatron's version finds the rows by masked_select, twice. Each time, the host waits for the number of rows,
    although it is known, because all tokens have the same number k of experts. ``more`` has the other results that
    Megatron expects. n is the number of tokens, h the hidden size, and E the number of experts.

    (n, h), (n, E), (n, E) -> (n k, h), (n k,), Order
    """
    experts_per_token = num_out_tokens // len(tokens)
    # Expert e gets the value E - e if it is chosen, so that topk returns the experts of a token in ascending order.
    worth = torch.arange(routing_map.shape[1], 0, -1, dtype=torch.float32, device=tokens.device)
    experts = (routing_map * worth).topk(experts_per_token).indices  # (n, k)
    sorted_pairs = kernels.sortable(experts.flatten()).argsort(stable=True)
    positions = torch.arange(len(sorted_pairs), device=tokens.device)
    inverse = torch.empty_like(positions).scatter_(0, sorted_pairs, positions).view_as(experts)
    order = kernels.Order(sorted_pairs // experts_per_token, inverse)
    row_probs = probs.gather(1, experts).flatten().index_select(0, sorted_pairs)
    return kernels.dispatch_rows(tokens, order), row_probs, order, *more


def keep_row_counts_on_device(dispatcher) -> None:
    """Make ``dispatcher`` pass on the rows, already sorted by expert, and the number of rows per expert.

    This is only for a model without expert parallelism. Megatron's version copies the counts to the host, waits for
    them, and sorts the rows again.
    """
    dispatcher.cuda_dtoh_point = "no_sync"
    dispatcher._maybe_update_cuda_sync_point = lambda point: None
    dispatcher.dispatch_postprocess = lambda rows, probs: (rows, dispatcher.tokens_per_expert, probs)
    dispatcher.combine_preprocess = lambda rows: rows
