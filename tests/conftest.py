"""Fixtures that several test files use, options of the command, the order of files, skips without vLLM."""

import functools
import importlib.machinery
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import cann_stub
import pytest
import tiers
from source import ROOT

NO_VLLM = pytest.mark.skip(reason="vllm is not installed; needed: requirements/cpu-vllm.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ci", action="store_true", help="also the tests of each push: more layouts, real packages")
    parser.addoption("--all", action="store_true", help="also the nightly tests: all layouts, options and faults")
    parser.addoption("--device", metavar="NAME", help="run tests/machines/on_device there: cpu, cuda, npu, or auto")
    parser.addoption("--ranks", type=int, help="with --device cpu: the layouts of so many ranks; default: 1 and 2")
    parser.addoption("--plant", metavar="NAME", help="plant a fault of tests/support/planted.py: tests should fail")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # by a shell that has put pytest into the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the programs of the tests would ignore it, too
    if config.getoption("--ci"):
        tiers.left_out = {"nightly"}
    if config.getoption("--all"):
        tiers.left_out = set()
    if name := config.getoption("--device"):
        choose_device(name, config.getoption("--ranks"))
    if name := config.getoption("--plant"):
        # Before test files are imported, because they import functions of the product by name.
        import planted

        config.add_cleanup(planted.for_the_session(name).undo)


def refuse(message: str) -> NoReturn:
    """End the command with this line and exit code 2. pytest.exit would print "Exit: " before the line."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(2)  # pytest would catch SystemExit and print its traceback


def choose_device(name: str, ranks: int | None) -> None:
    """Run the layouts of the launched ranks, or on a CPU of ``ranks`` forked ones, in all tiers."""
    import world

    from facts.exits import InputError

    try:
        world.start(name)
    except InputError as error:
        refuse(str(error))
    if world.Place.joined:
        wanted = {world.launched()}
    else:
        wanted = {1, 2} if ranks is None else {ranks}
    possible = sorted({size for size, *_ in world.LAYOUTS.values()})
    if ranks is not None and ranks not in wanted:
        needed = f"torchrun --nproc_per_node={ranks} preflight.py --self-test"
        refuse(f"--ranks {ranks}: found {world.launched()}; needed: {needed}")
    if not wanted <= set(possible):
        numbers = f"{', '.join(map(str, possible[:-1]))} or {possible[-1]}"
        refuse(f"--ranks: no layout of the tests has {max(wanted)} ranks; give --ranks {numbers}")
    tiers.left_out = set()
    for layout, (size, _, _) in world.LAYOUTS.items():
        if size not in wanted:
            tiers.elsewhere.add(layout)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first: run_tests.sh has two processes, and the last files should be short.

    One process runs all tests of a group, one after the other. A file is a group of its own unless it names another.
    """
    left_out = [item for item in items if not tiers.runs(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    slow = {group_of(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: group_of(item) not in slow)
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(NO_VLLM)


def group_of(item: pytest.Item) -> str:
    return item.get_closest_marker("xdist_group").args[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a random tiny Qwen3-MoE model."""
    import training

    return training.make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def sampled_models(tmp_path_factory) -> Callable:
    """A function that makes each model of sampled.MODELS once."""
    import reference
    import sampled

    @functools.cache
    def get(name: str) -> sampled.Model:
        kind, changes = sampled.MODELS[name]
        return sampled.Model(reference.save(kind, tmp_path_factory.mktemp(name), **changes))

    return get


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """vLLM is imported in this process, so that no forked world imports it again, which takes 9 CPU seconds.

    torch compiles its kernels without threads, as vLLM asks for by a variable. A test may have imported torch._inductor
    before, which reads that variable at its import, and a forked rank would wait for threads that it does not have.
    """
    import torch
    import torch._inductor.config

    from facts import variables

    asked = {variable.name: os.environ.get(variable.name, variable.value) for variable in variables.VLLM}
    with mock.patch.dict(os.environ, asked), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own deprecations
        from vllm import LLM  # noqa: F401
    torch._inductor.config.compile_threads = 1


@pytest.fixture(scope="module")
def vllm_of(vllm_imported) -> Iterator[Callable]:
    """A function that gives vLLM's engine of a model, with its weights. Each engine is made once, in a world of one.

    World and environment are restored at the end of the file: other files of the same process fork worlds of their own.
    """
    import torch
    import torch.distributed as dist
    from sampled import Model
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    from engines.vllm_engine import VllmEngine

    @functools.cache
    def made(model: Model, **options) -> VllmEngine:
        set_num_threads = torch.set_num_threads
        shared = dict(stop_tokens=set(), max_tokens=model.arch.max_positions, kv_cache_mib=4, routed_experts=True)
        engine = VllmEngine(model.arch, model.path, **shared, **options)
        assert torch.set_num_threads is set_num_threads
        return engine

    def get(model: Model, stops: Iterable[int] = (9,), **options) -> VllmEngine:
        engine = made(model, **options)
        engine.stop_tokens, engine.ready = sorted(stops), False  # the next push must bring the whole model
        engine.load_weights(model.tensors.items())
        return engine

    with mock.patch.dict(os.environ):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield get
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder with train.jsonl and test.jsonl of GSM8K, beside the checkout."""
    folder = ROOT.parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"needs GSM8K's train.jsonl and test.jsonl in {folder}")
    return folder


def installed(variable: str, default: str, content: str) -> Path:
    """The folder that a variable of run_tests.sh names. The test is skipped if ``content`` is not installed there."""
    folder = ROOT / os.environ.get(variable, default)
    if not (folder / content).is_dir():
        pytest.skip(f"{content} is not in {folder} ({variable}); run_tests.sh --all installs it there")
    return folder.resolve()


@pytest.fixture(scope="session")
def new_megatron() -> Path:
    return installed("NEW_MEGATRON_DIR", ".cache/megatron-core-0.19.2", "megatron")


@pytest.fixture(scope="session")
def tracker_packages() -> str:
    return str(installed("TRACKERS_DIR", ".cache/trackers", "wandb"))


@pytest.fixture(scope="session")
def server_packages() -> str:
    return str(installed("SERVE_DIR", ".cache/serve", "uvicorn"))


@pytest.fixture(scope="session")
def torch_npu_environment(tmp_path_factory) -> dict[str, str]:
    """The variables of a process that imports the real torch_npu on a stub of CANN (cann_stub.py)."""
    folder = installed("TORCH_NPU_DIR", ".cache/torch_npu-2.13.0", "torch_npu")
    extension = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if not (folder / "torch_npu" / extension).is_file():
        pytest.skip(f"{folder}: torch_npu is for another Python or machine, it has no {extension}; delete the folder")
    if missing := cann_stub.missing_tools():
        pytest.skip(f"the stub of CANN needs a C compiler and binutils; missing: {', '.join(missing)}")
    return cann_stub.environment(folder, tmp_path_factory.mktemp("cann"))
