"""Checks whether a configuration fits a number of ranks, and finds similar layouts that fit.

judge() applies the rules of inputs/rules.py about layouts, and then the memory plan. All layouts that alternatives()
and fastest() return have passed judge(). Nothing here imports torch.
"""

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from facts.architectures import Architecture
from facts.devices import Hardware
from facts.limits import ELEMENT_BYTES, cache_mib
from facts.root import ROOT
from inputs.rules import (
    batch_sizes,
    divisors,
    engine_shards,
    sampler_problems,
    trainer_problems,
)
from knobs import Config
from plan import grid, roofline
from plan.memory import GIB, Memory, step_memory

LISTED, FASTEST = 6, 5  # largest number of alternatives, and of layouts that --fastest lists
SMALLER = 6  # the search tries this many of the next smaller numbers of ranks


@dataclass(frozen=True)
class Setting:
    """The model and the machine for which a configuration is checked."""

    arch: Architecture
    device: str  # cpu | npu | cuda
    hardware: Hardware  # the device of one rank: from HARDWARE, or with constants from a run (plan/calibrate.py)
    ranks_per_node: int
    prompt_tokens: float  # mean
    completion_tokens: float  # mean
    turn_seconds: float = roofline.TURN_SECONDS  # seconds that decoding waits for rollout.environment at each turn


@dataclass(frozen=True)
class Verdict:
    """A configuration on a number of ranks, and the reasons why it does not fit.

    If the configuration breaks a rule, its memory and times are not planned.
    """

    cfg: Config
    layout: grid.RankGrid
    reasons: list[str]
    memory: Memory | None = None
    timed: Callable[[], roofline.Times | None] = lambda: None  # computes ``times`` when they are first needed

    @functools.cached_property
    def times(self) -> roofline.Times | None:
        return self.timed()

    @property
    def ranks(self) -> int:
        return self.layout.ranks


def broken_rules(cfg: Config, arch: Architecture, ranks: int) -> list[str]:
    """Return a message for each layout rule in inputs/rules.py that ``cfg`` breaks on ``ranks`` ranks."""
    return [
        *engine_shards(cfg.rollout, cfg.parallel, cfg.device),
        *batch_sizes(cfg.optim, cfg.rollout, cfg.data),
        *trainer_problems(cfg, arch, ranks),
        *sampler_problems(cfg, arch, ranks),
    ]


def judge(cfg: Config, ranks: int, setting: Setting) -> Verdict:
    """Check ``cfg`` on ``ranks`` ranks: apply ``broken_rules``, then compare the planned memory with the device's."""
    arch, layout = setting.arch, grid.of(cfg.parallel, cfg.rollout, ranks, setting.ranks_per_node)
    if reasons := broken_rules(cfg, arch, ranks):
        return Verdict(cfg, layout, reasons)
    hardware = setting.hardware
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    a_share = host // min(ranks, setting.ranks_per_node)  # of the host's memory, for one of a CPU's ranks
    capacity = int(hardware.memory_gib * GIB) if hardware.memory_gib else a_share
    memory = step_memory(cfg, arch, layout, setting.device, capacity)
    timed = functools.partial(
        roofline.step_times,
        cfg,
        arch,
        layout,
        hardware,
        memory,
        setting.prompt_tokens,
        setting.completion_tokens,
        cfg.rollout.max_new_tokens,
        setting.turn_seconds,
    )
    if memory.peak > capacity:
        parts = [(size, name) for name, size in memory.parts.items() if name not in ("margin", "logits chunk")]
        largest = ", ".join(f"{name} {size / GIB:.1f}" for size, name in sorted(parts, reverse=True)[:3])
        reasons.append(
            f"memory: {memory.fullest} needs {memory.peak / GIB:.1f} GiB per rank, margin included, more than the "
            f"{capacity / GIB:.1f} of the device; the largest parts: {largest}"
        )
    return Verdict(cfg, layout, reasons, memory, timed)


# -------------------------------------------------------------------------------------------------------- other layouts


def accepted(asked: Verdict, bases: Iterable[Config], ranks: int, setting: Setting) -> Iterator[Verdict]:
    """Yield the layouts on ``ranks`` ranks that judge() accepts.

    ``bases`` are configurations of which only the layout is changed. The layouts are in the order of ``bases``. For
    each of these, the layouts nearest to ``asked`` come first.
    """
    for base in bases:
        layouts = _candidates(base, ranks, setting.arch)
        for cfg in sorted(layouts, key=lambda new: _distance(asked.cfg, new)):
            verdict = judge(cfg, ranks, setting)
            if not verdict.reasons:
                yield verdict


