"""Run two data ranks of one vLLM engine that sample in lockstep, then one that fails; the model is dense, on a CPU.

vllm_ranks.py calls `run` on each rank. Each rank writes its samples and the number of forward passes of its model. Then
rank 1 gets a prompt that is refused while rank 0 samples: rank 0 must also end instead of waiting.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file

from engines.vllm_colocated import ColocatedEngine
from engines.vllm_engine import VllmEngine
from facts.exits import InputError
from inputs import hf_config

# One pair for each call of sample: the prompt lengths of rank 0 and of rank 1.
CALLS = [([3, 2], [2, 1]), ([2], []), ([], [1, 1, 3]), ([2, 2], [1])]
NEW_TOKENS = {0: 9, 1: 5}  # for each rank; rank 1 finishes first


class OnCpu(ColocatedEngine):
    """The real lockstep, but the weights are loaded as on a CPU, and there are no parallel experts."""

    _hand_over, _cast = VllmEngine._hand_over, VllmEngine._cast

    def take_parameters_as_they_are(self) -> None:
        pass

    def _more_arguments(self, *args, **options) -> dict:
        return super()._more_arguments(*args, **options) | {"enable_expert_parallel": False}


def prompts(lengths: list[int], rank: int) -> list[list[int]]:
    return [[7 + 10 * rank + i + j for j in range(length)] for i, length in enumerate(lengths)]


def run(out_dir: str, model_dir: str) -> None:
    """Sample on this rank and end the process, as train_grpo does after an error."""
    rank = dist.get_rank()
    arch = hf_config.read(model_dir)
    tensors = load_file(Path(model_dir) / "model.safetensors")
    results = []
    for kind in (VllmEngine, OnCpu):  # the first kind has two independent replicas
        engine = kind(arch, model_dir, stop_tokens={9}, max_tokens=64, kv_cache_mib=2)
        engine.load_weights(tensors.items())
        forwards = []
        engine.llm.collective_rpc(
            lambda worker, count=forwards: worker.model_runner.model.register_forward_hook(
                lambda *args: count.append(1)
            )
        )
        for call in CALLS:
            mine = prompts(call[rank], rank)
            forwards.clear()
            answers = engine.sample(
                mine,
                seeds=[5 + i for i in range(len(mine))],
                num_samples=2,
                max_new_tokens=NEW_TOKENS[rank],
                temperature=1.0,
            )
            results.append(([[one.tokens for one in group] for group in answers], len(forwards)))
        if kind is VllmEngine:
            engine.close()
    Path(out_dir, f"lockstep_{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    try:
        engine.sample([[]] if rank else [[1]], seeds=[0], num_samples=1, max_new_tokens=9, temperature=1.0)
    except InputError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    Path(out_dir, f"{rank}.went_on").touch()
