"""A training with a fault planted on purpose, to see whether the benchmark of methods finds it.

    torchrun --nproc_per_node=1 benchmarks/planted_fault.py FAULT configs/bench.yaml [section.key=value ...]

A fault takes the place of one function of the method while the training runs (lab/faults.py); no file is changed.
Everything else is train_grpo.py. These runs are controls: if a comparison cannot find its fault, its other results mean
nothing.
"""

import pkgutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from input_files import BAD_INPUT, InputError, refused
from lab.faults import FAULTS


def plant(name: str) -> None:
    """Put the fault in the place of the right function; InputError for an unknown fault, or if the place is gone."""
    if name not in FAULTS:
        raise InputError(f"FAULT: found {name!r}; needed: one of {', '.join(FAULTS)}")
    place, fault = FAULTS[name]
    owner, _, attribute = place.rpartition(".")
    try:
        right = pkgutil.resolve_name(place)
    except AttributeError as error:
        raise InputError(f"{place}: not there ({error}); needed for the fault {name}") from None
    setattr(pkgutil.resolve_name(owner), attribute, fault(right))


def main(arguments: list[str]) -> int:
    try:
        plant(arguments[0] if arguments else "")
    except BAD_INPUT as error:
        return refused(error)
    import parallel_setup
    import train_grpo

    return parallel_setup.run_command(train_grpo.main, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
