"""A fake Ascend NPU: tensors of device type 'npu' with their data on the CPU, torch.npu, an importable torch_npu with
the five kernels that kernels.py calls, and the 'hccl' backend on gloo.

It runs the Python code of `device: npu` and refuses what the hardware refuses: tensors of two devices in one operation,
reductions of float64, and arguments that a kernel's documentation excludes (docs/zh/custom_APIs/torch_npu of
github.com/Ascend/op-plugin, commit 517f2e7d). It does not imitate CANN's numerics, speed or memory. `install()` cannot
be undone, so call it in a separate process. All tensors are on npu:0, even after set_device, because torch supports one
device for backends in Python. Each kernel is its formula in torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.metadata
import os
import pkgutil
import sys
import time
import types
from collections.abc import Callable

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from cann_stub import Stub, StubFinder, StubModule, describe_triton
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

GROUPS: list[_Hccl] = []  # all hccl groups of this process
KERNELS: dict[str, int] = {}  # number of calls of each kernel
ON_HOST = "sort of whole numbers"  # which the hardware gives to the CPU of its host, so it is counted, too
SORTS = {torch.ops.aten.sort, torch.ops.aten.topk}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
REDUCED = (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64)
state = {"device": 0, "resizing": False}


def require(condition: object, message: str) -> None:
    """RuntimeError, as on the hardware, unless ``condition``."""
    if not condition:
        raise RuntimeError(message)


# ------------------------------------------------------------------------------------------------ tensors


class NpuTensor(Tensor):
    """A tensor of device npu:0. Its data is in ``raw``, a CPU tensor."""

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False):
        tensor = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device("npu", 0),
            requires_grad=requires_grad,
        )
        tensor.raw = raw
        return tensor

    def __init__(self, *args, **kwargs) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, classes, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def numpy(self, *, force: bool = False):
        require(force, "can't convert npu:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return self.raw.detach().numpy()

    def tolist(self):
        return self.raw.tolist()

    def record_stream(self, stream) -> None:
        pass

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, new: NpuTensor) -> None:
        Tensor.data.__set__(self, new)
        self.raw = new.raw.detach()


COPIES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten._copy_from.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._foreach_copy_.default,
}


def run(function, args: tuple, kwargs: dict):
    """Run an operation of torch, which takes or makes npu tensors, on their CPU data."""
    flat, raw = parts((args, kwargs)), mapped(_raw, (args, kwargs))
    on_npu = any(isinstance(x, NpuTensor) for x in flat)
    on_cpu = any(isinstance(x, Tensor) and not isinstance(x, NpuTensor) and x.dim() > 0 for x in flat)
    # Index tensors and tensors of one number may be on the CPU.
    if on_npu and on_cpu and function not in COPIES and "index" not in function.__name__:
        found = "found at least two devices, npu:0 and cpu!"
        raise RuntimeError(f"Expected all tensors to be on the same device, but {found} ({function})")
    require(not (on_npu and function.namespace == "c10d"), "No backend type associated with device type npu")
    devices = [x for x in flat if isinstance(x, torch.device)]
    if devices:
        on_npu = devices[0].type == "npu"
    if on_npu and function.overloadpacket in SORTS and not args[0].is_floating_point():
        KERNELS[ON_HOST] = KERNELS.get(ON_HOST, 0) + 1
    raw[1].update({"pin_memory": False} if kwargs.get("pin_memory") else {})
    out = function(*raw[0], **raw[1])
    for x in flat:  # out= and resize_ change the shape of the data, so the wrapper needs the new shape
        if isinstance(x, NpuTensor) and not state["resizing"] and x.size() != x.raw.size():
            state["resizing"] = True
            try:
                Tensor.data.__set__(x, NpuTensor(x.raw))
            finally:
                state["resizing"] = False
    if function is torch.ops.aten.copy_.default:
        return args[0]
    if function is torch.ops.aten._copy_from.default:
        return args[1]
    if not on_npu:
        return out
    # In inference mode only views of normal tensors are normal tensors.
    normal = function.is_view and not args[0].is_inference()
    with torch.inference_mode(False) if normal else contextlib.nullcontext():
        out = mapped(lambda x: NpuTensor(x) if isinstance(x, Tensor) and not isinstance(x, NpuTensor) else x, out)
    return return_and_correct_aliasing(function, args, kwargs, out)


def mapped(function: Callable, x):
    """``x`` with each part replaced by ``function(part)``. tree_map of torch takes seven times as long."""
    if isinstance(x, (list, tuple)):
        return type(x)([mapped(function, part) for part in x])
    if isinstance(x, dict):
        return {name: mapped(function, part) for name, part in x.items()}
    return function(x)


def parts(x) -> list:
    """All that lies in the lists, tuples and dictionaries of ``x``."""
    found: list = []
    mapped(found.append, x)
    return found


def _raw(x):
    if isinstance(x, NpuTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) else x


# ------------------------------------------------------------------------------------------------ torch.npu


class Stream:
    """A stream or event whose methods do nothing, because all operations are synchronous here."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


