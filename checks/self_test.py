"""Do the model, its gradients, a training step and the operators give the right numbers on this device?

    python preflight.py --self-test [CONFIG] [section.key=value ...] [--ranks N]
    torchrun --nproc_per_node=N preflight.py --self-test [CONFIG] [section.key=value ...]

This command runs the tests of tests/machines/on_device on CONFIG's device. They compare random tiny models, in every
layout of the launched ranks, with transformers and torch.optim.AdamW in float64. They also compare each operator with
its formula. Without torchrun, the tests on a CPU run on one and two ranks, or on N ranks. Only the device of CONFIG
matters here; `train_grpo.py CONFIG --check` checks the functions that CONFIG names.
Exit code 0: everything is right. 1: a line names the test that failed. 2: the input cannot be used. docs/checks.md
lists the faults that the tests find, and explains how to see the details of a failure.
"""

import importlib.util
import os
import sys

from facts.exits import InputError
from facts.root import ROOT
from inputs.config import command, command_line, resolve_config

OPTIONS = "-m device -p no:xdist -p no:cacheprovider -W default --disable-warnings --quiet --no-header".split()
OPTIONS += ["--tb=no", "-rfE", "--capture=sys", "--continue-on-collection-errors"]


@command
def main(arguments: list[str]) -> int:
    """Replace this process with pytest, so that a launcher can end the tests. This function does not return."""
    default = str(ROOT / "configs" / "tiny_cpu.yaml")
    parser = command_line(
        "preflight.py --self-test",
        __doc__,
        nargs="?",
        default=default,
        help="default: configs/tiny_cpu.yaml, device auto",
    )
    parser.add_argument("--ranks", type=int, help="on a CPU, compare this many ranks; default: 1 and 2")
    args = parser.parse_intermixed_args(arguments)
    overrides = args.overrides or (["device=auto"] if args.config == default else [])
    cfg, _ = resolve_config(args.config, overrides, layout=False)
    if importlib.util.find_spec("pytest") is None:
        raise InputError("pytest: not installed; install the packages of requirements/ for this machine")
    ranks = [] if args.ranks is None else ["--ranks", str(args.ranks)]
    if os.environ.get("RANK", "0") != "0":  # every rank has the answers of all ranks; the first one prints them
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    print(f"self-test on device {cfg.device}: tests/machines/on_device, a dot per test (docs/checks.md)")
    os.chdir(ROOT)
    pytest = [sys.executable, "-m", "pytest", "tests/machines/on_device", "--device", cfg.device, *ranks, *OPTIONS]
    sys.stdout.flush()
    os.execve(sys.executable, pytest, os.environ | {"COLUMNS": "240"})
