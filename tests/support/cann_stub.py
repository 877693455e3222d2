"""A stub of CANN. With it, the real torch_npu and vllm-ascend run on a machine that has no CANN and no NPU.

`environment` makes it for the torch_npu of run_tests.sh, and `host_environment` for that of another Python. The shared
libraries of torch_npu need functions of CANN's libraries, and the stub defines all of them. Allocations and copies use
the memory of the host. All other functions, including kernels and collectives, do nothing and return 0, which means
success. This is enough for imports and for calls under FakeTensorMode. It needs a C compiler, and nm and readelf of
binutils.

In a process with the variables of `host_environment`, `install` prepares the imports. Under `mode`, torch's own
operators run on the CPU, on the memory of their tensors, so weights can be loaded and copied. Operators of torch_npu
and of vllm-ascend have no kernels for a CPU, so no forward pass is possible.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
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
            "aclrtCreateContext",
            "aclrtCreateEvent",
            "aclrtCreateEventExWithFlag",
            "aclrtCreateEventWithFlag",
            "aclrtCreateStream",
            "aclrtCreateStreamWithConfig",
            "aclrtGetCurrentContext",
        )
    },
}


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
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",  # as launch/npu_env.sh; the stub maps no virtual memory
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


def describe_triton() -> None:
    """Give the stand-in for triton, for which a StubFinder exists, the version and device that MindSpeed reads."""
    target = types.SimpleNamespace(backend="npu", arch="Ascend910_9392", warp_size=0)
    importlib.import_module("triton").__version__ = "3.2.2"
    driver = importlib.import_module("triton.runtime.driver")
    driver.active = types.SimpleNamespace(get_current_target=lambda: target, utils=Stub())


def remove_stand_ins(*packages: str) -> None:
    """Let later imports find these packages as they are installed, or not at all."""
    for finder in sys.meta_path:
        if isinstance(finder, StubFinder):
            finder.packages = tuple(name for name in finder.packages if name not in packages)
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


# ------------------------------------------------------------------------------------------------ a host as the device


def install() -> None:
    """Import torch_npu, and give CANN's Python package, torchvision and fla_npu stand-ins."""
    sys.meta_path.insert(0, StubFinder("acl", "torchvision", "fla_npu"))
    import torch_npu  # noqa: F401


def on_host(tensor):
    """A CPU tensor on the memory of an NPU tensor."""
    import torch

    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())


def mode():
    """A context in which torch's own operators compute; those that only allocate, or make a view, run as they are."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    as_it_is = re.compile("aten::(empty|resize_|set_|record_stream|is_pinned|_pin_memory)")

    def is_npu(x) -> bool:
        device = x.device if isinstance(x, torch.Tensor) else x
        return isinstance(device, torch.device) and device.type == "npu"

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            npus = [x for x in tree_leaves((args, kwargs)) if is_npu(x)]
            aliases = [each.alias_info for each in operation._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            if not npus or is_view or as_it_is.match(operation._schema.name):
                return operation(*args, **kwargs)
            device = torch.device(kwargs.get("device") or getattr(npus[0], "device", npus[0]))
            given = {}

            def to_host(x):
                if isinstance(x, torch.Generator):
                    return torch.Generator().manual_seed(x.initial_seed())
                if not is_npu(x):
                    return x
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
                copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
                on_host(copy).copy_(x)
                return copy

            host_args, host_kwargs = tree_map(to_host, (args, kwargs))
            return tree_map(to_npu, operation(*host_args, **host_kwargs))

    return OnHost()