class Event(Stream):
    """Has the time of the host."""

    def record(self, stream=None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.time - self.time)


def torch_npu_module() -> types.ModuleType:
    """The parts of torch.npu that Megatron and the trainer use."""
    module = types.ModuleType("torch.npu")
    generator = torch.default_generator

    def set_device(device) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        require(0 <= index < module.device_count(), f"Invalid device ID {index}")
        state["device"] = index

    def device_count() -> int:
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        return 16 if visible is None else len(visible.split(","))

    module.set_device, module.device_count = set_device, device_count
    module.is_available = module.is_initialized = module.is_bf16_supported = lambda: True
    module._is_in_bad_fork = lambda: False
    module.init = module._lazy_init = module.empty_cache = lambda: None
    module.current_device = lambda: state["device"]
    module.synchronize = module.reset_peak_memory_stats = lambda device=None: None
    module.get_device_name = lambda device=None: "Ascend910_9392"
    module.mem_get_info = lambda device=None: (60 * 2**30, 61 * 2**30)
    module.memory_allocated = module.max_memory_allocated = module.memory_reserved = lambda device=None: 0
    module.manual_seed = module.manual_seed_all = lambda seed: generator.manual_seed(seed)
    module.initial_seed = lambda: generator.initial_seed()
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda new_state, device=None: generator.set_state(new_state)
    module.default_generators = (generator,) * 16
    module._lazy_call = lambda function, **kwargs: function()
    module.Stream, module.Event = Stream, Event
    module.current_stream = module.default_stream = lambda device=None: Stream()
    module.stream = module.device = lambda chosen: contextlib.nullcontext()
    return module


# ------------------------------------------------------------------------------------------------ hccl


class _Hccl(dist.ProcessGroup):
    """The collectives of hccl, run by gloo. ``used``: the hardware would have built a communicator at the first use."""

    group_name = group_desc = ""  # the base has properties of these names

    def __init__(self, options, pg_options) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self.own_rank, self.ranks = options.group_rank, options.group_size
        self.members = options.global_ranks_in_group
        self.buffer_mib = getattr(pg_options, "hccl_config", {}).get("hccl_buffer_size")
        self.used = False
        GROUPS.append(self)

    def data(self, x, reduced: bool = False):
        """The CPU data of npu tensors. RuntimeError if hccl would refuse the tensors."""
        self.used = True
        if isinstance(x, (list, tuple)):
            return [self.data(y, reduced) for y in x]
        require(x.device.type == "npu", f"No backend type associated with device type {x.device.type}")
        require(x.is_contiguous(), "Tensors must be contiguous")
        require(not reduced or x.dtype in REDUCED, f"HCCL reduction: unsupported data type {x.dtype}")
        return x.raw

    def allreduce(self, tensors, options=None):
        return self.gloo.allreduce(self.data(tensors, True), options or c10d.AllreduceOptions())

    def broadcast(self, tensors, options=None):
        return self.gloo.broadcast(self.data(tensors), options or c10d.BroadcastOptions())

    def allgather(self, out, given, options=None):
        return self.gloo.allgather(self.data(out), self.data(given), options or c10d.AllgatherOptions())

    def _allgather_base(self, out, given, options=None):
        return self.gloo._allgather_base(self.data(out), self.data(given), options or c10d.AllgatherOptions())

    def _reduce_scatter_base(self, out, given, options=None):
        return self.gloo._reduce_scatter_base(
            self.data(out), self.data(given, True), options or c10d.ReduceScatterOptions()
        )

    def alltoall_base(self, out, given, out_splits, in_splits, options=None):
        options = options or c10d.AllToAllOptions()
        return self.gloo.alltoall_base(self.data(out), self.data(given), out_splits, in_splits, options)

    def barrier(self, opts=None):  # torch passes this name
        self.used = True
        return self.gloo.barrier(c10d.BarrierOptions())

    # the names in torch 2.13
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def getBackendName(self) -> str:
        return "hccl"

    name = getBackendName

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own_rank

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self.group_desc = desc


