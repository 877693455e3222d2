"""Tests and times the process groups of a layout: every collective that training uses, over every group that it uses.

    torchrun --nproc_per_node=N preflight.py --groups CONFIG [section.key=value ...] [--json FILE]

The right answers are known in advance.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from checks import launched
from facts.exits import InputError
from hardware import device as devices
from knobs import Config, ParallelConfig
from parallel_setup import Parallel

ELEMENTS = {"cpu": 2**14, "cuda": 2**24, "npu": 2**24}  # fp32 numbers per rank: 64 KiB, or 64 MiB, as for activations
REPEATS = 5  # timed runs; an untimed run before them builds the communicator


def measure(parallel: Parallel) -> list[dict]:
    """Return a row for each kind of group and each collective. A row covers all groups of its kind.

    All ranks call this together, and get the same rows.
    """
    todo = [(name, group, parallel.device) for name, group in parallel.groups().items()]
    todo.append(("world", dist.group.WORLD, torch.device("cpu")))
    mine = [row for one in todo for row in _measure_group(*one)]
    return [_of_all_ranks(rows) for rows in zip(*parallel.gather_objects(mine), strict=True)]


def _of_all_ranks(rows: tuple[dict, ...]) -> dict:
    """Combine all ranks' rows for a collective. The time is that of the slowest rank.

    ``answer`` is "right", or names the wrong groups and the first error.
    """
    members = {str(row["members"]): row["members"] for row in rows}
    wrong = {str(row["members"]): row["wrong"] for row in rows if row["wrong"]}
    return {
        "group": rows[0]["group"],
        "groups": len(members),
        "ranks": len(rows[0]["members"]),
        "members": [*members.values()],
        "collective": rows[0]["collective"],
        "milliseconds": max(row["milliseconds"] for row in rows),
        "answer": f"WRONG in ranks {', '.join(wrong)}: {next(iter(wrong.values()))}" if wrong else "right",
    }


def as_text(rows: list[dict]) -> str:
    line = "{group:<22}{groups:>7}{ranks:>7}  {collective:<12}{milliseconds:>9.2f}  {answer}"
    head = f"{'group':<22}{'groups':>7}{'ranks':>7}  {'collective':<12}{'ms':>9}  answer"
    return "\n".join([head, *(line.format(**row) for row in rows)])


def _measure_group(name: str, group: dist.ProcessGroup, device: torch.device) -> list[dict]:
    """Run each collective over one group, and return this rank's rows.

    In each row, ``wrong`` describes the first wrong element; it is empty if the answer is right.
    """
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    size, count = len(ranks), ELEMENTS[device.type]
    # The value of a rank is its number in the world + 1, which shows a wrong sum, order or neighbour.
    value = torch.full((count,), ranks[me] + 1.0, device=device)
    gathered = value.new_empty(size * count)
    # Rank i of the group sends i + 1 + 2 j rows to rank j: all-to-all is the one collective with unequal shares.
    sends, receives = [me + 1 + 2 * other for other in range(size)], [other + 1 + 2 * me for other in range(size)]
    tokens, received = value.new_full((sum(sends), 8), ranks[me] + 1.0), value.new_empty(sum(receives), 8)

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

    numbers = torch.tensor(ranks) + 1.0
    jobs: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "all-reduce": (all_reduce, numbers.sum().expand(count)),
        "all-gather": (all_gather, numbers[:, None].expand(size, count)),
        "all-to-all": (all_to_all, numbers.repeat_interleave(torch.tensor(receives))[:, None].expand(-1, 8)),
        "barrier": (barrier, numbers[me].expand(count)),
    }
    # The untimed run comes first; its answer is compared.
    return [
        {
            "group": name,
            "members": ranks,
            "collective": kind,
            "wrong": difference(job().cpu(), expected),
            "milliseconds": devices.median_milliseconds(job, device, REPEATS),
        }
        for kind, (job, expected) in jobs.items()
    ]


def difference(found: Tensor, expected: Tensor) -> str:
    """Describe the first wrong element of ``found``, or return "" if there is none."""
    places = (found != expected).flatten().nonzero()
    if not len(places):
        return ""
    place = int(places[0])
    return f"element {place} is {found.flatten()[place]:g}, not {expected.flatten()[place]:g}"


def refuse(parallel: ParallelConfig, ranks: int) -> None:
    """Raise InputError if a size in ``parallel`` does not divide the number of ranks. The model is not checked."""
    for key, size in {"tensor": parallel.tensor, "expert": parallel.expert}.items():
        if ranks % size:
            raise InputError(f"parallel.{key}: {size} does not divide the {ranks} started ranks; choose a divisor")


def answer(cfg: Config, parallel: Parallel) -> launched.Answer:
    rows = measure(parallel)
    head = f"{parallel.world_size} ranks on {parallel.device.type}, {devices.BACKENDS[parallel.device.type]}"
    return launched.Answer(all(row["answer"] == "right" for row in rows), f"{head}\n{as_text(rows)}", rows)


def main(arguments: list[str]) -> int:
    """Run the command. Exit code 0: every group works. 1: an answer is wrong; see the table. 2: unusable input."""
    return launched.ask(
        launched.command_line("--groups", __doc__).parse_intermixed_args(arguments),
        lambda cfg, ranks: refuse(cfg.parallel, ranks),
        answer,
    )
