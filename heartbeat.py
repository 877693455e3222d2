"""A rank that stands still says where, and ends the run, instead of hanging until someone looks."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

EXIT_CODE = 4
GRACE_SECONDS = 2.0  # from the report to the exit: the other ranks, which wait for this one, say where they are


class Heartbeat:
    """A watcher thread: without a `beat` for ``stall_seconds`` it prints the phase and every thread's stack, and exits.

    The stack names the collective that waits, if one does. 0 seconds: no watcher.
    """

    def __init__(self, rank: int, stall_seconds: int) -> None:
        self.rank, self.stall_seconds = rank, stall_seconds
        self.place, self.last = "start", time.monotonic()
        self.stopped = threading.Event()
        if stall_seconds:
            threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def beat(self, place: str) -> None:
        """This rank is alive, and now at ``place``."""
        self.place, self.last = place, time.monotonic()

    def go_on(self) -> None:
        """This rank is alive, and still at the same place."""
        self.last = time.monotonic()

    def stop(self) -> None:
        """No more watching."""
        self.stopped.set()

    def _watch(self) -> None:
        while not self.stopped.wait(min(1.0, self.stall_seconds / 4)):
            still = time.monotonic() - self.last
            if still > self.stall_seconds:
                said = (
                    f"rank {self.rank}: stood still for {still:.0f} s after: {self.place} (train.stall_seconds = "
                    f"{self.stall_seconds}); its stacks:\n{stacks()}"
                )
                os.write(sys.stderr.fileno(), said.encode())  # at once: the ranks share a terminal or a log
                time.sleep(GRACE_SECONDS)
                os._exit(EXIT_CODE)


def stacks() -> str:
    """Where every other thread of this process is: innermost call last, the main thread at the end."""
    frames = sys._current_frames()
    others = [thread for thread in reversed(threading.enumerate()) if thread is not threading.current_thread()]
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in others
        if thread.ident in frames
    )
