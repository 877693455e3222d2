"""The real torch_npu with memory of the host as device memory, and with the CPU's kernels for torch's operators.

`environment` makes a stub of CANN (cann_stub.py) whose copies copy, and in which every kernel and collective does
nothing and succeeds. In a process that has these variables, `install` prepares the imports, and under `mode` torch's
own operators run on the CPU, on the memory of their tensors. Operators of torch_npu and of vllm-ascend have no kernels
for a CPU: they check their arguments and give zeros of the right shapes. So shapes, placement, copies and Python code
are real; what a model computes is not.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
PACKAGES = """from importlib.util import find_spec
print(*(find_spec(name).submodule_search_locations[0] for name in ("torch", "torch_npu")))"""
COPY = "(void *to, size_t room, const void *from, size_t bytes, int kind) { memcpy(to, from, bytes); return 0; }"

calls: Counter[str] = Counter()  # of the operators that have a stand-in here
in_python: dict = {}  # operators of vLLM and vllm-ascend that are Python functions
kept = []  # registrations of a library end with the object


def environment(python: str, stub: Path) -> dict[str, str]:
    """Build the stub for the torch_npu of the Python ``python``; return the variables of its processes."""
    import cann_stub

    variables = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([python, "-c", PACKAGES], env=variables, capture_output=True, text=True, check=True)
    folders = [Path(word) for word in done.stdout.split()]
    answers = cann_stub.ANSWERS | {name: f"int {name}{COPY}" for name in ("aclrtMemcpy", "aclrtMemcpyAsync")}
    # The kernels are functions whose names begin with aclnn; torch_npu looks for them in libopapi.so.
    names = re.compile(cann_stub.NAMES.pattern.replace(rb"|tdt)?", rb"|tdt|nn)?"))
    header = cann_stub.HEADER + "#include <string.h>\n"
    with mock.patch.multiple(cann_stub, ANSWERS=answers, NAMES=names, HEADER=header):
        cann_stub.build(folders[1], folders[0], stub)
    (stub / "libopapi.so").symlink_to(stub / "cann.so")
    return {name: value for name, value in variables.items() if not name.startswith(("ASCEND_", "VLLM_"))} | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support"))),
        "LD_LIBRARY_PATH": str(stub),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TASK_QUEUE_ENABLE": "0",  # each operator is finished when its call returns
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",  # as npu_env.sh; the stub maps no virtual memory
    }


def install() -> None:
    """Import torch_npu, and give CANN's Python package, torchvision and the compiled operators stand-ins."""
    from stub_modules import StubFinder

    sys.meta_path.insert(0, StubFinder("acl", "torchvision"))
    import torch
    import torch_npu  # noqa: F401
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions

    _register_atb_extensions()
    implement = torch.library.Library.impl

    def implement_and_remember(library, name, function, *args, **more):
        if isinstance(name, str) and library.ns == "vllm":
            in_python[f"vllm::{name}"] = function
        return implement(library, name, function, *args, **more)

    torch.library.Library.impl = implement_and_remember
    atb = torch.library.Library("atb", "IMPL")  # torch_npu's operators of another library of CANN
    for name in ("rotary_embedding", "reshape_and_cache", "paged_attention", "flash_attention", "matmul_add_fp32"):
        atb.impl(f"_npu_{name}", lambda *args, name=name, **more: _count(name), "PrivateUse1", allow_override=True)
    own = torch.library.Library("_C_ascend", "FRAGMENT")  # vllm-ascend's, which need CANN's compiler
    for schema, function in OPERATORS.items():
        own.define(schema)
        own.impl(schema.partition("(")[0], function, "PrivateUse1")
    kept.extend((atb, own))


def _count(name: str, result=None):
    calls[name] += 1
    return result


def _gating(x, k, *args, **more):
    """Every token takes the experts 0 to k - 1."""
    import torch

    ids = on_npu(torch.arange(k, dtype=torch.int32).repeat(len(x), 1), x.device)
    return _count("moe_gating_top_k", (x.new_empty(len(x), k), ids, x.new_empty(x.shape, dtype=torch.float32)))


