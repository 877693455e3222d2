"""torchrun with the exit code of the rank that ended first, and without a separate traceback: the ranks say why.

    python launch/first_code.py --standalone --nproc_per_node=2 train_grpo.py configs/tiny_cpu.yaml

If a signal ended the rank or this process, the exit code is 128 + its number. A signal that is ignored at the start, as
HUP under nohup, stays ignored. The run_*.sh scripts start this.
"""

import io
import logging
import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# torchrun passes these on to the ranks. Its default list lacks the last two, and has HUP even under nohup.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(arguments: list[str]) -> int:
    """Start torchrun with these arguments, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):  # --tee ends a rank's output at a letter that the encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # The reports of these loggers about the end of a rank add nothing.
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    handled = [number.name for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(handled))  # torchrun's --signals-to-handle
    try:
        run.main(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended first, with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
