"""train_grpo.py with one fault at an exact place: torchrun ... faulty_train.py FAULT PLACE COUNT RANK FLAG CONFIG ...

FAULT is hang, raise or die. It happens on rank RANK when the rank reaches PLACE (update, checkpoint, log or
sample) for the
COUNT-th time, and it writes the file FLAG. Everything else is the real script, from the command line to the exit code.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import parallel_setup  # noqa: E402
import rollout  # noqa: E402
import runlog  # noqa: E402


def strike(fault: str, flag: Path) -> None:
    """Hang, die or raise ValueError, after writing ``flag``."""
    flag.write_text(str(os.getpid()))
    if fault == "hang":
        time.sleep(600)  # the test kills this process before the sleep ends
    elif fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"a deliberate fault in process {os.getpid()}")


def arm(owner: object, name: str, count: int, act: Callable[[], None]) -> None:
    """Call ``act`` before the ``count``-th call of the function ``owner.name``."""
    real = getattr(owner, name)
    calls = [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            act()
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def main() -> None:
    fault, place, count, rank, flag, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        owner, name = {
            "update": (parallel_setup.Parallel, "sync_gradients_"),  # the gradients exist, no weight has changed
            "checkpoint": (checkpoint, "to_dict"),  # the tensors are written; the state and the checksums are not
            "log": (runlog.RunLog, "log_step"),  # the completions of the step are logged; its metrics are not
            "sample": (rollout, "sample_step"),
        }[place]
        arm(owner, name, int(count), lambda: strike(fault, Path(flag)))
    sys.argv = [str(ROOT / "train_grpo.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
