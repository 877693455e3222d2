"""Rules for all tests: which files come first, and which tests are skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util

import pytest

NO_VLLM = pytest.mark.skip(reason="vllm is not installed; needed: requirements/cpu-vllm.txt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: run_tests.sh has two processes that take file after file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(NO_VLLM)
