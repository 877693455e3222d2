"""Make this process look like one on a device that this machine does not have, with a vLLM that is not installed."""

import importlib.metadata
from types import SimpleNamespace

from pytest import MonkeyPatch

from engines import vllm_engine
from hardware import device as devices


def as_if_on(patch: MonkeyPatch, device: str, version: str, **variables: str) -> None:
    """Checks of the engine find ``device``, vLLM of this ``version``, and these environment variables."""
    patch.setattr(devices, "resolve", lambda name: SimpleNamespace(type=device))
    patch.setattr(vllm_engine, "check_installed", lambda device_type: None)
    patch.setattr(importlib.metadata, "version", {"vllm": version}.get)
    patch.delenv("HCCL_BUFFSIZE", raising=False)
    for name, value in variables.items():
        patch.setenv(name, value)
