"""Where each rank of a layout stands and with whom it shares a group, for any number of ranks. Arithmetic, no torch.

The order is Megatron's: tensor ranks are neighbours, then data; for the experts expert_tensor ranks are neighbours,
then expert, then expert_data. A rollout replica is rollout.tensor neighbours. tests/test_preflight.py holds it to it.
"""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass

from knobs import Config


@dataclass(frozen=True)
class Layout:
    """ranks = tensor x data = expert_tensor x expert x expert_data."""

    ranks: int
    tensor: int
    expert: int
    expert_tensor: int
    engine_tensor: int  # ranks that split one copy of the attention for sampling
    engine_expert: int  # ranks that split one copy of the experts for sampling: those, or all (rollout.expert_parallel)

    @property
    def data(self) -> int:
        return self.ranks // self.tensor

    @property
    def expert_data(self) -> int:
        return self.ranks // (self.expert * self.expert_tensor)

    @property
    def replicas(self) -> int:
        return self.ranks // self.engine_tensor


def of(cfg: Config, ranks: int) -> Layout:
    """The layout that ``cfg`` asks of ``ranks`` ranks; the torch engine has a copy of the model on each."""
    parallel = cfg.parallel
    tensor = cfg.rollout.tensor if cfg.rollout.engine == "vllm" else 1
    expert = ranks if cfg.rollout.expert_parallel and cfg.rollout.engine == "vllm" else tensor
    return Layout(ranks, parallel.tensor, parallel.expert, parallel.expert_tensor, tensor, expert)


def groups(layout: Layout) -> dict[str, list[list[int]]]:
    """The ranks of every group of each kind; each rank is in exactly one group of a kind."""
    experts = layout.expert_tensor * layout.expert
    return {
        "tensor": _grid(layout.ranks, layout.tensor, 1),
        "data": _grid(layout.ranks, layout.data, layout.tensor),
        "expert_tensor": _grid(layout.ranks, layout.expert_tensor, 1),
        "expert": _grid(layout.ranks, layout.expert, layout.expert_tensor),
        "expert_data": _grid(layout.ranks, layout.expert_data, experts),
        "rollout": _grid(layout.ranks, layout.engine_tensor, 1),
    }


def _grid(ranks: int, size: int, stride: int) -> list[list[int]]:
    """Groups of ``size`` ranks, ``stride`` apart, which together are all ranks."""
    block = size * stride
    return [
        list(range(first + offset, first + offset + block, stride))
        for first in range(0, ranks, block)
        for offset in range(stride)
    ]


def crossing(members: list[list[int]], ranks_per_node: int) -> int:
    """How many of the groups have ranks on more than one node."""
    return sum(group[0] // ranks_per_node != group[-1] // ranks_per_node for group in members)


WHAT = {
    "tensor": "splits attention, vocabulary, dense and shared experts",
    "data": "same shard of those, other sequences; sums their LoRA gradients",
    "expert_tensor": "splits each expert's matrices",
    "expert": "splits the experts of a layer; every token goes there and back",
    "expert_data": "same experts; sums their LoRA gradients",
    "rollout": "one copy of the model that samples",
}


def describe(layout: Layout, ranks_per_node: int) -> list[str]:
    """One line for each kind of group: how many, which ranks, what for, and how many of them cross nodes."""
    lines = []
    for kind, members in groups(layout).items():
        size = len(members[0])
        if size == 1:
            lines.append(f"  {kind:13} {len(members)} x 1")
            continue
        shown = " ".join("{" + _brief(group) + "}" for group in members[:2])
        shown += f" ... {{{_brief(members[-1])}}}" if len(members) > 2 else ""
        cut = crossing(members, ranks_per_node)
        nodes = f"; {cut} of {len(members)} cross nodes" if cut else ""
        lines.append(f"  {kind:13} {len(members)} x {size}: {shown}  {WHAT[kind]}{nodes}")
    return lines


def _brief(group: list[int]) -> str:
    if len(group) <= 4:
        return ",".join(map(str, group))
    step = group[1] - group[0]
    return f"{group[0]}-{group[-1]}" if step == 1 else f"{group[0]},{group[1]}..{group[-1]}"


DEVICE_FILES = {"npu": "/dev/davinci[0-9]*", "cuda": "/dev/nvidia[0-9]*"}


def device_of(cfg: Config) -> str:
    """The device to plan for; under `auto` the one whose device files this machine has, else cpu."""
    if cfg.device != "auto":
        return cfg.device
    return next((name for name, pattern in DEVICE_FILES.items() if glob.glob(pattern)), "cpu")


def default_ranks(cfg: Config, device: str, ranks_per_node: int) -> int:
    """A whole node of an accelerator; on a CPU the fewest ranks that the layout divides."""
    if device != "cpu":
        return ranks_per_node
    engine = cfg.rollout.tensor if cfg.rollout.engine == "vllm" else 1
    return math.lcm(cfg.parallel.tensor, cfg.parallel.expert * cfg.parallel.expert_tensor, engine)
