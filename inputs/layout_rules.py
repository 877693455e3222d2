"""Whether a number of ranks can train and hold a model in the layout of a configuration.

A message says the key, what was found, what is needed, and the nearest sizes that work.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from architecture import Architecture
from inputs.config_rules import STREAMED, VOCABULARY_BLOCK, divisors, nearest
from inputs.files import InputError
from inputs.hf_config import ELEMENT_BYTES, cache_mib, int4_problem
from knobs import Config


class Side(NamedTuple):
    """Ranks that train, that sample, or that do both in turn; they are a world of their own."""

    name: str  # "" for both in turn | trainers | samplers
    cfg: Config  # with the layout of these ranks
    first: int  # their lowest rank under torchrun
    ranks: int


def sides(cfg: Config, ranks: int) -> list[Side]:
    """The two sides of ``ranks`` ranks under rollout.ranks, or the one side without. InputError if there is no trainer.

    The samplers hold the frozen model in the trainers' layout, as far as their number divides, to merge the adapters
    into it; under rollout.expert_parallel in that of the engine.
    """
    rollout, parallel = cfg.rollout, cfg.parallel
    if not (samplers := rollout.ranks):
        return [Side("", cfg, 0, ranks)]
    if samplers >= ranks:
        raise InputError(f"rollout.ranks: {samplers} of {ranks} ranks sample, so none trains; needed: fewer")
    tensor, expert = math.gcd(parallel.tensor, samplers), math.gcd(parallel.expert, samplers)
    sizes = {"tensor": tensor, "expert": expert}
    if rollout.expert_parallel:
        sizes = {"tensor": rollout.tensor, "expert": samplers}
    apart = rollout.model_copy(update={"tensor": 1, "expert_parallel": False})
    return [
        Side("trainers", cfg.model_copy(update={"rollout": apart}), 0, ranks - samplers),
        Side(
            "samplers",
            cfg.model_copy(update={"parallel": parallel.model_copy(update=sizes)}),
            ranks - samplers,
            samplers,
        ),
    ]


def side_of(cfg: Config, ranks: int, rank: int) -> Side:
    """The side of ``rank``."""
    return next(side for side in reversed(sides(cfg, ranks)) if rank >= side.first)


def side_problems(side: Side, arch: Architecture) -> list[str]:
    """The layout_problems of a side, and the engine_layout_problems of one that samples."""
    engine = engine_layout_problems(side.cfg, arch, side.ranks) if side.name != "trainers" else []
    return [*layout_problems(side.cfg, arch, side.ranks), *engine]


def check_sides(cfg: Config, arch: Architecture, ranks: int) -> None:
    """InputError for the first of side_problems."""
    for side in sides(cfg, ranks):
        for problem in side_problems(side, arch):
            raise InputError(f"{side.name}: {problem}" if side.name else problem)


def check_layout(cfg: Config, arch: Architecture, world_size: int) -> None:
    """InputError for the first of layout_problems."""
    for problem in layout_problems(cfg, arch, world_size):
        raise InputError(problem)


def layout_problems(cfg: Config, arch: Architecture, world_size: int) -> list[str]:
    """Why ``world_size`` ranks cannot train ``arch``: splits into equal parts, positions, routing replay."""
    tensor, expert = cfg.parallel.tensor, cfg.parallel.expert
    split_by_tensor = {
        "key/value heads": arch.num_kv_heads,
        "attention heads": arch.num_heads,
        "tokens of the vocabulary": arch.vocab_size,
        "columns of a dense layer": 0 if all(arch.moe_layers) else arch.dense_ffn_size,
        "columns of the shared expert": arch.shared_expert_ffn_size,
        "ranks": world_size,
    }
    split_by_expert = {"experts": arch.num_experts, "ranks": world_size}
    shared, uneven = cfg.rollout.expert_parallel, arch.num_experts % world_size > 0
    sizes = [d for d in divisors(arch.num_experts) if d % tensor == 0]
    int4 = int4_problem(arch) if cfg.model.quantisation == "int4" else ""
    rules = [
        (bool(int4), int4),
        (
            cfg.row_tokens > arch.max_positions,
            f"data.max_prompt_tokens: {cfg.data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{cfg.rollout.max_new_tokens} = {cfg.row_tokens} exceeds the model's {arch.max_positions} positions",
        ),
        (
            cfg.replay.mode != "off" and (arch.num_experts > 256 or not any(arch.moe_layers)),
            f"replay.mode: {cfg.replay.mode} needs MoE layers of at most 256 experts",
        ),
        (
            shared and uneven,
            f"rollout.expert_parallel: {arch.num_experts} experts cannot be divided evenly among all {world_size} "
            f"ranks; nearest: {nearest(world_size, sizes)} ranks {STREAMED}",
        ),
        (
            shared and not uneven and cfg.parallel.expert != world_size,
            f"parallel.expert: {cfg.parallel.expert}, while rollout.expert_parallel spreads vLLM's experts over all "
            f"{world_size} ranks; needed: {world_size} {STREAMED}",
        ),
        (
            shared and arch.vocab_size % VOCABULARY_BLOCK > 0,
            f"rollout.expert_parallel: vLLM pads a vocabulary of {arch.vocab_size} to a multiple of "
            f"{VOCABULARY_BLOCK} before it splits it, the trainer does not; needed: a multiple {STREAMED}",
        ),
        (
            # patch_routed_experts_capture.py of vllm-ascend 0.23.0 joins the ranks' shares under data parallelism only.
            shared and cfg.replay.mode == "r3" and cfg.rollout.tensor == world_size > 1,
            f"replay.mode: r3, but with rollout.expert_parallel the {world_size} ranks of a single replica split the "
            "tokens, and vllm-ascend records the routes of one rank's share; needed: r2, a rollout.tensor below the "
            f"{world_size} ranks {STREAMED}",
        ),
    ]
    return [
        *_split_problem("parallel.tensor", tensor, split_by_tensor, world_size),
        *_split_problem("parallel.expert", expert, split_by_expert, world_size),
        *(message for broken, message in rules if broken),
    ]


def engine_layout_problems(cfg: Config, arch: Architecture, world_size: int) -> list[str]:
    """Why the engine cannot hold ``arch`` on ``world_size`` ranks as cfg.rollout says."""
    if not cfg.rollout.kind.splits:
        return []
    element, cache = ELEMENT_BYTES[cfg.model.dtype], cfg.rollout.kv_cache_mib
    return replica_problems(arch, world_size, cfg.rollout.tensor, cfg.row_tokens, cache, element)


def replica_problems(
    arch: Architecture, ranks: int, tensor: int, longest: int, kv_cache_mib: int, element: int
) -> list[str]:
    """Why ``tensor`` of ``ranks`` ranks cannot hold one copy of ``arch`` in vLLM and the key-value cache of one row.

    A row has up to ``longest`` tokens; an element of the cache has ``element`` bytes.
    """
    split = {
        "ranks": ranks,
        "attention heads": arch.num_heads,
        "columns of an expert": arch.expert_ffn_size,
        "columns of the shared expert": arch.shared_expert_ffn_size,
        "columns of a dense layer": 0 if all(arch.moe_layers) else arch.dense_ffn_size,
    }
    found = _split_problem("rollout.tensor", tensor, split, ranks)
    if arch.num_kv_heads % tensor and tensor % arch.num_kv_heads:
        found.append(f"rollout.tensor: {tensor} and {arch.num_kv_heads} key/value heads: one must divide the other")
    needed = cache_mib(arch, tensor, longest, element)
    if needed > kv_cache_mib:
        found.append(
            f"rollout.kv_cache_mib: {kv_cache_mib} is too small for one row of {longest} tokens; "
            f"needed: {needed} for one row, and as much for each further row that is sampled at the same time"
        )
    return found


def _split_problem(key: str, ranks: int, parts: Mapping[str, int], world_size: int) -> list[str]:
    """A message for the first number of ``parts`` that ``ranks`` does not divide, with the nearest sizes that do."""
    for what, number in parts.items():
        if number % ranks:
            working = [d for d in divisors(world_size) if all(n % d == 0 for n in parts.values())]
            return [f"{key}: {ranks} does not divide {number} {what}; nearest: {nearest(ranks, working)}"]
    return []
