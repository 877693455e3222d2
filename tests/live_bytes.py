"""Bytes of tensors that are alive at one time, counted at the dispatcher: what a run allocates, to the byte."""

from __future__ import annotations

import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the block, every storage that an operation makes counts from then until it is freed.

    ``now`` and ``peak`` in bytes; what existed before the block does not count. Views share their storage's bytes.
    """

    def __init__(self, existing: list) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in existing}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "_cdata")}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if hasattr(leaf, "untyped_storage"):
                self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage, given: set[int]) -> None:
        if storage._cdata in given or storage.nbytes() == 0 or storage.data_ptr() in self.seen:
            return
        pointer, size = storage.data_ptr(), storage.nbytes()
        self.seen.add(pointer)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, pointer, size)

    def _free(self, pointer: int, size: int) -> None:
        self.seen.discard(pointer)
        self.now -= size
