"""A stub of CANN: with it, the real torch_npu and vllm-ascend run on a machine that has no CANN and no NPU.

`environment` makes it for the torch_npu of run_tests.sh, and `host_environment` for that of another Python. The shared
libraries of torch_npu need functions of CANN's libraries. The stub defines all of them: allocations and copies use the
memory of the host; the others, kernels and collectives among them, do nothing and return 0, which means success. This
serves imports and calls under FakeTensorMode. It needs a C compiler and nm and readelf of binutils.

In a process with the variables of `host_environment`, `install` prepares the imports, and under `mode` torch's own
operators run on the CPU, on the memory of their tensors. Operators of torch_npu and of vllm-ascend have no kernels for
a CPU: they check their arguments and give zeros of the right shapes. So shapes, placement, copies and Python code are
real; what a model computes is not.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = """from importlib.util import find_spec
print(*(find_spec(name).submodule_search_locations[0] for name in ("torch", "torch_npu")))"""

TOOLS = ("cc", "nm", "readelf")
# torch_npu also looks up functions of CANN by their names when it runs. Their names are texts in its libraries.
NAMES = re.compile(rb"(?<![A-Za-z0-9_])(?:acl(?:rt|mdl|prof|sys|op|tdt|nn)?|Hccl)[A-Z][A-Za-z0-9]+(?=\0)")

HEADER = "".join(f"#include <{name}.h>\n" for name in ("stddef", "stdint", "stdlib", "string"))
COPY = "(void *to, size_t room, const void *from, size_t bytes, int kind) { memcpy(to, from, bytes); return 0; }"
ALLOCATE = "{ *out = aligned_alloc(512, (bytes + 511) / 512 * 512); return 0; }"
HANDLE = "{ *out = (void *)16; return 0; }"  # any address but 0; nobody reads what is there
# Functions whose answer torch_npu reads: the machine is a 910C with 16 devices of 64 GiB.
ANSWERS = {
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910_9392"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no error: this is a stub of CANN"; }',
    "aclGetCompileoptSize": "size_t aclGetCompileoptSize(int option) { return 8; }",
    "aclGetCompileopt": "int aclGetCompileopt(int option, char *value, size_t size) { *value = 0; return 0; }",
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(uint32_t *count) { *count = 16; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int32_t *device) { *device = 0; return 0; }",
    "aclrtGetMemInfo": "int aclrtGetMemInfo(int k, size_t *free, size_t *all) { *free = *all = 1ull << 36; return 0; }",
    **{name: f"int {name}{COPY}" for name in ("aclrtMemcpy", "aclrtMemcpyAsync")},
    **{
        name: f"int {name}(void **out, size_t bytes, int policy) {ALLOCATE}"
        for name in ("aclrtMalloc", "aclrtMallocAlign32", "aclrtMallocHost")
    },
    **{
        name: f"int {name}(void **out) {HANDLE}"
        for name in (
            "aclrtCreateContext", "aclrtCreateEvent", "aclrtCreateEventExWithFlag", "aclrtCreateEventWithFlag",
            "aclrtCreateStream", "aclrtCreateStreamWithConfig", "aclrtGetCurrentContext",
        )
    },
}  # fmt: skip


def missing_tools() -> list[str]:
    """The programs that the stub needs and this machine lacks."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def environment(torch_npu_dir: Path, stub: Path) -> dict[str, str]:
    """Build the stub in the folder ``stub``; return the variables of a process of this Python that imports torch_npu.

    Such a process can also import the product and tests/support.
    """
    build(torch_npu_dir / "torch_npu", Path(importlib.util.find_spec("torch").origin).parent, stub)
    paths = (torch_npu_dir.resolve(), ROOT, ROOT / "tests" / "support")
    # With ASCEND_HOME_PATH, torch_npu would look for files of CANN in that folder.
    return {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_")} | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LD_LIBRARY_PATH": str(stub.resolve()),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu imports torch; torch must not import torch_npu meanwhile
    }


def host_environment(python: str, stub: Path) -> dict[str, str]:
    """Build the stub for the torch_npu of the Python ``python``; return the variables of its processes."""
    variables = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([python, "-c", PACKAGES], env=variables, capture_output=True, text=True, check=True)
    torch, torch_npu = map(Path, done.stdout.split())
    build(torch_npu, torch, stub)
    (stub / "libopapi.so").symlink_to(stub / "cann.so")  # there torch_npu looks for kernels: functions aclnn...
    return {name: value for name, value in variables.items() if not name.startswith(("ASCEND_", "VLLM_"))} | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support"))),
        "LD_LIBRARY_PATH": str(stub),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TASK_QUEUE_ENABLE": "0",  # each operator is finished when its call returns
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",  # as npu_env.sh; the stub maps no virtual memory
    }


