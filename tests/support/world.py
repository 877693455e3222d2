"""The ranks of a test: forked gloo ranks of a CPU, so that torch and Megatron are imported only once.

With `pytest --device`, they are the ranks that torchrun has launched, each with its own pytest and the same tests. On a
single device, this process is the only rank. Every rank gets the answers of all ranks, so all ranks come to the same
verdict and stay in step.
"""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from torch.multiprocessing.spawn import ProcessException, start_processes

import parallel_setup
from hardware import device as devices
from knobs import ParallelConfig

LIMIT = 120  # seconds that launched ranks wait for each other
ANSWER = 600  # seconds until a rank that does not answer is ended
LAYOUTS = {  # name: (ranks, tensor, expert)
    "TP1": (1, 1, 1),
    "DP2": (2, 1, 1),
    "TP2": (2, 2, 1),
    "EP2": (2, 1, 2),
    "TP2_EP2": (2, 2, 2),
    "EP2_DP4": (4, 1, 2),
    "TP2_EP2_DP2": (4, 2, 2),
    "TP2_EP4": (4, 2, 4),
    "TP4_EP4": (4, 4, 4),
    "TP4_EP4_DP2": (8, 4, 4),
    "TP8": (8, 8, 1),
    "TP8_EP8": (8, 8, 8),
    "TP4_EP16": (16, 4, 16),
}
# Every dimension splits something: data ranks, experts, columns, and copies of the experts.
FEW = ("TP1", "EP2", "TP2_EP2_DP2")
# All experts on each tensor rank, experts over more ranks than the tensors, and a head of keys on several ranks.
EACH_PUSH = ("TP2", "TP2_EP4", "TP4_EP4")


def tiered(layout: str, *values: object) -> ParameterSet:
    """A case of ``values``, or of the layout's name, in the runs in which its layout is tested."""
    marks = () if layout in FEW else pytest.mark.ci if layout in EACH_PUSH else pytest.mark.nightly
    return pytest.param(*(values or [layout]), marks=marks)


TESTED = [tiered(name) for name in LAYOUTS]


class Place:
    """Where tests run. conftest.py sets it for `pytest --device`, before a test file is imported."""

    device = torch.device("cpu")
    joined = False  # this process is a rank of the one world


def start(name: str) -> None:
    """Choose the device of all tests: `auto`, `npu`, `cuda` or `cpu`. InputError if it cannot be used."""
    Place.device = devices.resolve(name)
    devices.adapt(Place.device)
    Place.joined = "RANK" in os.environ or Place.device.type != "cpu"


def launched() -> int:
    """Number of ranks of the one world; 1 if ranks are forked."""
    return int(os.environ.get("WORLD_SIZE", "1")) if Place.joined else 1


def run(ranks: int, function: Callable, *args) -> list:
    """The results of ``function(*args)`` on every rank, in rank order.

    If a forked rank fails, the others are ended. The first line of the RuntimeError begins with its error, before those
    of ranks that lost their connection to it. A launched rank that fails ends itself; its launcher ends the others.
    """
    if Place.joined:
        return _on_this_rank(ranks, function, args)
    _import_megatron()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = ranks, folder, function, args
        context = start_processes(_rank, work, ranks, join=False, start_method="fork")
        end = time.monotonic() + ANSWER
        try:
            while not context.join(timeout=1, grace_period=0.1):
                if time.monotonic() > end:
                    raise RuntimeError(f"not all of {ranks} ranks answered in {ANSWER} s")
        except ProcessException as first:
            files = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
            errors = [path.read_text() for path in files]
            lines = [error.partition("\n")[0] for error in errors]
            raise RuntimeError("\n".join(["; ".join([*lines, str(first)]), *errors])) from None
        finally:
            for process in context.processes:
                process.kill()
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(ranks)]


