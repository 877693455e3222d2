"""What a dry run counts at torch's dispatcher in each phase: bytes that are alive, operations, launches, collectives.

It also counts the calls at which the host waits for the device. Tensors of a dry run hold no data, so the meter also
answers where a value decides what happens next.
"""

import bisect
import contextlib
import itertools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).parents[1]
TORCH = str(Path(torch.__file__).parent)
HIDDEN = (__file__, str(ROOT / "checks" / "dry_run_device.py"))  # files that stand between the trainer and torch
ANSWER = "dry_run_answer"  # attribute of a flag: the value that it stands for
aten, c10d = torch.ops.aten, torch.ops.c10d
# Calls that give a tensor of the device and start nothing on it, apart from the views that torch marks.
NO_LAUNCH = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view)
# The shape of their result depends on values, so the host waits for them.
SIZED_BY_VALUES = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive)
RESIDENT = ("weights", "adapters", "moments", "older")  # there before a step and after it
KINDS = (*RESIDENT, "gradients", "activations", "temporary")
LISTED = 10  # largest allocations of a phase that are reported, apart from the resident ones


@dataclass(slots=True)
class Allocation:
    """A piece of device memory. Times are numbers of operations since the start."""

    size: int  # bytes
    phase: str
    where: str  # file and line of the call, operation, type and shape
    born: int
    died: int = sys.maxsize
    kind: str = ""  # of KINDS, where it is known: otherwise an activation if it outlives the forward pass


@dataclass
class Phase:
    """What the meter has seen of a phase; the operations and collectives over all its parts."""

    parts: list[list[int]] = field(default_factory=list)  # [first, last] time of each
    operations: int = 0  # calls of torch's operators
    launches: Counter = field(default_factory=Counter)  # operator -> calls that start work on the device
    waits: Counter = field(default_factory=Counter)  # file and line -> calls for which the host waits for the device
    flops: Counter = field(default_factory=Counter)  # operator -> floating-point operations
    collectives: Counter = field(default_factory=Counter)  # (operator, group) -> calls
    sent: Counter = field(default_factory=Counter)  # (operator, group) -> bytes that this rank sends


class Peak(NamedTuple):
    """The fullest moment of a phase."""

    bytes: int
    kinds: dict[str, int]
    largest: list[tuple[int, int, str]]  # bytes, number of allocations, where


