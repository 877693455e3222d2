"""Bytes of tensors that are alive at one time, by torch's profiler: what its allocator gave and took back."""

from __future__ import annotations

import gc

import torch


class LiveBytes:
    """Inside the block, every allocation counts from then until it is freed. Afterwards ``now`` and ``peak``, bytes.

    ``mark()`` names a moment: ``marks`` are the bytes alive at each. Python's collector is off inside: when it runs is
    chance, and what waits for it is really there.
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
        sizes: dict[int, int] = {}  # of what was allocated inside; what is older may be freed inside as well
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
