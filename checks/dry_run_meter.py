"""Counts the allocated bytes, operations, launches and collectives of each phase, at torch's dispatcher."""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten, c10d = torch.ops.aten, torch.ops.c10d
# Operators that return a tensor on the device, or a value from one, and start no kernel. torch itself marks views.
NO_LAUNCH = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._local_scalar_dense,
    aten.equal,
)


@dataclass
class Phase:
    """The counts of a phase, over all the times that the phase is entered."""

    peak: int = 0  # the most bytes that are allocated at one moment
    flops: int = 0  # floating-point operations
    launches: int = 0  # calls that start work on the device
    collectives: Counter = field(default_factory=Counter)  # (operator, group) -> calls
    sent: Counter = field(default_factory=Counter)  # (operator, group) -> bytes that this rank sends


class Meter(TorchDispatchMode):
    """A dispatch mode that counts operations and memory. ``device`` is the device type whose memory it counts."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.groups: dict[str, str] = {}  # torch's name of a group -> ours
        self.ending = ""  # appended to the names of the phases that are entered from now on
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.current = Phase()  # outside of all phases
        self.sizes: dict[int, int] = {}  # bytes of each allocated storage
        self.now = 0  # sum of the sizes

    # -------------------------------------------------------------------------------------------- phases

    def enter(self, name: str) -> None:
        """Count all operations from now on for the phase ``name``."""
        self._go_on_with(self.phases[name + self.ending])

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count all operations in this block for the phase ``name``."""
        before = self.current
        self.enter(name)
        yield
        self._go_on_with(before)

    def _go_on_with(self, phase: Phase) -> None:
        self.current.peak = max(self.current.peak, self.now)  # a phase may have no operations
        self.current = phase

    # -------------------------------------------------------------------------------------------- memory

    def size_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of memory that ``tensors`` use. A storage that several of them share counts once."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(self.sizes.get(storage, 0) for storage in storages)

    def forget(self, tensor: Tensor) -> None:
        """Stop counting the memory of ``tensor``."""
        key = tensor.untyped_storage()._cdata
        self.now -= self.sizes[key]
        self.sizes[key] = 0

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != self.device or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    # -------------------------------------------------------------------------------------------- each operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        phase, operator = self.current, func.overloadpacket
        if func.namespace == "c10d":
            self._count_collective(func, args)
            return out
        results = tensors_of(out)
        for tensor in results:
            self._see(tensor)
        phase.peak = max(phase.peak, self.now)
        on_device = any(tensor.device.type == self.device for tensor in (*results, *tensors_of(args)))
        if on_device and func.namespace != "prim" and not func.is_view and operator not in NO_LAUNCH:
            phase.launches += 1
        if formula := FLOPS.get(operator.__name__) or flop_registry.get(operator):
            phase.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _count_collective(self, func, args: tuple) -> None:
        group = CollectiveOp.get_process_group(func, args)
        ranks = group.size()
        if ranks == 1:
            return
        every = sum(tensor.nbytes for tensor in tensors_of(args))
        out = sum(tensor.nbytes for tensor in tensors_of(args[0]))
        # A ring moves the larger side of a gather or scatter, except this rank's part.
        largest = max(out, every - out)
        times = 2 if func.overloadpacket is c10d.allreduce_ else 1
        name = self.groups.get(group.group_name) or f"ranks {dist.get_process_group_ranks(group)}"
        key = func.overloadpacket.__name__.strip("_"), name
        self.current.collectives[key] += 1
        self.current.sent[key] += times * largest * (ranks - 1) // ranks


def tensors_of(tree: object) -> list[Tensor]:
    """Return the tensors among the leaves of an operator's arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# ------------------------------------------------------------------------------------------------ operations


def _grouped(x: Tensor, weight: Tensor, *others, **options) -> int:
    """Return the number of operations in a grouped matrix product.

    N is the number of rows, E of groups, k the input size, and o the output size. The shapes are (N, k) and (E, k, o),
    or (k, N) and (N, o) for the gradient of a weight.
    """
    return 2 * x.shape[0] * x.shape[1] * weight.shape[-1]


def _attention(products: int, query: Tensor, key: Tensor, *others, sparse_mode: int = 0, **options) -> int:
    """Return the number of operations in ``products`` matrix products, each as large as that of queries and keys.

    A causal kernel (sparse_mode 2) computes half of each product.
    """
    b, heads, queries, d = query.shape
    whole = products * 2 * b * heads * queries * key.shape[2] * d
    return whole // 2 if sparse_mode == 2 else whole


def _sequences(products: int, query: Tensor, longest: int) -> int:
    """Return the number of operations in ``products`` matrix products of all queries with ``longest`` keys.

    Without data, the lengths of the sequences are not known, so each sequence counts as the longest one.
    """
    tokens, heads, d = query.shape
    return products * 2 * tokens * heads * longest * d


# The formulas of operators for which torch has none, or has one that needs data.
FLOPS: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped,
    "npu_grouped_matmul": lambda x, weight, **options: _grouped(x[0], weight[0]),
    "npu_fusion_attention": partial(_attention, 2),
    "npu_fusion_attention_grad": partial(_attention, 5),
    "_scaled_dot_product_flash_attention_for_cpu": partial(_attention, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda dy, *args, **options: _attention(5, *args),
    "_varlen_attn": lambda *args, **options: _sequences(2, args[0], args[6]),
    "_varlen_attn_backward": lambda *args, **options: _sequences(5, args[1], args[9]),
}
