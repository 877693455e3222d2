"""Runs a check that all ranks make together: its command line, process groups, report and exit code.

checks/groups.py, checks/kernels_check.py and checks/layers_check.py each contain one such check.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import parallel_setup
from facts.exits import InputError
from inputs import config
from knobs import Config


class Answer(NamedTuple):
    """The answer of a check, which is the same on every rank."""

    right: bool
    text: str  # to print
    figures: dict | list  # for --json


def command_line(option: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all these checks take."""
    parser = config.command_line(f"preflight.py {option}", description, nargs="?")
    parser.add_argument("--json", metavar="FILE", type=config.text_option, help="also write the figures to this file")
    return parser


@config.command
def ask(
    args: argparse.Namespace,
    refuse: Callable[[Config, int], None],
    answer: Callable[[Config, parallel_setup.Parallel], Answer],
) -> int:
    """Run a check. Exit code 0: the answer is right. 1: it is wrong. 2: unusable input. 3: the check raised Tripped.

    ``refuse`` raises InputError if the configuration does not suit the number of ranks. ``answer`` performs the check
    and returns its answer.
    """
    rank = parallel_setup.check_launch()
    if args.config is None:
        raise InputError("CONFIG: missing; give a YAML file, e.g. configs/qwen3.yaml")
    cfg = config.load_config(args.config, args.overrides)
    parallel_setup.refuse_one_rank(cfg.parallel)
    refuse(cfg, parallel_setup.launched_world_size())
    with parallel_setup.open_world(cfg.device, cfg.train, cfg.parallel) as device:
        right, text, figures = answer(cfg, parallel_setup.open_layout(cfg.parallel, device))
        if rank == 0:
            print(text, flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if right else 1