def _routing(x, expert_idx, *, active_expert_range, **more):
    import torch

    rows, (first, last) = expert_idx.numel(), active_expert_range
    order = on_npu(torch.arange(rows, dtype=torch.int32), x.device)
    counts = on_npu(torch.zeros(last - first, dtype=torch.int64), x.device)
    result = (x.new_empty(rows, x.shape[1]), order, counts, x.new_empty(rows, dtype=torch.float32))
    return _count("npu_moe_init_routing_custom", result)


OPERATORS = {  # schema in csrc/torch_binding.cpp of vllm-ascend 0.23.0 -> function
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type, "
    "bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None) "
    "-> (Tensor y, Tensor expert_idx, Tensor out)": _gating,
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
    "bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)": _routing,
}


class SlotMapping:
    """vllm-ascend's Triton kernel _compute_slot_mapping_kernel: where in the cache each token of a step is written."""

    def __getitem__(self, grid):
        return self.compute

    def compute(self, num_tokens, max_tokens, starts, positions, table, stride, block_size, slots, *, PAD_ID, **more):
        starts, positions, table, slots = map(on_host, (starts, positions, table, slots))
        slots[num_tokens:max_tokens] = PAD_ID
        for row, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            if last > num_tokens or last < first:  # rows behind the last request
                break
            place = positions[first:last]
            slots[first:last] = (table[row, place // block_size] * block_size + place % block_size).to(slots.dtype)
        _count("slot_mapping")


# ------------------------------------------------------------------------------------------------ torch's operators


def on_host(tensor):
    """A CPU tensor on the memory of an NPU tensor."""
    import torch

    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_npu(tensor, device):
    """A copy of a CPU tensor on an NPU."""
    import torch

    result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    on_host(result).copy_(tensor)
    return result


def mode():
    """A context in which torch's own operators compute; those that only allocate, or make a view, run as they are."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    as_it_is = re.compile("aten::(empty|resize_|set_|record_stream|is_pinned|_pin_memory)")
    casts = dict.fromkeys(("npu::npu_dtype_cast", "npu::_npu_dtype_cast"), lambda x, dtype: x.to(dtype))
    generators: dict = {}

    def is_npu(x) -> bool:
        device = x.device if isinstance(x, (torch.Tensor, torch.Generator)) else x
        return isinstance(device, torch.device) and device.type == "npu"

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            npus = [x for x in tree_leaves((args, kwargs)) if is_npu(x) and not isinstance(x, torch.Generator)]
            if not npus:
                return operation(*args, **kwargs)
            if operation._can_decompose():  # in inference mode, operators made of others arrive whole
                with self:
                    return operation.decompose(*args, **kwargs)
            name, returns = operation._schema.name, operation._schema.returns
            if name in in_python:  # torch would run it without this mode
                with self:
                    return in_python[name](*args, **kwargs)
            view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
            compute = operation if name.startswith("aten::") else casts.get(name)
            if view or as_it_is.match(name):
                return operation(*args, **kwargs)
            if compute is None:
                result = operation(*args, **kwargs)
                if name.startswith("npu::"):
                    new = {id(x) for x in tree_leaves(result)} - {id(x) for x in tree_leaves((args, kwargs))}
                    for x in tree_leaves(result):
                        if id(x) in new and is_npu(x):
                            on_host(x).zero_()
                return result
            device = torch.device(kwargs.get("device") or getattr(npus[0], "device", npus[0]))
            given = {}

            def to_host(x):
                if not is_npu(x):
                    return x
                if isinstance(x, torch.Generator):
                    return generators.setdefault(x, torch.Generator().manual_seed(x.initial_seed()))
                if isinstance(x, torch.device):
                    return torch.device("cpu")
                host = on_host(x)
                given[id(host)] = host, x
                return host

            def to_npu(x):
                if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or device.type != "npu":
                    return x
                if id(x) in given:  # an operator in place, or with out=
                    return given[id(x)][1]
                return on_npu(x, device)

            host_args, host_kwargs = tree_map(to_host, (args, kwargs))
            return tree_map(to_npu, compute(*host_args, **host_kwargs))

    return OnHost()
