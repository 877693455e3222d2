"""Measure the bytes of all live tensors with torch's profiler, from the allocator's allocations and releases.

The file also has the model and the rollout of an update that is measured.
"""

from __future__ import annotations

import gc

import torch

from facts.architectures import Architecture
from knobs import Config
from model import megatron_model
from model.batches import Rollout
from parallel_setup import Parallel
from weights.policy import Policy


class LiveBytes:
    """Counts the bytes that are allocated inside a with block and not yet freed.

    After the block, ``now`` holds the bytes at its end, and ``peak`` the maximum.

    Python's garbage collector is off inside the block: it runs at random moments, and uncollected tensors use memory.
    """

    now = peak = 0

    def __enter__(self) -> LiveBytes:
        gc.collect()
        gc.disable()
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.profile.__exit__(*error)
        gc.enable()
        self.now = self.peak = 0
        sizes: dict[int, int] = {}  # of allocations inside the block; older tensors may be freed there too
        for event in sorted(_all(self.profile.profiler.kineto_results.experimental_event_tree()), key=_start):
            if event.name != "[memory]":
                continue
            pointer, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            if size > 0:
                sizes[pointer] = size
            else:
                sizes.pop(pointer, None)
            self.now = sum(sizes.values())
            self.peak = max(self.peak, self.now)


def _start(event) -> int:
    return event.start_time_ns


def _all(events: list) -> list:
    return [one for event in events for one in (event, *_all(event.children))]


def policy_of(parallel: Parallel, cfg: Config, arch: Architecture, merges: bool = False) -> Policy:
    """A policy in fp32 with random weights."""
    model = megatron_model.build(arch, parallel, dtype=torch.float32, recompute=cfg.model.recompute)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.05)
    policy = Policy.on(cfg, arch, parallel, model)
    for adapter in policy.adapters.values():
        adapter.merges = merges
    return policy


def rollout_of(cfg: Config, shortest: int | None = None) -> Rollout:
    """Completions of one length, or of all lengths from ``shortest`` on, to prompts of four tokens."""
    prompts, group, new = cfg.rollout.prompts_per_step, cfg.rollout.group_size, cfg.rollout.max_new_tokens
    sequences = prompts * group
    return Rollout(
        prompts=[[5, 6, 7, 8]] * prompts,
        tokens=torch.randint(3, 250, (sequences, new), generator=torch.Generator().manual_seed(0)),
        logp=torch.full((sequences, new), -6.0),
        lengths=[new - i % (new - (shortest or new) + 1) for i in range(sequences)],
        truncated=torch.zeros(sequences, dtype=torch.bool),
        rewards=torch.rand(prompts, group),
        parsable=torch.ones(prompts, group),
        correct=torch.ones(prompts, group),
    )