def alternatives(refused: Verdict, setting: Setting) -> list[Verdict]:
    """Return the layouts that fit and are nearest to ``refused``, or [] if ``refused`` itself fits.

    The layouts have the requested number of ranks. Wrong batch sizes and a cache that is too small are corrected. The
    search first changes only the layout, then also recompute, then also the micro-batch. If there was nothing to
    correct, the list also has the unchanged configuration on the nearest number of ranks on which it fits.
    If no layout fits on this number of ranks, the search tries other numbers, and lists the nearest layout for each.
    In the list, layouts on no more ranks than requested come first; then memory and estimated time decide the order.
    """
    if not refused.reasons:
        return []
    cfg = _corrected(refused, setting.arch)
    recomputing = cfg.changed(model={"recompute": True})
    smaller = recomputing.changed(optim={"tokens_per_micro_batch": cfg.row_tokens})
    bases, counts = (cfg, recomputing, smaller), _other_counts(refused.ranks, setting)
    listed = list(itertools.islice(accepted(refused, bases, refused.ranks, setting), LISTED))
    if listed and cfg == refused.cfg:  # the configuration may be correct, and only the number of ranks wrong
        unchanged = (judge(cfg, count, setting) for count in counts)
        new = [verdict for verdict in unchanged if not verdict.reasons]
        listed = listed[: LISTED - 1] + new[:1]
    if not listed:
        of_counts = (accepted(refused, bases, count, setting) for count in counts)
        nearest = (next(verdicts, None) for verdicts in of_counts)
        listed = list(itertools.islice(filter(None, nearest), LISTED))
    return sorted(listed, key=lambda v: (v.ranks > refused.ranks, round(v.memory.peak / GIB, 1), v.times.total))


def fastest(asked: Verdict, setting: Setting) -> list[Verdict]:
    """Return the layouts with the shortest steps on as many ranks as ``asked``, each with its fastest settings.

    The settings are recompute, micro-batch and graphs. The search does not change the number of updates per step. With
    fewer updates, a step would be shorter, but the policy would learn less.
    """
    best: dict[str, Verdict] = {}
    for verdict in accepted(asked, _variants(asked), asked.ranks, setting):
        sampling = verdict.cfg.rollout
        split = f"{verdict.cfg.parallel} {sampling.tensor} {sampling.expert_parallel}"
        if split not in best or verdict.times.total < best[split].times.total:
            best[split] = verdict
    return sorted(best.values(), key=lambda verdict: verdict.times.total)[:FASTEST]