class Meter(TorchDispatchMode):
    """Counts inside a with block. ``device``: the type whose memory is counted.

    ``answers``: whether tensors hold no data, so that values are made up: numbers are 1 or 0, no flag is set, all
    weights are finite, and ``scored`` tokens reach the head.
    """

    def __init__(self, device: str, *, answers: bool) -> None:
        super().__init__()
        self.device, self.answers, self.scored = device, answers, 0
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.current, self.time = "", 0
        self.started = False  # whether the device got work since the host last waited for it
        self.suffix = ""  # of the names of the phases that are entered from now on
        self.groups: dict[str, str] = {}  # torch's name of a group -> ours
        self.allocations: list[Allocation] = []
        self.alive: dict[int, Allocation] = {}  # by storage

    # -------------------------------------------------------------------------------------------- phases and kinds

    def enter(self, phase: str) -> str:
        """From now on everything counts for ``phase``. -> the phase before"""
        if phase and not phase.endswith(self.suffix):
            phase += self.suffix
        before, self.current = self.current, phase
        if before:
            self.phases[before].parts[-1][1] = self.time
        if phase:
            self.phases[phase].parts.append([self.time + 1, self.time])
        return before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """The memory of ``tensors`` is of this kind."""
        for tensor in tensors:
            if allocation := self.alive.get(tensor.untyped_storage()._cdata):
                allocation.kind = kind

    def forget(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` does not count."""
        self.alive[tensor.untyped_storage()._cdata].size = 0

    # -------------------------------------------------------------------------------------------- each operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        self.time += 1
        if func.namespace == "c10d" and self.answers:
            return self._collective(func, packet, args)
        if packet is aten._local_scalar_dense:
            self._waits_for(args[0])
            if self.answers:
                return _value(args[0])
        if packet is aten.equal and self.answers:
            return True
        out = self._sized_by_values(packet, args) if self.answers else None
        if out is None:
            out = func(*args, **kwargs)
        if self.answers and packet in (aten.any, aten.all):
            setattr(out, ANSWER, packet is aten.all)
        phase = self.phases[self.current]
        phase.operations += 1
        results = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        for tensor in results:
            self._see(tensor, packet.__name__)
        given = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
        on_device = any(tensor.device.type == self.device for tensor in (*results, *given))
        if on_device and func.namespace != "prim" and not func.is_view and packet not in NO_LAUNCH:
            phase.launches[packet.__name__] += 1
            self.started = True
        blocks = packet in (aten._to_copy, aten.copy_) and not kwargs.get("non_blocking")
        if packet in SIZED_BY_VALUES or (blocks and results[0].device.type != self.device):
            self._waits_for(*given)
        if count := _flops(packet, args, kwargs, out):
            phase.flops[packet.__name__] += count
        return out

    def wait(self, where: str) -> None:
        """Note that the host waits for the device at this place, unless nothing was started since it last waited."""
        if self.device != "cpu" and self.started:
            self.phases[self.current].waits[where] += 1
            self.started = False

    def _waits_for(self, *tensors: Tensor) -> None:
        if any(tensor.device.type == self.device for tensor in tensors):
            self.wait(_caller())

    def _sized_by_values(self, packet: object, args: tuple) -> Tensor | None:
        """The result of an operation whose shape depends on values, or that torch refuses without data."""
        if packet is aten.nonzero:  # token_logprobs: where the mask is 1
            return args[0].new_empty((self.scored, args[0].dim()), dtype=torch.int64)
        if packet is aten._grouped_mm and args[0].dtype == torch.float32:  # works, but not without data
            x, weight = args[:2]
            return x.new_empty((*([len(args[2])] if weight.dim() == 2 else []), x.shape[0], weight.shape[-1]))
        return None

    def _see(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != self.device or key in self.alive:
            return
        where = f"{_caller()} {operator} {str(tensor.dtype)[6:]} {list(tensor.shape)}"
        allocation = Allocation(storage.nbytes(), self.current, where, self.time)
        self.alive[key] = allocation
        self.allocations.append(allocation)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.alive.pop(key).died = self.time + 1  # the last operation was still using it

    def _collective(self, func, packet, args: tuple):
        """Count a collective; its results are whatever the buffers hold."""
        group = CollectiveOp.get_process_group(func, args)
        size, name = group.size(), self.groups.get(group.group_name)
        out = [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]
        if size > 1:
            every = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            # The larger side of a gather or scatter is what a ring moves, but for this rank's own part.
            largest = max(sum(x.nbytes for x in out), sum(x.nbytes for x in every) - sum(x.nbytes for x in out))
            times = 2 if packet is c10d.allreduce_ else 1
            key = packet.__name__.strip("_"), name or f"ranks {_ranks(group)}"
            phase = self.phases[self.current]
            phase.collectives[key] += 1
            phase.sent[key] += times * largest * (size - 1) // size
        work = FakeWork().boxed()
        return work if func in CollectiveOp.WK else (args[0], work)

    # -------------------------------------------------------------------------------------------- results

    def peak(self, name: str) -> Peak:
        """The fullest moment of a phase."""
        changes: dict[int, int] = defaultdict(int)
        for allocation in self.allocations:
            changes[allocation.born] += allocation.size
            if allocation.died != sys.maxsize:
                changes[allocation.died] -= allocation.size
        times = sorted(changes)
        level = [0, *itertools.accumulate(changes[time] for time in times)]
        most, when = 0, 0
        # A phase without operations holds what is there when it ends.
        parts = self.phases[name].parts
        for first, last in [part for part in parts if part[0] <= part[1]] or [[last, last] for _, last in parts[-1:]]:
            start, end = bisect.bisect_right(times, first), bisect.bisect_right(times, last)
            for place in range(start, end + 1):  # what is there at first, and each change
                if level[place] > most:
                    most, when = level[place], max(first, times[place - 1])
        held = [one for one in self.allocations if one.born <= when < one.died]
        kinds = dict.fromkeys(KINDS, 0)
        places: Counter = Counter()
        counts: Counter = Counter()
        for one in held:
            kind = self._kind(one)
            kinds[kind] += one.size
            if kind not in RESIDENT:
                places[one.where] += one.size
                counts[one.where] += 1
        return Peak(most, kinds, [(size, counts[where], where) for where, size in places.most_common(LISTED)])

    def held(self) -> int:
        """Bytes that are alive now."""
        return sum(allocation.size for allocation in self.alive.values())

    def _kind(self, allocation: Allocation) -> str:
        if allocation.kind:
            return allocation.kind
        if not allocation.phase.startswith("forward"):
            return "temporary"
        end = next(last for first, last in self.phases[allocation.phase].parts if first <= allocation.born <= last)
        return "activations" if allocation.died > end else "temporary"


def _caller() -> str:
    """File and line of the repository's or Megatron's code that called torch; inside autograd, that of the backward."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in HIDDEN and not name.startswith((TORCH, "<")) and "/contextlib" not in name:
            path = Path(name)
            short = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            parts = short.parts
            if "site-packages" in parts:
                short = Path(*parts[parts.index("site-packages") + 1 :])
            return f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _ranks(group) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def _value(tensor: Tensor) -> Any:
    """The made-up value of a tensor of one number."""
    if hasattr(tensor, ANSWER):
        return getattr(tensor, ANSWER)
    constant = getattr(tensor, "constant", None)  # of torch.tensor(number)
    if constant is not None:
        return constant.item()
    return False if tensor.dtype == torch.bool else float(tensor.is_floating_point())


# ------------------------------------------------------------------------------------------------ operations


def _grouped(x: Tensor, weight: Tensor) -> int:
    """(N, k) (E, k, o), or for a weight's gradient (k, N) (N, o)."""
    return 2 * x.shape[0] * x.shape[1] * weight.shape[-1]


def _attention(query: Tensor, key: Tensor, products: int, causal: bool) -> int:
    """``products`` products of the size of q k; a causal kernel computes half of each square."""
    b, heads, t, d = query.shape
    return products * 2 * b * heads * t * key.shape[2] * d // (2 if causal else 1)


def _flops(packet, args: tuple, kwargs: dict, out: object) -> int:
    """Floating-point operations: by torch's formulas, and for the operators that it lacks by these."""
    name = packet.__name__
    if name == "_grouped_mm":
        return _grouped(args[0], args[1])
    if name == "npu_grouped_matmul":
        return _grouped(args[0][0], args[1][0])
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):  # computes the whole square
        backward = name.endswith("backward")
        return _attention(args[backward], args[1 + backward], 5 if backward else 2, False)
    if name.startswith("npu_fusion_attention"):
        return _attention(args[0], args[1], 5 if name.endswith("grad") else 2, kwargs.get("sparse_mode") == 2)
    if name.startswith("_varlen_attn"):  # the lengths are unknown without data: all keys of the longest sequence
        backward = name.endswith("backward")
        (tokens, heads, d), longest = args[backward].shape, args[9 if backward else 6]
        return (5 if backward else 2) * 2 * tokens * heads * longest * d
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=out) if formula else 0
