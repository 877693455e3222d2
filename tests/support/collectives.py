"""A run in a shipped layout, with an engine whose memory has vLLM's shape, in which torch compares the collectives.

Under torch's debug level DETAIL the ranks of a group exchange the kind, number, shapes and types of each collective
before it begins. If they differ, every rank ends with an error; a rank that is missing is named after a time-out.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training
from planted import every_answer_parsable
from planting import Plant
from run_scripts import ROOT, Training
from torch import Tensor

import train_grpo
from engines import factory
from engines.interface import Completion, Engine, Stack
from facts.architectures import Architecture, layers
from facts.engines import ENGINES
from hardware.device import DTYPES
from inputs.config import load_config, to_dict
from knobs import Config
from plan import parameters
from run import check
from run import command as training_command

# ------------------------------------------------------------------------------------------------ the engine


class VllmShaped(Engine):
    """Takes every push as vLLM does, and samples at random. Its ranks split the experts of a layer among them."""

    def __init__(self, cfg: Config, arch: Architecture) -> None:
        self.arch, self.ready, self.positions = arch, True, arch.max_positions
        ranks, rank = dist.get_world_size(), dist.get_rank()
        size = ranks if cfg.rollout.expert_parallel else cfg.rollout.tensor
        count = arch.num_experts // size
        self.own = range(rank % size * count, (rank % size + 1) * count)
        self.cfg, self.memory, self.norms = cfg, {}, {}
        for layer, module in layers(arch):
            if module.kind == "experts":
                shape = (count, module.in_size, module.out_size)
                self.memory[layer + module.fused] = torch.zeros(shape, dtype=DTYPES[cfg.model.dtype])

    def stacks(self) -> dict[str, Stack]:
        return {name: Stack(memory, self.own) for name, memory in self.memory.items()}

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            if name.endswith("norm.weight"):
                self.norms[name] = tensor.double().sum().item()
            layer, _, part = name.partition(".experts.")
            if part in ("w13_weight", "w2_weight"):  # a shard, in vLLM's name and the trainer's layout
                self.memory[f"{layer}.experts.{'gate_up' if part[1] == '1' else 'down'}_proj"].copy_(tensor)
            elif (found := re.match(r"(\d+)\.(\w+)_proj", part)) and int(found[1]) in self.own:
                self._put(layer, int(found[1]) - self.own.start, found[2], tensor.t())

    def _put(self, layer: str, expert: int, part: str, value: Tensor) -> None:
        if part == "down":
            self.memory[f"{layer}.experts.down_proj"][expert].copy_(value)
            return
        gate, up = self.memory[f"{layer}.experts.gate_up_proj"][expert].chunk(2, -1)
        (gate if part == "gate" else up).copy_(value)

    def load_adapter(self, factors: dict[str, Tensor]) -> None:
        pass

    def _sample(
        self, prompts: list, seeds: list[int], num_samples: int, params, routed: bool
    ) -> list[list[Completion]]:
        answers, logp = [], -5.0 - sum(self.norms.values())  # noise on the norms shows in it
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            lengths = torch.randint(1, params.max_new_tokens + 1, (num_samples,), generator=generator).tolist()
            drawn = [torch.randint(40, self.arch.vocab_size, (n,), generator=generator).tolist() for n in lengths]
            answers.append([Completion(tokens, [logp] * len(tokens), "stop") for tokens in drawn])
        return answers


# ------------------------------------------------------------------------------------------------ a run


def small(job: Training, model: Path, out_dir: Path) -> Config:
    """The shipped run with its layout, types and options, but two steps of a tiny model on a CPU, 2 updates each."""
    tree = to_dict(load_config(ROOT / job.config, job.overrides))
    questions = 2 * job.ranks
    tree |= {"device": "cpu", "name": "small", "tiny_model": None}
    tree["model"]["path"] = str(model)
    tree["parallel"]["timeout_seconds"] = 120
    tree["data"] = {"source": "arithmetic", "max_prompt_tokens": 96, "num_train": 2 * questions, "num_test": 4}
    tree["rollout"] |= {"prompts_per_step": questions, "group_size": 2, "max_new_tokens": 8, "kv_cache_mib": 512}
    tree["lora"] |= {"rank": 4, "expert_rank": 4}
    tree["optim"] |= {"prompts_per_update": questions // 2, "tokens_per_micro_batch": 1024}
    tree["eval"] = {"every": 1, "samples": 1, "batch_size": 2}
    tree["checks"]["logp_gap_bf16"] = 1e9  # the answers are drawn from no model
    tree["train"] |= {"steps": 2, "out_dir": str(out_dir), "checkpoint_every": 1, "deterministic": False}
    return Config.model_validate(tree)


def command(cfg: Config, plant: Plant) -> int:
    """Two steps of ``cfg`` on this rank."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    patch = pytest.MonkeyPatch()
    training.lighten(lenient=True)
    every_answer_parsable(patch)
    patch.setitem(ENGINES, "vllm", ENGINES["vllm"]._replace(packs_on=()))  # an accelerator's vLLM does not pack
    patch.setattr(parameters, "whole_experts", lambda *args, **kwargs: True)  # nor does it split each of them
    patch.setattr(factory, "check_engine", lambda *args: None)
    patch.setattr(check, "problems", lambda *args: [])  # the stand-in takes every model, and this is a CPU
    patch.setattr(factory, "open_engine", lambda cfg, arch, *args: VllmShaped(cfg, arch))
    plant(patch)
    training_command.start(cfg, train_grpo.train)
    return 0
