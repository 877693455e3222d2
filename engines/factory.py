"""Opens the engine that a configuration names."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from engines.interface import Engine
from facts.architectures import Architecture
from knobs import Config, RolloutConfig
from plan import capacity


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
    """The engine that cfg.rollout.engine names. It has no weights before its first load_weights.

    ``beat`` is called for every decoded token of a batch of rows.
    """
    rollout = cfg.rollout
    # An engine that reserves no cache takes as many rows on any number of ranks, and may have no process group.
    ranks = dist.get_world_size() if rollout.kind.reserves else 1
    return _engine_module(rollout).open_engine(
        cfg.model,
        rollout,
        arch,
        device,
        stop_tokens,
        pad_token,
        beat,
        adapter=cfg.lora if cfg.keeps_factors_apart else None,
        max_tokens=cfg.row_tokens,
        max_sequences=capacity.max_sequences(
            rollout, cfg.eval, arch, ranks, prompt_tokens=cfg.data.max_prompt_tokens, dtype=cfg.model.dtype
        ),
        routed_experts=cfg.replay.mode == "r3",
    )


def _engine_module(rollout: RolloutConfig) -> Any:
    return importlib.import_module(rollout.kind.module)
