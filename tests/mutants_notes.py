"""The pytest plugin of `tests/mutants.py record`: which test executes which listed statement, and what a test costs.

A line of the notes is [what, owner, value]. The owner is the id of a test. While a shared fixture or a cached function
of the project is computed, it is the owner itself, and every test that uses it executes what it has executed: it is
computed once, during the first test that needs it. Processes that a test starts inherit the owner. A statement that is
executed while no test runs, at an import, has the owner "".
"""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent  # tests/mutants.py puts this file into the root of a copy
TIERS = {"ci": 1, "nightly": 2}  # marker: how late the tests of a tier are asked
SHARED = "MUTANTS_SHARED"
noted: set[tuple] = set()
seconds_inside = [0.0]  # of shared parts, for each part that is being computed
cache, execute = functools.cache, pytest.FixtureDef.execute


def note(what: str, owner: str, value: str | float) -> None:
    if (what, owner, value) in noted:
        return
    noted.add((what, owner, value))
    file = os.open(ROOT.with_name("notes.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps([what, owner, value]).encode() + b"\n")  # one call, because several processes write
    os.close(file)


def owner() -> str:
    return os.environ.get(SHARED) or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def hit(*faults: str) -> None:
    """Planted in front of a statement that these faults change."""
    for fault in faults:
        with contextlib.suppress(OSError):  # a test limits the size of its files
            note("executes", owner(), fault)


@contextlib.contextmanager
def shared(name: str) -> Iterator[None]:
    """What is executed inside belongs to ``name``, which the present owner uses."""
    note("uses", owner(), name)
    outer = os.environ.get(SHARED)
    start = time.perf_counter()
    os.environ[SHARED] = name
    seconds_inside.append(0.0)
    try:
        yield
    finally:
        if outer is None:
            os.environ.pop(SHARED, None)
        else:
            os.environ[SHARED] = outer
        passed = time.perf_counter() - start
        note("seconds", name, round(passed - seconds_inside.pop(), 2))
        seconds_inside[-1] += passed


def execute_shared(fixture: pytest.FixtureDef, request: pytest.FixtureRequest) -> object:
    if fixture.scope == "function":
        return execute(fixture, request)
    with shared(f"{fixture.baseid}::{fixture.argname} {getattr(request, 'param', '')!r}"):
        return execute(fixture, request)


def cache_shared(function: Callable) -> Callable:
    code = getattr(function, "__code__", None)
    if code is None or not code.co_filename.startswith(f"{ROOT}{os.sep}") or ".venv" in code.co_filename:
        return cache(function)
    cached = cache(function)

    @functools.wraps(cached)
    def call(*args, **kwargs) -> object:
        with shared(f"{code.co_filename}::{function.__qualname__}"):
            return cached(*args, **kwargs)

    call.cache_clear, call.cache_info = cached.cache_clear, cached.cache_info
    return call


def pytest_configure() -> None:
    pytest.FixtureDef.execute = execute_shared
    functools.cache = cache_shared  # the files of the project are imported later, when tests are collected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    os.environ.pop(SHARED, None)  # a fixture may have put back the variables of its own set-up
    seconds_inside[:] = [0.0]
    start = time.perf_counter()
    result = yield
    note("seconds", item.nodeid, round(time.perf_counter() - start - seconds_inside[0], 2))
    note("tier", item.nodeid, max((TIERS.get(mark.name, 0) for mark in item.iter_markers()), default=0))
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        note("fails", report.nodeid, report.when)
