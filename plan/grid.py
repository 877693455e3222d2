"""Computes which ranks form which groups, for any number of ranks. Nothing here imports torch.

Ranks are in Megatron's order. The ranks of a tensor group are neighbours, and neighbours in a data group are ``tensor``
ranks apart. In the same way, the ranks of an expert group are neighbours, and neighbours in an expert_data group are
``expert`` ranks apart. A rollout replica consists of rollout.tensor neighbouring ranks.
tests/rooms/plan/test_estimates.py compares the groups with those that Megatron creates.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from knobs import ParallelConfig, RolloutConfig


@dataclass(frozen=True)
class RankGrid:
    """The sizes of all groups of ranks. The number of ranks is tensor x data = expert x expert_data."""

    ranks: int
    tensor: int
    expert: int
    engine_tensor: int  # ranks that share one copy of the attention for sampling
    engine_expert: int  # ranks that share one copy of the experts for sampling: engine_tensor, or all ranks
    ranks_per_node: int = 2**30

    @property
    def data(self) -> int:
        return self.ranks // self.tensor

    @property
    def expert_data(self) -> int:
        return self.ranks // self.expert

    @property
    def replicas(self) -> int:
        return self.ranks // self.engine_tensor

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """For each kind of group, its size and the distance between neighbouring ranks in the group."""
        return {
            "tensor": (self.tensor, 1),
            "data": (self.data, self.tensor),
            "expert": (self.expert, 1),
            "expert_data": (self.expert_data, self.expert),
            "rollout": (self.engine_tensor, 1),
        }

    def away(self, kind: str) -> float:
        """Return the share of a rank's messages in its group of this ``kind`` that leave the rank's node.

        This assumes that the rank sends the same number of bytes to every other rank of its group.
        """
        return self.away_of(*self.groups[kind])

    def away_of(self, size: int, distance: int = 1) -> float:
        """Return the same share as ``away``, for a group of ``size`` ranks that are ``distance`` apart."""
        here = min(size, max(1, self.ranks_per_node // distance))
        return (size - here) / max(1, size - 1)


WHOLE = RankGrid(1, 1, 1, 1, 1)  # one rank that holds everything


def of(parallel: ParallelConfig, rollout: RolloutConfig, ranks: int, ranks_per_node: int = 2**30) -> RankGrid:
    """Return the grid of ``ranks`` ranks. The embedded sampler has a copy of the model on each rank."""
    tensor = rollout.replica_ranks
    expert = ranks if rollout.expert_parallel and rollout.kind.splits else tensor
    return RankGrid(ranks, parallel.tensor, parallel.expert, tensor, expert, ranks_per_node)


PURPOSE = {
    "tensor": "splits attention, vocabulary, dense and shared experts",
    "data": "same shard of these, other sequences; sums their LoRA gradients",
    "expert": "splits the experts of each layer; every token is sent there and back",
    "expert_data": "same experts; sums their LoRA gradients",
    "rollout": "one copy of the model, for sampling",
}


def groups(layout: RankGrid) -> dict[str, list[list[int]]]:
    """Return, for each kind of group, the ranks of every group. Each rank is in exactly one group of each kind."""
    return {
        kind: [
            list(range(first + offset, first + size * stride, stride))
            for first in range(0, layout.ranks, size * stride)
            for offset in range(stride)
        ]
        for kind, (size, stride) in layout.groups.items()
    }


def crossing(members: list[list[int]], ranks_per_node: int) -> int:
    """Count the groups that have ranks on more than one node."""
    return sum(group[0] // ranks_per_node != group[-1] // ranks_per_node for group in members)


def describe(layout: RankGrid, ranks_per_node: int) -> list[str]:
    """Return a line for each kind of group.

    The line shows the number of groups, their size and purpose, and how many of them have ranks on several nodes.
    """
    lines = []
    for kind, members in groups(layout).items():
        size, distance = layout.groups[kind]
        cut = crossing(members, ranks_per_node)
        nodes = f"; {cut} of {len(members)} cross nodes" if cut else ""
        purpose = f", {distance} apart: {PURPOSE[kind]}{nodes}" if size > 1 else ""
        lines.append(f"  {kind:13} {len(members)} x {size}{purpose}")
    return lines


DEVICE_FILES = {"npu": "davinci", "cuda": "nvidia"}  # the names of their files in /dev, without the number at the end


def device_files(name: str, root: Path = Path("/")) -> list[int]:
    """Return the sorted numbers of the device files /dev/<name>0, /dev/<name>1 and so on."""
    numbers = [path.name.removeprefix(name) for path in (root / "dev").glob(f"{name}[0-9]*")]
    return sorted(int(number) for number in numbers if number.isdigit())


def device_of(device: str, root: Path = Path("/")) -> str:
    """Return the device to plan for: npu, cuda or cpu.

    With `device: auto`, this is the kind of device whose files are in /dev, or cpu if there are none.
    """
    if device != "auto":
        return device
    return next((kind for kind, name in DEVICE_FILES.items() if device_files(name, root)), "cpu")


def default_ranks(parallel: ParallelConfig, rollout: RolloutConfig, device: str, ranks_per_node: int) -> int:
    """Return the number of ranks of a whole node, or, on a CPU, the smallest number that all parallel sizes divide."""
    if device != "cpu":
        return ranks_per_node
    layout = of(parallel, rollout, 1)
    return math.lcm(layout.tensor, layout.expert, layout.engine_tensor)
