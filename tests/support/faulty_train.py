"""train_grpo.py with one fault at an exact place: torchrun ... faulty_train.py FAULT PLACE COUNT RANK FLAG CONFIG ...

FAULT: hang, raise or die, on rank RANK when it comes to PLACE (update, checkpoint or log) for the COUNT-th time; the
file FLAG appears at that moment. Everything else, from the command line to the exit code, is the real script's.
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
import runlog  # noqa: E402


def strike(fault: str, flag: Path) -> None:
    """What happens at the place."""
    flag.write_text(str(os.getpid()))
    if fault == "hang":
        time.sleep(600)  # the test kills this process meanwhile
    elif fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"a deliberate fault in process {os.getpid()}")


def arm(owner: object, name: str, count: int, act: Callable[[], None]) -> None:
    """``act`` before the ``count``-th call of the function ``owner.name``."""
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
            "update": (parallel_setup.Parallel, "sync_gradients_"),  # gradients are there, nothing has moved yet
            "checkpoint": (checkpoint, "to_dict"),  # the tensors are written, state and checksums are not
            "log": (runlog.RunLog, "log_step"),  # the step's completions are logged, its metrics are not
        }[place]
        arm(owner, name, int(count), lambda: strike(fault, Path(flag)))
    sys.argv = [str(ROOT / "train_grpo.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
