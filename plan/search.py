"""Whether a configuration fits a number of ranks, and the nearest layouts that do when it does not. No torch.

judge() applies every rule of config_rules.py and then memory; whatever alternatives() lists has passed judge() itself.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from config_rules import LAYOUT_RULES, cache_mib_per_row, divisors, engine_layout_problems, layout_problems, problems
from hf_config import Architecture
from knobs import Config
from plan import grid, roofline
from plan import memory as memory_plan
from plan.grid import Layout
from plan.memory import GIB, Memory
from plan.roofline import Times

LISTED = 6  # alternatives


@dataclass(frozen=True)
class Setting:
    """What is asked about, beside the configuration."""

    arch: Architecture
    device: str  # cpu | npu | cuda
    ranks_per_node: int
    device_gib: float | None  # in place of the machine's figure
    prompt_tokens: float
    completion_tokens: float


@dataclass(frozen=True)
class Plan:
    """A configuration on a number of ranks, and what came of it. Where a size does not divide there is no more."""

    cfg: Config
    layout: Layout
    reasons: list[str]
    memory: Memory | None = None
    times: Times | None = None


def judge(cfg: Config, ranks: int, setting: Setting) -> Plan:
    """Every rule of config_rules.py, then memory."""
    arch, layout = setting.arch, grid.of(cfg, ranks)
    reasons = problems(cfg, LAYOUT_RULES)
    reasons += [*layout_problems(cfg, arch, ranks), *engine_layout_problems(cfg, arch, ranks)]
    if reasons:
        return Plan(cfg, layout, reasons)
    machine = roofline.MACHINES[setting.device]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    capacity = roofline.capacity_bytes(machine, min(ranks, setting.ranks_per_node), host)
    if setting.device_gib is not None:
        capacity = int(setting.device_gib * GIB)
    memory = memory_plan.plan(cfg, arch, layout, setting.device, capacity)
    times = roofline.plan(cfg, arch, layout, machine, memory, setting.prompt_tokens, setting.completion_tokens)
    if memory.peak > capacity:
        parts = sorted(
            ((size, name) for name, size in memory.parts.items() if name not in ("margin", "logits chunk")),
            reverse=True,
        )
        largest = ", ".join(f"{name} {size / GIB:.1f}" for size, name in parts[:3])
        reasons.append(
            f"memory: {memory.fullest} needs {memory.peak / GIB:.1f} GiB on a rank, margin included, of "
            f"{capacity / GIB:.1f}; the largest parts: {largest}"
        )
    return Plan(cfg, layout, reasons, memory, times)


# -------------------------------------------------------------------------------------------------------- alternatives


def alternatives(refused: Plan, setting: Setting) -> list[Plan]:
    """The accepted plans nearest to a refused one; no more ranks than asked first, then by memory and estimated time.

    What is changed, in this order, until something fits: how the ranks are laid out; also the engine's copy; also
    recompute and the micro-batch; at last the number of ranks.
    """
    cfg = _mended(refused.cfg, setting.arch)
    ranks = refused.layout.ranks
    smaller = _with(cfg, model={"recompute": True}, optim={"tokens_per_micro_batch": _one_row(cfg)})
    found: list[Plan] = []
    for base, counts, engines in (
        (cfg, [ranks], False),
        (cfg, [ranks], True),
        (smaller, [ranks], True),
        (cfg, _other_counts(ranks, setting), False),
        (smaller, _other_counts(ranks, setting), True),
    ):
        candidates = sorted(
            ((distance, number, plan) for number, plan in enumerate(_candidates(base, counts, engines, setting.arch))
             for distance in [_distance(refused, *plan)]),
            key=lambda item: item[:2],
        )  # fmt: skip
        for _, _, (candidate, count) in candidates:
            plan = judge(candidate, count, setting)
            if not plan.reasons:
                found.append(plan)
            if len(found) == LISTED:
                break
        if found:
            break
    if cfg == refused.cfg:  # perhaps it only met the wrong number of ranks
        as_it_is = (judge(cfg, count, setting) for count in _other_counts(ranks, setting))
        listed = [(plan.cfg, plan.layout) for plan in found]  # no set: a Config holds a mapping, so it has no hash
        found = found[: LISTED - 1] + [p for p in as_it_is if not p.reasons and (p.cfg, p.layout) not in listed][:1]

    def rank(plan: Plan) -> tuple[bool, float, float]:
        return plan.layout.ranks > ranks, round(plan.memory.peak / GIB, 1), plan.times.total

    return sorted(found, key=rank)


def _mended(cfg: Config, arch: Architecture) -> Config:
    """With batch equation, cache and the axes that are not supported set right; the layout is left to be searched."""
    prompts, update = cfg.rollout.prompts_per_step, cfg.optim.prompts_per_update
    update = min(divisors(prompts), key=lambda d: abs(math.log(d / update)))
    tokens = max(cfg.optim.tokens_per_micro_batch, _one_row(cfg))
    return _with(
        cfg,
        parallel={"pipeline": 1, "context": 1},
        optim={"prompts_per_update": update, "tokens_per_micro_batch": tokens},
        rollout={"kv_cache_mib": _cache_mib(cfg, arch)},
    )


def _cache_mib(cfg: Config, arch: Architecture) -> int:
    """What is asked for, or, where one row does not fit, room for one however the engine is split."""
    asked = cfg.rollout.kv_cache_mib
    if cfg.rollout.engine != "vllm" or cache_mib_per_row(cfg, arch) <= asked:
        return asked
    return cache_mib_per_row(_with(cfg, rollout={"tensor": 1}), arch)


def _one_row(cfg: Config) -> int:
    return cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens


def _with(cfg: Config, **sections: dict) -> Config:
    """``cfg`` with some keys of some sections changed."""
    changed = {name: getattr(cfg, name).model_copy(update=keys) for name, keys in sections.items()}
    return cfg.model_copy(update=changed)


def _other_counts(ranks: int, setting: Setting) -> list[int]:
    """Numbers of ranks that one could have instead: halves, doubles, powers of two, whole nodes."""
    node = setting.ranks_per_node
    counts = {ranks // 2, ranks // 4, 2 * ranks, 4 * ranks, 8 * ranks, node, 2 * node}
    counts |= {ranks // node * node, -(-ranks // node) * node}
    counts |= {1 << (ranks.bit_length() - 1), 1 << ranks.bit_length()}  # the powers of two around it
    return sorted((n for n in counts - {ranks} if n > 0), key=lambda n: (abs(math.log2(n / ranks)), -n))


def _candidates(cfg: Config, counts: list[int], engines: bool, arch: Architecture) -> Iterator[tuple[Config, int]]:
    """Every layout of the numbers of ranks whose sizes divide what they must; judge() looks at the rest."""
    whole = {"tensor": 1, "expert": 1, "expert_tensor": 1}
    for ranks in counts:

        def splits(ranks: int = ranks, **sizes: int) -> bool:
            alone = _with(cfg, parallel=whole | sizes, rollout={"expert_parallel": False})
            return not any(layout_problems(alone, arch, ranks))

        def samples(tensor: int, ranks: int = ranks) -> bool:
            return not any(engine_layout_problems(_with(cfg, rollout={"tensor": tensor}), arch, ranks))

        sizes = divisors(ranks)
        tensors = [size for size in sizes if splits(tensor=size)]
        asked = [(size, cut) for cut in sorted({1, cfg.parallel.expert_tensor}) for size in sizes]
        experts = [(size, cut) for size, cut in asked if splits(expert=size, expert_tensor=cut)]
        searched = sizes if engines and cfg.rollout.engine == "vllm" else [cfg.rollout.tensor]
        replicas = [size for size in searched if samples(size)]
        for tensor, (expert, cut), replica in itertools.product(tensors, experts, replicas):
            split = {"tensor": tensor, "expert": expert, "expert_tensor": cut}
            for shared in {cfg.rollout.expert_parallel, False}:  # the trainer's shards, or the engine's own copy
                yield _with(cfg, parallel=split, rollout={"tensor": replica, "expert_parallel": shared}), ranks


def _distance(plan: Plan, cfg: Config, ranks: int) -> float:
    """How far a candidate lies from what was asked, in doublings of sizes."""
    old, new = plan.cfg.parallel, cfg.parallel
    pairs = [(old.tensor, new.tensor), (old.expert * old.expert_tensor, new.expert * new.expert_tensor)]
    pairs += [(old.expert_tensor, new.expert_tensor), (plan.cfg.rollout.tensor, cfg.rollout.tensor)]
    copied = plan.cfg.rollout.expert_parallel != cfg.rollout.expert_parallel
    return sum(abs(math.log2(a / b)) for a, b in [*pairs, (plan.layout.ranks, ranks)]) + 0.5 * copied


def overrides(plan: Plan, asked: Config) -> list[str]:
    """What to put on the command line for ``plan``: its layout in full, and every other key that differs."""
    new, given = plan.cfg, [f"parallel.{key}={getattr(plan.cfg.parallel, key)}" for key in
                            ("tensor", "expert", "expert_tensor")]  # fmt: skip
    if new.rollout.engine == "vllm":
        given.append(f"rollout.tensor={new.rollout.tensor}")
        if new.rollout.expert_parallel != asked.rollout.expert_parallel:
            given.append(f"rollout.expert_parallel={str(new.rollout.expert_parallel).lower()}")
        if new.rollout.kv_cache_mib != asked.rollout.kv_cache_mib:
            given.append(f"rollout.kv_cache_mib={new.rollout.kv_cache_mib}")
    given += [f"parallel.{axis}=1" for axis in ("pipeline", "context") if getattr(asked.parallel, axis) != 1]
    if new.optim.prompts_per_update != asked.optim.prompts_per_update:
        given.append(f"rollout.prompts_per_step={new.rollout.prompts_per_step}")
        given.append(f"optim.prompts_per_update={new.optim.prompts_per_update}")
    if new.optim.tokens_per_micro_batch != asked.optim.tokens_per_micro_batch:
        given.append(f"optim.tokens_per_micro_batch={new.optim.tokens_per_micro_batch}")
    if new.model.recompute != asked.model.recompute:
        given.append("model.recompute=true")
    return given
