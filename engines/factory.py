"""Opens the engine that a configuration names."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from engines.interface import Engine
from facts.architectures import Architecture
from knobs import Config, RolloutConfig


def check_engine(cfg: Config, arch: Architecture, ranks: int) -> None:
    """Raise InputError if the engine cannot run this configuration, or is not installed for it."""
    _engine_module(cfg.rollout).check(cfg, arch, ranks)


def open_engine(
    cfg: Config,
    arch: Architecture,
    device: torch.device,
    stop_tokens: set[int],
    pad_token: int,
    beat: Callable[[], None] = lambda: None,
) -> Engine:
    """Return the engine that cfg.rollout.engine names. It has no usable weights before its first load_weights.

    The engine calls ``beat`` at every decoding step.
    """
    return _engine_module(cfg.rollout).open_engine(cfg, arch, device, stop_tokens, pad_token, beat)


def _engine_module(rollout: RolloutConfig) -> Any:
    return importlib.import_module(rollout.kind.module)
