"""Sample with vLLM on every rank of a world of two; each rank writes its results to a JSON file.

Each model runs as one replica (tensor 2) and as two replicas (tensor 1), before and after a push of perturbed weights.
Then the dense model runs in lockstep (lockstep_ranks.py).
"""

import json
from pathlib import Path

import lockstep_ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engines.vllm_engine import VllmEngine
from inputs import hf_config

PROMPTS = [[5, 3, 99], [7], list(range(40, 61)), [1, 2, 3, 4], [token % 100 for token in range(322)]]
SEEDS = [11, 12, 13, 14, 15]
STALE = "/dev/shm/-tp:0-[0-1]-cpushm_{rank}"  # a killed run left this shared memory before it was corrected


def perturbed(tensors: dict[str, torch.Tensor], seed: int = 0, scale: float = 0.02) -> dict[str, torch.Tensor]:
    """The tensors plus noise, as after a training step."""
    generator = torch.Generator().manual_seed(seed)
    return {name: x + scale * torch.randn(x.shape, generator=generator) for name, x in tensors.items()}


def main(out_dir: str, dense: str, *model_dirs: str) -> None:
    dist.init_process_group("gloo")
    results, shared = [], []
    for model_dir in model_dirs:
        arch, tensors = hf_config.read(model_dir), load_file(Path(model_dir) / "model.safetensors")
        for tensor in (2, 1):
            engine = VllmEngine(
                arch, model_dir, stop_tokens={9}, max_tokens=360, kv_cache_mib=4, tensor=tensor, routed_experts=True
            )
            shared += [path.name for path in Path("/dev/shm").glob("grpo-*cpushm*")]  # a killed job would leave these
            mine = slice(dist.get_rank() // tensor, None, 2 // tensor)  # of this rank's replica
            for weights in (tensors, perturbed(tensors)):
                engine.load_weights(weights.items())
                answers = engine.sample(
                    PROMPTS[mine],
                    seeds=SEEDS[mine],
                    num_samples=2,
                    max_new_tokens=12,
                    temperature=1.0,
                    return_routed_experts=True,
                )
                results.append(
                    [[(one.tokens, one.logp, one.routed_experts.tolist()) for one in group] for group in answers]
                )
            engine.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer can still use the world
    summary = {"results": results, "ranks": total.item(), "shared": shared}
    Path(out_dir, f"{dist.get_rank()}.json").write_text(json.dumps(summary))
    lockstep_ranks.run(out_dir, dense)