# ------------------------------------------------------------------------------------------------ kernels


def kernel(function: Callable) -> Callable:
    """Count the calls of a torch_npu function, and refuse other tensors than npu tensors of one floating-point type."""

    @functools.wraps(function)
    def checked(*args, **kwargs):
        KERNELS[function.__name__] = KERNELS.get(function.__name__, 0) + 1
        tensors = [x for x in parts((args, kwargs)) if isinstance(x, Tensor)]
        require(all(isinstance(x, NpuTensor) for x in tensors), f"{function.__name__}: a tensor is not on the npu")
        dtypes = {x.dtype for x in tensors} - {torch.bool, torch.int64}
        require(len(dtypes) == 1 and dtypes <= set(FLOATS), f"{function.__name__}: unsupported types {dtypes}")
        return function(*args, **kwargs)

    return checked


@kernel
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    require(x.dim() >= 2 and gamma.shape == x.shape[-1:], f"npu_rms_norm: {tuple(x.shape)}, {tuple(gamma.shape)}")
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * gamma, scale


@kernel
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    require(x.numel() and x.is_contiguous(), f"npu_swiglu: empty or strided: {tuple(x.shape)}, {x.stride()}")
    require(x.shape[dim] % 2 == 0, f"npu_swiglu: no two halves: {tuple(x.shape)}")
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


@kernel
def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    require(rotary_mode == "half" and x.is_contiguous(), "npu_rotary_mul: mode half of a contiguous x is imitated")
    where, (first, second, heads, d) = f"npu_rotary_mul: {tuple(x.shape)}, {tuple(r1.shape)}", x.shape
    require(d % 2 == 0 and d < 896, f"{where}: heads must have an even size below 896")
    batch = {(first, 1, 1, d): second, (1, second, 1, d): first}.get(tuple(r1.shape))  # layouts SBND and BSND
    require(batch and r1.shape == r2.shape, f"{where}: angles have size 1 for batch and heads")
    require(batch < 1000 and heads < 1000, f"{where}: a batch and a number of heads below 1000")
    first, second = x.chunk(2, -1)
    return x * r1 + torch.cat((-second, first), -1) * r2


@functools.cache
def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


