"""Bytes of all live tensors, measured by torch's profiler from the allocations and releases of the allocator."""

from __future__ import annotations

import gc

import torch


class LiveBytes:
    """Counts the bytes that are allocated inside a with block and not yet freed. After the block, ``now`` holds the
    bytes at its end, ``peak`` the maximum, and ``marks`` the bytes at each call of ``mark()``.

    Python's garbage collector is off inside the block: it runs at random moments, and uncollected tensors use memory.
    """

    now = peak = 0

    def __enter__(self) -> LiveBytes:
        gc.collect()
        gc.disable()
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def mark(self) -> None:
        with torch.profiler.record_function("mark"):
            pass

    def __exit__(self, *error) -> None:
        self.profile.__exit__(*error)
        gc.enable()
        self.now = self.peak = 0
        self.marks: list[int] = []
        sizes: dict[int, int] = {}  # of allocations inside the block; older tensors may be freed there too
        for event in sorted(_all(self.profile.profiler.kineto_results.experimental_event_tree()), key=_start):
            if event.name == "mark":
                self.marks.append(sum(sizes.values()))
            elif event.name == "[memory]":
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