def build(torch_npu: Path, torch: Path, stub: Path) -> None:
    """Make the stub of the CANN that this torch_npu needs in the folder ``stub``. RuntimeError if the compiler fails.

    ``torch_npu`` and ``torch`` are the folders of the two packages.
    """
    libraries = [*torch_npu.glob("_C*.so"), *(torch_npu / "lib").glob("*.so")]
    given = [*libraries, *(torch / "lib").glob("*.so*")]
    present = {path.name for path in given}
    paths = {name: _of_the_system(name) for name in _needed(libraries) if name not in present}
    given += [path for path in paths.values() if path]
    stub.mkdir(parents=True, exist_ok=True)
    source, library = stub / "cann.c", stub / "cann.so"
    source.write_text(HEADER + "".join(f"{_function(name)}\n" for name in sorted(_names(libraries, given))))
    _run("cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(source))
    for name, path in paths.items():
        if path is None:  # every library has all functions, so each is found in the one where torch_npu looks it up
            shutil.copy(library, stub / name)


def _function(name: str) -> str:
    """The C code of a function. The names of C++ functions are those of the linker, which C accepts."""
    return ANSWERS.get(name, f"long {name}(void) {{ return 0; }}")


def _names(libraries: list[Path], given: list[Path]) -> set[str]:
    """The functions that ``libraries`` want and that neither ``given`` nor Python has."""
    names = _symbols("--undefined-only", libraries) - _symbols("--defined-only", given)
    looked_up = {text.decode() for path in libraries for text in NAMES.findall(path.read_bytes())}
    return {name for name in names if not name.startswith(("Py", "_Py"))} | looked_up | ANSWERS.keys()


def _symbols(which: str, libraries: list[Path]) -> set[str]:
    """The dynamic symbols of ``libraries``, without versions ("malloc@GLIBC_2.2.5").

    Undefined weak symbols are left out, because a library loads without them.
    """
    lines = map(str.split, _run("nm", "-D", which, *map(str, libraries)).splitlines())
    return {fields[-1].partition("@")[0] for fields in lines if len(fields) > 1 and fields[-2] not in ("w", "v")}


def _needed(libraries: list[Path]) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-d", *map(str, libraries))))


def _of_the_system(name: str) -> Path | None:
    """The path of a library of the system, where the compiler finds it; else its answer is the name alone."""
    answer = _run("cc", f"-print-file-name={name}").strip()
    return Path(answer) if "/" in answer else None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ...: {done.stderr.strip()[-2000:]}")
    return done.stdout


# ------------------------------------------------------------------------------------ modules that have every name


class Stub:
    """Stands for any name that a package imports or uses as a decorator, but that a test never calls."""

    def __call__(self, *args, **kwargs):
        if args and type(args[0]).__name__ == "OpOverload":  # a decorator of a converter of this operation
            return lambda function: function
        return args[0] if args and callable(args[0]) and not isinstance(args[0], Stub) else self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __getitem__(self, key):
        return 1  # the number of cores

    def __iter__(self):
        return iter(())

    def __mro_entries__(self, bases):
        return (object,)


class StubModule(types.ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__, self.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__version__ = "0"  # transformers asks whether torchvision is newer than some version

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()


class StubFinder:
    """Finds the modules of ``packages`` that are not in sys.modules. Its place is at the start of sys.meta_path."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path=None, target=None):
        root = name.split(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if root in self.packages else None

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module) -> None:
        pass


# ------------------------------------------------------------------------------------------------ a host as the device

calls: Counter[str] = Counter()  # of the operators that have a stand-in here
in_python: dict = {}  # operators of vLLM and vllm-ascend that are Python functions
kept = []  # registrations of a library end with the object


def install() -> None:
    """Import torch_npu, and give CANN's Python package, torchvision, fla_npu and the compiled operators stand-ins."""
    sys.meta_path.insert(0, StubFinder("acl", "torchvision", "fla_npu"))
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
    if not importlib.metadata.version("vllm-ascend").startswith("0.23."):  # 0.23 does without its compiled module
        sys.modules["vllm_ascend.vllm_ascend_C"] = types.ModuleType("vllm_ascend.vllm_ascend_C")
    # vllm-ascend's own operators, which need CANN's compiler
    own = torch.library.Library("_C_ascend", "FRAGMENT")
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


def _add_rms_norm(x1, x2, *args):
    import torch

    return _count("add_rms_norm", (torch.zeros_like(x1), x1.new_empty(*x1.shape[:-1], 1), torch.zeros_like(x1)))


OPERATORS = {  # schema in csrc/torch_binding.cpp of vllm-ascend 0.23.0 and 0.30.0rc2 -> function
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) "
    "-> (Tensor y, Tensor rstd, Tensor x)": _add_rms_norm,
    "device_print(str msg) -> ()": _count,
    "device_print_tensor(Tensor x) -> ()": _count,
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