@kernel
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse=None,
    padding_mask=None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple:
    where = "npu_fusion_attention"
    require(input_layout == "BNSD" and sparse_mode in (0, 2) and keep_prob == 1.0, f"{where}: only what is asked for")
    KERNELS[f"{where}, sparse_mode {sparse_mode}"] = KERNELS.get(f"{where}, sparse_mode {sparse_mode}", 0) + 1
    require(all(x.is_contiguous() for x in (query, key, value, atten_mask)), f"{where}: a strided tensor")
    require(head_num == query.shape[1] and atten_mask.dtype == torch.bool, f"{where}: {head_num}, {atten_mask.dtype}")
    (b, heads, queries, d), kv_heads = query.shape, key.shape[1]
    require(key.shape == value.shape == (b, kv_heads, key.shape[2], d), f"{where}: {key.shape}, {value.shape}")
    require(1 <= d <= 768 and 1 <= heads <= 256 and heads % kv_heads == 0, f"{where}: heads {query.shape}, {key.shape}")
    require(b and 1 <= queries <= 2**20 and 1 <= key.shape[2] <= 2**20, f"{where}: rows {query.shape}, {key.shape}")
    hidden = atten_mask.raw
    if sparse_mode == 2:  # the causal mask of this size stands for that of any size
        require(torch.equal(hidden, causal(2048, 2048)), f"{where}: not the causal mask")
        hidden = causal(query.shape[2], key.shape[2])
    else:
        require(hidden.shape == (b, 1, queries, key.shape[2]), f"{where}: mask {hidden.shape}")
        require(min(pre_tockens, next_tockens) >= max(query.shape[2], key.shape[2]), f"{where}: a band in the mask")
    require(not hidden.all(-1).any(), f"{where}: a query sees no key")
    key, value = (x.repeat_interleave(head_num // x.shape[1], 1) for x in (key, value))
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    weights = scores.masked_fill(NpuTensor(hidden), float("-inf")).softmax(-1)
    statistics = scores.detach().amax(-1, keepdim=True)
    return (weights.to(query.dtype) @ value, statistics, statistics, query.new_empty(0), 0, 0, 0)


@kernel
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias=None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:
    where = "npu_grouped_matmul"
    require(isinstance(x, list) and isinstance(weight, list) and len(x) == len(weight) == 1, f"{where}: lists of one")
    require(bias is None and split_item in (2, 3) and group_list_type == 1, f"{where}: only what kernels.py asks for")
    (x,), (weight,), counts = x, weight, group_list.tolist()
    require(len(x), f"{where}: no rows")
    require(x.dim() == 2 and x.shape[1] == weight.shape[-2], f"{where}: inner sizes {x.shape}, {weight.shape}")
    require(group_list.dtype == torch.int64 and 2 <= len(counts) <= 1024, f"{where}: sizes {counts}")
    require(
        max(x.shape[1 if group_type == 0 else 0], weight.shape[-1]) < 65536,
        f"{where}: widths {x.shape}, {weight.shape}",
    )
    if group_type == 0:  # the groups split the rows of x
        require(x.is_contiguous(), f"{where}: x must be contiguous")
        require(weight.is_contiguous() or weight.transpose(1, 2).is_contiguous(), f"{where}: weight {weight.stride()}")
        require(sum(counts) == len(x) and len(counts) == len(weight), f"{where}: {counts} of {x.shape}, {weight.shape}")
        return [torch.cat([block @ weight[e] for e, block in enumerate(x.split(counts))])]
    require(group_type == 2, f"{where}: group_type {group_type}")  # the groups split the summed axis
    require(x.t().is_contiguous() and weight.is_contiguous(), f"{where}: x must be a transposed view")
    require(sum(counts) == x.shape[1], f"{where}: {counts} of {x.shape}")
    return [torch.stack([a @ b for a, b in zip(x.split(counts, 1), weight.split(counts), strict=True)])]


FUNCTIONS = (npu_rms_norm, npu_swiglu, npu_rotary_mul, npu_fusion_attention, npu_grouped_matmul)

# ------------------------------------------------------------------------------------------------ torch_npu


def transfer_to_npu() -> None:
    """Make cuda mean npu, as an import of torch_npu.contrib.transfer_to_npu does, as far as Megatron uses it."""
    for name in dir(torch.npu):
        if not name.startswith("__"):
            setattr(torch.cuda, name, getattr(torch.npu, name))
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "initial_seed"):
        setattr(torch.cuda.random, name, getattr(torch.npu, name))

    def renamed(x):
        if isinstance(x, str) and x.startswith("cuda"):
            return x.replace("cuda", "npu")
        return torch.device("npu") if isinstance(x, torch.device) and x.type == "cuda" else x

    def rename(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            device = {"device": _device(renamed(kwargs["device"]))} if "device" in kwargs else {}
            return function(*map(renamed, args), **(kwargs | device))

        return wrapped

    for name in ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros", "empty_like", "zeros_like"):
        setattr(torch, name, rename(getattr(torch, name)))
    Tensor.to, torch.nn.Module.to = rename(Tensor.to), rename(torch.nn.Module.to)
    Tensor.cuda, Tensor.is_cuda, torch.nn.Module.cuda = Tensor.npu, Tensor.is_npu, torch.nn.Module.npu


def mindspeed_patches() -> dict[str, Callable]:
    """Name of a torch function -> its replacement by MindSpeed's adaptor; without the replacements of CUDA functions.

    From features_manager/megatron_basic/requirements_basic.py and fusions/grouped_matmul.py of its branch
    core_r0.16.0. test_npu.py compares these names with those of a real checkout.
    """
    view, all_reduce, version = Tensor.view, dist.all_reduce, importlib.metadata.version

    @functools.wraps(view)
    def view_of_contiguous(tensor: Tensor, *args, **kwargs):
        """A write into the view of a non-contiguous tensor is lost, because it goes to the copy."""
        return view(tensor.contiguous(), *args, **kwargs)

    @functools.wraps(all_reduce)
    def all_reduce_of_a_copy(tensor: Tensor, *args, **kwargs):
        """A reduction of float64 is lost, because it goes to the fp32 copy."""
        if torch.is_tensor(tensor) and tensor.dtype == torch.float64:
            all_reduce(tensor.float(), *args, **kwargs)
            return None
        return all_reduce(tensor, *args, **kwargs)

    def not_compiled(*args, **kwargs):
        return args[0] if args and callable(args[0]) else lambda function: function

    def named_cuda(function: Callable) -> Callable:
        def type_of(tensor: Tensor, *args, **kwargs):
            found = function(tensor, *args, **kwargs)
            return found.replace("npu", "cuda") if isinstance(found, str) else found

        return functools.wraps(function)(type_of)

    return {
        "importlib.metadata.version": lambda name: "2.2.0" if name == "transformer-engine" else version(name),
        "torch.Tensor.type": named_cuda(Tensor.type),
        "torch.Tensor.view": view_of_contiguous,
        "torch._C._jit_set_nvfuser_enabled": lambda *args, **kwargs: None,
        "torch.compile": not_compiled,
        "torch.distributed._all_gather_base": dist.all_gather_into_tensor,
        "torch.distributed._reduce_scatter_base": dist.reduce_scatter_tensor,
        "torch.distributed.all_reduce": all_reduce_of_a_copy,
        "torch.jit.script": not_compiled,
        "torch.nn.parameter.Parameter.type": named_cuda(torch.nn.Parameter.type),
    }


def patch_as_mindspeed() -> None:
    """Apply mindspeed_patches(), also in all modules that have imported an original by name."""
    for name, replacement in mindspeed_patches().items():
        path, _, attribute = name.rpartition(".")
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, attribute)
        setattr(owner, attribute, replacement)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(attribute) is original:
                setattr(module, attribute, replacement)


def _device(x):
    return torch.device("npu", x) if isinstance(x, int) and not isinstance(x, bool) else x


class _Contrib(types.ModuleType):
    """torch_npu.contrib. As on the hardware, an import of transfer_to_npu patches torch."""

    def __getattr__(self, name: str):
        if name != "transfer_to_npu":
            raise AttributeError(name)
        transfer_to_npu()
        self.transfer_to_npu = types.ModuleType("torch_npu.contrib.transfer_to_npu")
        return self.transfer_to_npu


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True


STUBBED = ("scipy", "torchair", "triton", "torch_npu")
libraries = []  # the registrations of a library end with the object


def install(stubs: bool = False) -> None:
    """Give this process 16 NPUs, or as many as ASCEND_RT_VISIBLE_DEVICES lists.

    torch is patched as MindSpeed patches it, so that code that fails only under MindSpeed fails here too. With
    ``stubs``, the real MindSpeed patches torch, and torch_npu, torchair and triton have empty stand-ins for the names
    that it imports.
    """
    npu = torch_npu_module()
    _setup_privateuseone_for_python_backend(rename="npu", backend_module=npu, hook=_Hooks())
    every, aten, autocast = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "_"))
    every.fallback(lambda operation, *args, **kwargs: run(operation, args, kwargs), "PrivateUse1")
    for operation in (torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default):
        name = operation.overloadpacket.__name__
        aten.impl(name, functools.partial(lambda op, *args, **kwargs: run(op, args, kwargs), operation), "PrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    libraries.extend((every, aten, autocast))

    module = (StubModule if stubs else types.ModuleType)("torch_npu")
    if stubs:
        sys.meta_path.insert(0, StubFinder(*STUBBED))
        describe_triton()
        npu.mstx, npu.__path__ = Stub(), []
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None, is_package=True)
    module.__path__, module.__file__, module.__version__, module.npu = [], __file__, "0.0+fake", npu
    module.contrib = _Contrib("torch_npu.contrib")
    options = types.SimpleNamespace(Options=types.SimpleNamespace)
    module._C = types.SimpleNamespace(_distributed_c10d=types.SimpleNamespace(ProcessGroupHCCL=options))
    for function in FUNCTIONS:
        setattr(module, function.__name__, function)
    names = {"torch_npu": module, "torch.npu": npu, "torch_npu.npu": npu, "torch_npu.contrib": module.contrib}
    sys.modules.update(names)
    dist.Backend.register_backend("hccl", _Hccl, extended_api=True, devices=["npu"])
    if not stubs:
        patch_as_mindspeed()
