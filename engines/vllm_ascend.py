"""What vllm-ascend must be told, and what it must not be: after its sources (0.23.0), not run yet.

Weights are pushed into plain tensors, so every option that tiles, moves, copies or frees them stays off.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

import environment
from hf_config import Architecture
from input_files import InputError

CAPTURE_SIZES = (16, 64, 128, 192, 256)  # tokens of a decoding step; each graph takes streams, of which there are few
TORCH_COMPILE = torch.compile  # MindSpeed, imported later, puts a function that does nothing in its place


def check_environment(device_type: str) -> None:
    """Raise InputError for variables that would override what the engine is told."""
    for name in environment.from_a_launcher(os.environ):
        raise InputError(
            f"rollout.engine: the environment's {name} would make every rank data rank 0 of vLLM; unset that"
        )
    if device_type != "npu":
        return
    for variable in environment.switched_on(os.environ):
        raise InputError(f"rollout.engine: the environment's {variable.name} must be 0 or unset: {variable.reason}")


def check_dispatch(arch: Architecture, ranks: int, tokens: int) -> None:
    """Raise InputError where MC2, which takes a decoding step's tokens to their experts, cannot.

    ``tokens``: most on one of the ``ranks`` that share the experts. Its window is all of HCCL_BUFFSIZE, and it fails
    where others would send in slices. Bounds and formula: CANN's documentation of aclnnMoeDistributeDispatchV2.
    """
    for what, found, low, high in (
        ("hidden_size", arch.hidden_size, 1024, 8192),
        ("experts a token", arch.experts_per_token, 1, 16),
        ("tokens a rank", tokens, 1, 512),
    ):
        if not low <= found <= high:
            raise InputError(
                f"rollout.expert_parallel: on an NPU the experts take {what} from {low} to {high}, not {found} "
                "(or rollout.engine torch)"
            )
    row = 2 * arch.hidden_size  # bytes of one token in bf16
    sent = arch.num_experts // ranks * tokens * ranks * _up(_up(row, 32) + 64, 512)
    needed = -(-2 * (sent + arch.experts_per_token * tokens * _up(row, 512)) // 2**20)
    window = os.environ.get("HCCL_BUFFSIZE", environment.when_unset("HCCL_BUFFSIZE"))
    if not re.fullmatch("[0-9]{1,9}", window) or int(window) < needed:
        raise InputError(
            f"rollout.expert_parallel: the environment's HCCL_BUFFSIZE is {window}; needed: {needed} or more (MiB) for "
            f"{tokens} tokens a rank, the same on all ranks"
        )


def _up(size: int, block: int) -> int:
    return -(-size // block) * block


def arguments(enforce_eager: bool, max_sequences: int) -> dict:
    """Arguments of vllm.LLM on an NPU beside those of every device. No sleep mode, no worker_cls, no EPLB."""
    more: dict = {
        "additional_config": {
            "weight_nz_mode": 0,  # as VLLM_ASCEND_ENABLE_NZ
            "enable_cpu_binding": False,  # it would pin this process, trainer included
        }
    }
    if not enforce_eager:
        sizes = [size for size in CAPTURE_SIZES if size < max_sequences] + [max_sequences]
        more["compilation_config"] = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return more


@contextlib.contextmanager
def original_compile(enforce_eager: bool) -> Iterator[None]:
    """torch.compile as torch has it, inside, if graphs are to be captured; afterwards as it was found."""
    found = torch.compile
    if enforce_eager or found is TORCH_COMPILE:
        yield
        return
    if TORCH_COMPILE.__module__ != "torch":
        raise InputError(
            "rollout.enforce_eager: torch.compile had been replaced before this was imported, and graphs need torch's "
            "own; needed: rollout.enforce_eager true"
        )
    torch.compile = TORCH_COMPILE
    try:
        yield
    finally:
        torch.compile = found
