"""A training with a fault planted on purpose, to see whether the benchmark of methods finds it.

    torchrun --nproc_per_node=1 benchmarks/planted_fault.py FAULT configs/bench.yaml [section.key=value ...]

A fault replaces one piece of source text by another while the module is imported; no file is changed. Everything else
is train_grpo.py. These runs are controls: if a comparison cannot find its fault, its other results mean nothing.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from input_files import BAD_INPUT, InputError, refused  # noqa: E402
from lab.faults import FAULTS  # noqa: E402


def plant(fault: str) -> None:
    """Import the module with the fault in it; InputError for an unknown fault, or if its place has changed."""
    if fault not in FAULTS:
        raise InputError(f"FAULT: found {fault!r}; needed: one of {', '.join(FAULTS)}")
    name, right, wrong = FAULTS[fault]
    path = ROOT / f"{name}.py"
    text = path.read_text()
    if text.count(right) != 1:
        raise InputError(f"{path}: {right.strip()!r} is there {text.count(right)} times; needed: once, for {fault}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(text.replace(right, wrong), path, "exec"), module.__dict__)


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
