"""Proves and times the process groups of a layout: every group that carries traffic, every collective that it carries,
with answers known beforehand.

    torchrun --nproc_per_node=N preflight.py --groups CONFIG [section.key=value ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import device as devices
import parallel_setup
from config import load_config
from input_files import BAD_INPUT, InputError, one_line
from knobs import Config
from parallel_setup import Parallel

ELEMENTS = {"cpu": 2**14, "cuda": 2**24, "npu": 2**24}  # fp32 from each rank: 64 KiB, or 64 MiB as activations are
REPEATS = 5  # timed after one that is not: communicators are built at the first use


class Result(NamedTuple):
    """One collective over one group, as one rank saw it."""

    group: str
    ranks: list[int]
    collective: str
    milliseconds: float
    wrong: str  # what was found and expected; empty if right


def check(parallel: Parallel) -> list[Result]:
    """Every rank's results over its own groups, and over the world on the host; the same list on every rank."""
    mine: list[Result] = []
    for name, group in {**parallel.groups(), "world": dist.group.WORLD}.items():
        device = torch.device("cpu") if name == "world" else parallel.device
        mine += _check_group(name, group, device)
    everyones: list = [None] * parallel.world_size
    dist.all_gather_object(everyones, mine)
    return [result for one in everyones for result in one]


def report(results: list[Result]) -> tuple[str, bool]:
    """A table with a row for a group and collective, and whether all were right. Times are of the slowest rank."""
    lines = [f"{'group':<22}{'groups':>7}{'ranks':>7}  {'collective':<12}{'ms':>9}  answer"]
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        rows.setdefault((result.group, result.collective), []).append(result)
    for (group, collective), found in rows.items():
        wrong = [result for result in found if result.wrong]
        answer = "right"
        if wrong:
            places = sorted({tuple(result.ranks) for result in wrong})
            answer = f"WRONG in ranks {', '.join(str(list(place)) for place in places)}: {wrong[0].wrong}"
        groups = len({tuple(result.ranks) for result in found})
        slowest = max(result.milliseconds for result in found)
        lines.append(f"{group:<22}{groups:>7}{len(found[0].ranks):>7}  {collective:<12}{slowest:>9.2f}  {answer}")
    return "\n".join(lines), not any(result.wrong for result in results)


def _check_group(name: str, group: dist.ProcessGroup, device: torch.device) -> list[Result]:
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    size, count = len(ranks), ELEMENTS[device.type]
    # A rank's value is its number in the world + 1: a sum, an order and a wrong neighbour all show.
    value = torch.full((count,), float(ranks[me] + 1), device=device)
    gathered = value.new_empty(size * count)
    # Place i of the group sends i + 1 + 2 j rows to place j: all-to-all is the one collective whose shares differ.
    sends, receives = [me + 1 + 2 * other for other in range(size)], [other + 1 + 2 * me for other in range(size)]
    tokens, received = value.new_full((sum(sends), 8), float(ranks[me] + 1)), value.new_empty(sum(receives), 8)

    def all_reduce() -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    def all_gather() -> Tensor:
        dist.all_gather_into_tensor(gathered, value, group=group)
        return gathered.view(size, count)

    def all_to_all() -> Tensor:
        dist.all_to_all_single(received, tokens, receives, sends, group=group)
        return received

    def barrier() -> Tensor:
        dist.barrier(group=group)
        return value

    numbers = torch.tensor([float(rank + 1) for rank in ranks])
    jobs: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "all-reduce": (all_reduce, numbers.sum().expand(count)),
        "all-gather": (all_gather, numbers[:, None].expand(size, count)),
        "all-to-all": (all_to_all, numbers.repeat_interleave(torch.tensor(receives))[:, None].expand(-1, 8)),
        "barrier": (barrier, numbers[me].expand(count)),
    }
    return [Result(name, ranks, kind, *_run(job, expected, device)) for kind, (job, expected) in jobs.items()]


def _run(job: Callable[[], Tensor], expected: Tensor, device: torch.device) -> tuple[float, str]:
    """Median milliseconds of ``job``, and what is wrong with its first answer."""
    found = job().cpu()
    milliseconds = devices.median_milliseconds(job, device, REPEATS)
    wrong = (found != expected).flatten().nonzero()
    if not len(wrong):
        return milliseconds, ""
    place = int(wrong[0])
    seen, needed = found.flatten()[place].item(), expected.flatten()[place].item()
    return milliseconds, f"element {place} is {seen:g}, not {needed:g}"


def check_groups(cfg: Config) -> bool:
    """Build the groups of ``cfg``, prove and time them, and print one table; whether every answer was right."""
    layout, ranks = cfg.parallel, parallel_setup.launched_world_size()
    for key, size in {"tensor": layout.tensor, "expert": layout.expert * layout.expert_tensor}.items():
        if ranks % size:
            raise InputError(f"parallel.{key}: {size} ranks of a group do not divide the {ranks} that were started")
    with parallel_setup.open_world(cfg) as device:
        parallel = parallel_setup.open_layout(cfg.parallel, device)
        table, right = report(check(parallel))
        if parallel.rank == 0:
            print(f"{parallel.world_size} ranks on {device.type}, {devices.backend(device)}\n{table}", flush=True)
    return right


def main(arguments: list[str]) -> int:
    """Exit code 0: every group works; 1: a wrong answer, named in the table; 2: unusable input, one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", help="YAML file, e.g. configs/qwen3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(arguments)
    rank = 0
    try:
        rank = parallel_setup.check_launch()
        return 0 if check_groups(load_config(args.config, args.overrides)) else 1
    except BAD_INPUT as error:
        parallel_setup.report(rank, f"error: {one_line(error)}")
        return 2