def _on_this_rank(ranks: int, function: Callable, args: tuple) -> list:
    """The same in the world of the launched ranks, which the first call opens."""
    try:
        if not dist.is_initialized():
            torch.set_num_threads(1)
            devices.select(Place.device)
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            where = {"init_method": "env://"} if "RANK" in os.environ else alone
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT), **where)
        if dist.get_world_size() != ranks:
            raise RuntimeError(f"a test of {ranks} ranks in a world of {dist.get_world_size()}")
        results: list = [None] * ranks
        dist.all_gather_object(results, function(*args))
        return results
    except Exception:
        traceback.print_exc(file=sys.__stderr__)  # pytest would not show what it has captured
        os._exit(1)  # the other ranks wait for this one, and the launcher ends them


def made_once(make: Callable[[Path], object], folder: Path) -> Path:
    """The folder in which ``make`` was called: on each host by its first launched rank, or else by this process."""
    if not Place.joined:
        make(folder)
        return folder
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def first_makes() -> Path:
        if local_rank == 0:
            make(folder)
        return folder

    folders = run(launched(), first_makes)
    return folders[dist.get_rank() - local_rank]


def as_torchrun(ranks: int, function: Callable, *args, log: Path | None = None) -> list[int]:
    """Exit codes of forked processes that run ``function(*args)`` with the variables that torchrun sets.

    The result of the function is the exit code, and its output goes to ``log``. If one process fails, the others go on.
    One that does not end in ANSWER seconds is killed.
    """
    processes = start_as_torchrun(ranks, function, *args, log=log)
    end = time.monotonic() + ANSWER
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def start_as_torchrun(ranks: int, function: Callable, *args, log: Path | None = None) -> list:
    """The same processes in rank order, as soon as they have started."""
    processes = []
    with reserved_port() as port:
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {name: str(value) for name, value in place.items()}
            fork = multiprocessing.get_context("fork")
            processes.append(fork.Process(target=as_launched, args=(variables, log, function, args)))
        for process in processes:
            process.start()
    return processes


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port, which no other program gets while this block, or a process that was forked in it, lasts.

    A store can listen at it: both sockets have SO_REUSEADDR, and this one does not listen.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def as_launched(variables: dict[str, str], log: Path | None, function: Callable, args: tuple) -> None:
    """The work of such a process: it has these variables and this log, and its exit code is the result."""
    os.environ |= variables
    warnings.simplefilter("ignore")
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    exit_with(lambda: function(*args) or 0, failed=1)


def exit_with(function: Callable[[], int], failed: int) -> None:
    """End this forked process. The exit code is the result of ``function``, or ``failed`` after an exception."""
    code = failed
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def in_layouts(names: list[str], function: Callable, *args) -> dict[str, list]:
    """The results of ``function(parallel, *args)`` in each layout. Layouts of equal size share a world."""
    results = {}
    for ranks in sorted({LAYOUTS[name][0] for name in names}):
        chosen = [name for name in names if LAYOUTS[name][0] == ranks]
        by_rank = run(ranks, _each_layout, chosen, function, args)
        results |= {name: [answers[name] for answers in by_rank] for name in chosen}
    return results


def open_layout(name: str) -> parallel_setup.Parallel:
    """Megatron's groups for one of LAYOUTS in the current world."""
    _, tensor, expert = LAYOUTS[name]
    sizes = ParallelConfig(tensor=tensor, expert=expert, timeout_seconds=LIMIT)
    return parallel_setup.open_layout(sizes, Place.device)


def _each_layout(names: list[str], function: Callable, args: tuple) -> dict:
    answers = {}
    for name in names:
        answers[name] = function(open_layout(name), *args)
        parallel_setup.close_layout()
    return answers


def _rank(rank: int, ranks: int, folder: Path, function: Callable, args: tuple) -> None:
    try:
        torch.set_num_threads(1)
        _quiet_third_parties()
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
        (folder / f"result{rank}").write_bytes(pickle.dumps(function(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:  # a failed assertion of pytest is no Exception
        line = traceback.format_exception_only(error)[0].splitlines()[0]
        (folder / f"error{rank}").write_text(f"rank {rank} failed: {line}\n{traceback.format_exc()}")
        os._exit(1)


def _quiet_third_parties() -> None:
    # pytest turns warnings into errors, also in forked ranks. These come from files of torch and Megatron. They are
    # about CUDA or about names that the oldest supported torch does not have.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")


def _import_megatron() -> None:
    torch.set_num_threads(1)
    devices.import_megatron(Place.device)