def _variants(asked: Verdict) -> Iterator[Config]:
    """Yield the configuration with each combination of recompute, micro-batch and graphs that fastest() compares."""
    cfg = asked.cfg
    tokens = cfg.optim.tokens_per_micro_batch
    graphs = (True, False) if cfg.rollout.kind.reserves else (cfg.rollout.enforce_eager,)
    sizes = (tokens // 2, tokens, 2 * tokens, 4 * tokens)
    for recompute, size, eager in itertools.product((True, False), sizes, graphs):
        if size >= cfg.row_tokens:
            optim = {"tokens_per_micro_batch": size}
            yield cfg.changed(model={"recompute": recompute}, optim=optim, rollout={"enforce_eager": eager})


def _corrected(refused: Verdict, arch: Architecture) -> Config:
    """Return the refused configuration with consistent batch sizes, and with a cache that holds at least one row."""
    cfg = refused.cfg
    prompts, update = cfg.rollout.prompts_per_step, cfg.optim.prompts_per_update
    update = min(divisors(prompts), key=lambda d: abs(math.log(d / update)))
    cache, element = cfg.rollout.kv_cache_mib, ELEMENT_BYTES[cfg.model.dtype]
    if cfg.rollout.kind.reserves and cache_mib(arch, cfg.rollout.tensor, cfg.row_tokens, element) > cache:
        cache = cache_mib(arch, 1, cfg.row_tokens, element)  # one row fits with any rollout.tensor
    return cfg.changed(
        optim={
            "prompts_per_update": update,
            "tokens_per_micro_batch": max(cfg.optim.tokens_per_micro_batch, cfg.row_tokens),
        },
        rollout={"kv_cache_mib": cache},
    )


def _other_counts(ranks: int, setting: Setting) -> list[int]:
    """Return numbers of ranks other than ``ranks``, the nearest first.

    They are the next smaller numbers, ``ranks`` repeatedly halved or doubled, powers of 2, and the ranks of whole
    nodes. The next smaller numbers are useful after a die or a node has failed.
    """
    node = setting.ranks_per_node
    power = 1 << ranks.bit_length()
    counts = {ranks // 4, ranks // 2, 2 * ranks, 4 * ranks, 8 * ranks, power // 2, power, node, 2 * node}
    counts |= {ranks - node, -(-ranks // node) * node, *range(ranks - SMALLER, ranks)}
    equal = (n for n in counts - {ranks} if n > 0 and (n <= node or n % node == 0))
    return sorted(equal, key=lambda n: (abs(math.log2(n / ranks)), -n))


def _candidates(cfg: Config, ranks: int, arch: Architecture) -> Iterator[Config]:
    """Yield every layout on ``ranks`` ranks in which each parallel size, taken alone, breaks no rule.

    judge() then applies all rules to the whole layout.
    """

    def trains(**sizes: int) -> bool:
        split = {"tensor": 1, "expert": 1} | sizes
        return not trainer_problems(cfg.changed(parallel=split, rollout={"expert_parallel": False}), arch, ranks)

    def samples(tensor: int) -> bool:
        split = {"tensor": tensor, "expert_parallel": False}
        return not sampler_problems(cfg.changed(rollout=split), arch, ranks)

    sizes = divisors(ranks)
    searched = sizes if cfg.rollout.kind.splits else [cfg.rollout.tensor]
    for tensor, expert, replica, shared in itertools.product(
        [size for size in sizes if trains(tensor=size)],
        [size for size in sizes if trains(expert=size)],
        [size for size in searched if samples(size)],
        {cfg.rollout.expert_parallel, False},  # if true, the engine uses the trainer's shards; otherwise its own copy
    ):
        yield cfg.changed(
            parallel={"tensor": tensor, "expert": expert}, rollout={"tensor": replica, "expert_parallel": shared}
        )


def _distance(asked: Config, new: Config) -> float:
    """Return the distance between two layouts: the number of doublings and halvings that turn one into the other.

    A different rollout.expert_parallel adds 0.5.
    """
    pairs = [
        (asked.parallel.tensor, new.parallel.tensor),
        (asked.parallel.expert, new.parallel.expert),
        (asked.rollout.tensor, new.rollout.tensor),
    ]
    copied = asked.rollout.expert_parallel != new.rollout.expert_parallel
    return sum(abs(math.log2(a / b)) for a, b in pairs) + 0.5 * copied


KEYS = (  # keys that a search can change, in the order in which overrides are listed
    "parallel.tensor",
    "parallel.expert",
    "rollout.tensor",
    "rollout.expert_parallel",
    "rollout.kv_cache_mib",
    "rollout.enforce_eager",
    "rollout.prompts_per_step",
    "optim.prompts_per_update",
    "optim.tokens_per_micro_batch",
    "model.recompute",
)


def overrides(verdict: Verdict, asked: Verdict) -> list[str]:
    """Return the overrides that turn ``asked`` into ``verdict``: all parallel sizes, and other keys that differ."""
    new, old = ({key: functools.reduce(getattr, key.split("."), each.cfg) for key in KEYS} for each in (verdict, asked))
    listed = {*KEYS[: 3 if asked.cfg.rollout.kind.splits else 2], *(key for key in KEYS if new[key] != old[key])}
    if "optim.prompts_per_update" in listed:
        listed.add("rollout.prompts_per_step")
    return [f"{key}={json.dumps(new[key])}" for key in KEYS if key in listed]


def scripts(config: Path, device: str) -> dict[int, str]:
    """Return the scripts that start this configuration file on one node, by the number of ranks that they start."""
    found = {}
    for path in sorted(ROOT.glob("run_*.sh"), reverse=True):  # of two with equally many ranks, the shorter name is used
        settings = r"^CONFIG=(?:\$\{CONFIG:-)?([^\s}]+)\}? DEVICE=(\w+) RANKS_PER_NODE=(\d+)$"
        head = re.search(settings, path.read_text(), re.M)
        if head and head[2] == device and (path.parent / head[1]).resolve() == config.resolve():
            found[int(head[3])] = path.name
    return found
