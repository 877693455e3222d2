"""Runs torchrun and returns the exit code of the rank that ended first.

    python launch/first_code.py --standalone --nproc_per_node=2 train_grpo.py configs/tiny_cpu.yaml

It prints no traceback from torchrun, because the ranks print their own errors. If a signal ended the rank or this
process, the exit code is 128 + the signal's number. A signal that is ignored at the start, such as HUP under nohup,
stays ignored. The run_*.sh scripts start this file.
"""

import io
import logging
import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# torchrun passes these on to the ranks. Its default list lacks the last two, and contains HUP even under nohup.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(arguments: list[str]) -> int:
    """Run torchrun with ``arguments``, and return the exit code."""
    # With --tee, a rank's output would end at a character that the encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # When a rank ends, these loggers report nothing that the rank has not printed.
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
