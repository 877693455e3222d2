"""Builds a stub of CANN, with which the real torch_npu can be imported on a machine that has no CANN and no NPU.

    python tests/support/cann_stub.py TORCH_NPU_DIR STUB COMMAND ...

makes the folder STUB and runs COMMAND so that it can import torch_npu. TORCH_NPU_DIR is the folder into which pip has
installed torch_npu (run_tests.sh: .cache/torch_npu-2.13.0).

The shared libraries of torch_npu need functions of CANN's libraries. The stub defines all of them: they do nothing and
return 0, which means success. It serves imports and calls under FakeTensorMode, which run no kernel. It needs a
C compiler and nm and readelf of binutils.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("cc", "nm", "readelf")
# torch_npu also looks up functions of CANN by their names when it runs. Their names are texts in its libraries.
NAMES = re.compile(rb"(?<![A-Za-z0-9_])(?:acl(?:rt|mdl|prof|sys|op|tdt)?|Hccl)[A-Z][A-Za-z0-9]+(?=\0)")

HEADER = "#include <stddef.h>\n#include <stdint.h>\n#include <stdlib.h>\n#define GIB (1ull << 30)\n"
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
    "aclrtGetMemInfo": "int aclrtGetMemInfo(int k, size_t *free, size_t *max) { *free = *max = 64 * GIB; return 0; }",
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


if __name__ == "__main__":
    torch_npu_dir, stub, *command = sys.argv[1:]
    os.execvpe(command[0], command, environment(Path(torch_npu_dir), Path(stub)))
