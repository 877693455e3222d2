"""Sample turns on two ranks of vLLM: one replica whose environment differs between its ranks, and two in lockstep.

Each rank writes its samples, and how often its environment was called, to a JSON file.
"""

import json
import os
from pathlib import Path

import torch.distributed as dist
from lockstep_ranks import OnCpu
from safetensors.torch import load_file

from engines.vllm_engine import VllmEngine
from inputs import hf_config
from tasks.environment import Reply, Turn, Turns

STOPS = frozenset(range(0, 128, 8))
SHARED = [[5, 3, 99], [7]]  # prompts of the replica
SETTINGS = dict(num_samples=3, max_new_tokens=30, temperature=1.0)


def turns(answer: int, most: int, asked: list) -> Turns:
    def reply(turn: Turn) -> Reply:
        asked.append(turn.prompt)
        number = sum(own and not before for own, before in zip(turn.mask, [False, *turn.mask], strict=False))
        return Reply([answer, 3]) if number < most and turn.left > 2 else Reply(reason="stop")

    return Turns(STOPS, lambda turns: [reply(turn) for turn in turns])


def main(out_dir: str, dense: str, model_dir: str) -> None:
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}

    def sampled(engine: VllmEngine, prompts: list[list[int]], *of_turns: int) -> list:
        asked: list[int] = []
        answers = engine.sample(
            prompts, seeds=[5 + i for i in range(len(prompts))], turns=turns(*of_turns, asked), **SETTINGS
        )
        return [[(one.tokens, one.mask, one.finish_reason) for one in group] for group in answers], len(asked)

    arch, tensors = hf_config.read(model_dir), load_file(Path(model_dir) / "model.safetensors")
    engine = VllmEngine(arch, model_dir, stop_tokens=set(STOPS), max_tokens=96, kv_cache_mib=4, tensor=2)
    engine.load_weights(tensors.items())
    results["one replica"] = sampled(engine, SHARED, 50 + rank, 3)  # what rank 1 would say is not used
    engine.close()

    arch, tensors = hf_config.read(dense), load_file(Path(dense) / "model.safetensors")
    for kind in (VllmEngine, OnCpu):
        engine = kind(arch, dense, stop_tokens=set(STOPS), max_tokens=96, kv_cache_mib=2)
        engine.load_weights(tensors.items())
        for name, prompts, most in (("both", [[7 + rank, 8]], 1 + 3 * rank), ("one", [[9, 4]] * (1 - rank), 3)):
            results[f"{kind.__name__} {name}"] = sampled(engine, prompts, 50, most)
        if kind is VllmEngine:
            engine.close()
    Path(out_dir, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)
