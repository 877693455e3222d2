"""Checks vLLM for a configuration, and opens it: one engine for each replica, or one over all ranks."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from engines import vllm_adapter, vllm_ascend, vllm_colocated, vllm_engine
from engines.vllm_engine import VllmEngine
from facts.architectures import Architecture
from facts.exits import InputError
from hardware import device as devices
from inputs.rules import engine_shards, exchanging_ranks, refuse_first, sampler_problems
from knobs import Config, Merging
from plan import capacity


def check(cfg: Config, arch: Architecture, ranks: int) -> None:
    """Raise InputError if vLLM cannot run this configuration on this machine, or is not installed for it."""
    device = devices.resolve(cfg.device).type
    vllm_engine.check_installed(device)
    vllm_ascend.check_environment(device)
    on_device = cfg.model_copy(update={"device": device})  # rules about a device need its name, not auto
    refuse_first(engine_shards(cfg.rollout, cfg.parallel, device))
    refuse_first(sampler_problems(on_device, arch, ranks))
    in_runner_2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    if device == "npu" and cfg.replay.mode == "r3" and not in_runner_2 and not vllm_adapter.is_old():
        # vllm-ascend 0.30.0rc2, platform.py, _validate_routing_replay_config
        raise InputError(
            "replay.mode: r3 needs routes, which vllm-ascend from 0.30 on records only in its Model Runner V2, not run "
            "here; use r2, vllm-ascend 0.23, or the environment's VLLM_USE_V2_MODEL_RUNNER=1"
        )
    if cfg.merging is Merging.NOWHERE:
        vllm_adapter.check_version(device)
    if (exchanging := exchanging_ranks(on_device, arch, ranks)) > 1:
        rows = _max_sequences(cfg, arch, ranks)
        vllm_ascend.check_window(arch, exchanging, -(-rows // cfg.rollout.tensor))  # the tensor ranks split the tokens


def open_engine(
    cfg: Config,
    arch: Architecture,
    device: torch.device,
    stop_tokens: set[int],
    pad_token: int,
    beat: Callable[[], None],
) -> VllmEngine:
    """Open vLLM with the limits of ``cfg``, on all ranks at the same time. ``pad_token`` is not used."""
    rollout = cfg.rollout
    kind = vllm_colocated.ColocatedEngine if rollout.expert_parallel else vllm_engine.VllmEngine
    with devices.internal_formats_restored(device):
        return kind(
            arch,
            cfg.model.path,
            stop_tokens=stop_tokens,
            max_tokens=cfg.row_tokens,
            dtype=devices.DTYPES[cfg.model.dtype],
            device=device,
            tensor=rollout.tensor,
            enforce_eager=rollout.enforce_eager,
            kv_cache_mib=rollout.kv_cache_mib,
            max_sequences=_max_sequences(cfg, arch, dist.get_world_size()),
            routed_experts=cfg.replay.mode == "r3",
            adapter=cfg.lora if cfg.merging is Merging.NOWHERE else None,
            beat=beat,
        )


def _max_sequences(cfg: Config, arch: Architecture, ranks: int) -> int:
    """Return the largest number of rows that one engine decodes together, if there are ``ranks`` ranks."""
    return capacity.max_sequences(
        cfg.rollout, cfg.eval, arch, ranks, prompt_tokens=cfg.data.max_prompt_tokens, dtype=cfg.model.dtype
    )
