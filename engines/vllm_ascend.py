"""Settings of vllm-ascend that a run needs or refuses, from the sources of 0.23.0 and 0.30.0rc2. Not run on an NPU yet.

tests/machines/test_vllm_ascend.py tests them with both versions of vllm-ascend, on a stub of CANN. Weights are pushed
into plain tensors, so every option that tiles, moves, copies or frees weights stays off.
"""

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from facts import variables
from facts.architectures import Architecture
from facts.exits import InputError

CAPTURE_SIZES = (16, 64, 128, 192, 256)  # tokens of a decoding step; each captured graph uses some of the few streams
TORCH_COMPILE = torch.compile  # MindSpeed, imported later, replaces it by a function that does nothing


def check_environment(device_type: str) -> None:
    """Raise InputError for environment variables that would override the arguments of the engine."""
    for name in variables.from_a_launcher(os.environ):
        raise InputError(
            f"rollout.engine: the environment's {name} would make every rank data rank 0 of vLLM; unset it"
        )
    for variable in variables.switched_on(os.environ) if device_type == "npu" else ():
        raise InputError(f"rollout.engine: the environment's {variable.name} must be 0 or unset: {variable.reason}")


def check_window(arch: Architecture, ranks: int, tokens: int) -> None:
    """Raise InputError if MC2's buffer is too small for the tokens of a decoding step.

    ``tokens`` is the largest number of tokens on one of the ``ranks`` that exchange them. All tokens must fit into one
    buffer of HCCL_BUFFSIZE MiB. The formula is from CANN's documentation of aclnnMoeDistributeDispatchV2.
    """

    def up(size: int, block: int) -> int:
        return -(-size // block) * block

    row = 2 * arch.hidden_size  # bytes of one token in bf16
    sent = arch.num_experts // ranks * tokens * ranks * up(up(row, 32) + 64, 512)
    needed = -(-2 * (sent + arch.experts_per_token * tokens * up(row, 512)) // 2**20)
    window = os.environ.get("HCCL_BUFFSIZE", variables.when_unset("HCCL_BUFFSIZE"))
    if not re.fullmatch("[0-9]{1,9}", window) or int(window) < needed:
        raise InputError(
            f"rollout.engine: the environment's HCCL_BUFFSIZE is {window}; set it to {needed} or more (MiB) for "
            f"{tokens} tokens per rank, equally on all ranks"
        )


def arguments(enforce_eager: bool, max_sequences: int) -> dict:
    """Return the arguments of vllm.LLM that only an NPU gets. They do not set sleep mode, worker_cls or EPLB."""
    sizes = [size for size in CAPTURE_SIZES if size < max_sequences] + [max_sequences]
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {
        "additional_config": {
            "weight_nz_mode": 0,  # the same as VLLM_ASCEND_ENABLE_NZ 0
            "enable_cpu_binding": False,  # it would pin this process, which is also the trainer
        },
        **({} if enforce_eager else {"compilation_config": graphs}),
    }


@contextlib.contextmanager
def original_compile(enforce_eager: bool) -> Iterator[None]:
    """Restore the original torch.compile in this block if graphs are captured, and undo this at the end.

    Raises InputError if graphs need the original, but it was replaced before this file was imported.
    """
    found = torch.compile
    wanted = found if enforce_eager else TORCH_COMPILE
    if wanted is not found and wanted.__module__ != "torch":
        raise InputError(
            "rollout.enforce_eager: torch.compile was replaced before vllm_ascend.py was imported, but graphs need "
            "torch's own; set rollout.enforce_eager to true"
        )
    torch.compile = wanted
    try:
        yield
    finally:
        torch.compile = found
