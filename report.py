"""Records of runs, and what follows from them: RESULTS.md, comparisons with their uncertainty, repeats.

    python report.py add out/RUN [--id ID]      keep a finished run as results/ID (its name by default)
    python report.py add out/bench_step.json    keep what a benchmark stored as results/benchmarks/bench_step.json
    python report.py build                      write the generated part of RESULTS.md and the figures
    python report.py --check                    exit 1 if a record was edited or lost, or RESULTS.md is stale
    python report.py rerun ID [--run]           print what repeats a run (or execute and compare)
    python report.py compare A B [C ...]        same or different, and why: records, groups of seeds, run folders
    python report.py plan                       the smallest effect that a design can see, before it is run
    python report.py html out/RUN               one page about a run, or about a sweep; needs no network

Needs requirements/report.txt only. Exit code 2: input that cannot be used, one line.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

from input_files import BAD_INPUT, InputError, refused, shown
from lab import benchmark_records, comparisons, pages, records, run_page
from lab import statistics as paired

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent
PLANNED = {"questions": (1, 10**9), "seeds": (1, 10**6), "comparisons": (1, 10**6)}  # smallest and largest
PLANNED |= {"discordant": (1e-6, 1), "seed_spread": (0, 1)}


def quoted(text: str) -> str:
    """``text`` as one word of a shell, which replaces nothing in it but the $HOME that run_record.py has put there."""
    return '"$HOME"'.join(shlex.quote(part) if part else "" for part in text.split("$HOME")) or "''"


def rerun_commands(record: records.Record) -> str:
    """Shell commands that repeat the run in a folder of its own, beside this checkout.

    A record may be another person's: what it says is quoted. Raises InputError if its command is not one command.
    """
    try:
        command = " ".join(map(quoted, shlex.split(record.command)))
    except ValueError as error:
        raise InputError(f"results/{record.id}/command.txt: {record.command!r} is no command line: {error}") from None
    lines = ["set -euo pipefail", f"git worktree add --detach ../rerun-{record.id} {record.commit}"]
    lines.append(f"cd ../rerun-{record.id}")
    if "tiny_model" not in record.config:
        lines.append(f"# put the model into {record.config['model']['path']!r}, and the data where config.yaml says")
    if record.machine.device == "cpu":
        lines.append(f"PYTHON={quoted('python' + '.'.join(record.machine.python.split('.')[:2]))} VENV=.venv")
        lines.append(f"TORCH_INDEX=${{TORCH_INDEX:-{TORCH_INDEX}}}")
        lines.append("source ./setup_cpu.sh")
        lines.append("set_up cpu" + " vllm" * (record.config["rollout"]["engine"] == "vllm"))
    else:
        lines.append(f"# install what results/{record.id}/environment.json lists, as {record.machine.device} needs it")
    variables = {key: value for key, value in record.machine.variables.items() if re.fullmatch(r"OMP_\w+", key)}
    exports = "".join(f" {key}={quoted(value)}" for key, value in variables.items())
    lines.append(f'PATH="$PWD/.venv/bin:$PATH"{exports} {command}')
    return "\n".join([*lines, f"# is it the same?  python report.py compare {record.id} ../rerun-{record.id}/out/RUN"])


def rerun(results: Path, record: records.Record, execute: bool) -> int:
    """Print the commands; with ``execute``, repeat the run and compare it with its record.  -> exit code"""
    commands = rerun_commands(record)
    print(commands, flush=True)
    if not execute:
        return 0
    if code := subprocess.run(["bash", "-c", commands], cwd=ROOT).returncode:
        return code
    out = ROOT.parent / f"rerun-{record.id}" / record.config["train"]["out_dir"]
    repeated = max(out.glob(f"{record.config['name']}-*"), key=lambda run: run.stat().st_mtime)
    return compare(results, [record.id, str(repeated)], None)


def compare(results: Path, names: list[str], kind: str | None) -> int:
    """Byte for byte where two runs must be the same, else with intervals. 1: should be the same and are not."""
    groups = {name: comparisons.find(results, name) for name in names}
    if len(groups) < 2:
        raise InputError(f"compare: found {', '.join(names)}; needed: two or more different names")
    first, second = list(groups.values())[:2]
    if len(groups) == 2 and len(first) == len(second) == 1 and (found := comparisons.repeat(first[0], second[0])):
        text, code = found
        print(text)
        if code or text.startswith("same"):
            return code
    if kind is None:
        kind = "sampled" if all(one.record.last.sampled for group in groups.values() for one in group) else "greedy"
    for one in comparisons.compare(groups, kind):
        print(comparisons.sentences(one, kind))
    return 0


def plan(args: argparse.Namespace) -> int:
    """The smallest effect that the design finds with 80 % power."""
    for option, (low, high) in PLANNED.items():
        if not low <= (value := getattr(args, option)) <= high:
            found = f"--{option.replace('_', '-')}: found {shown(value)}"
            raise InputError(f"{found}; needed: {low:g} to {high:g}")
    error, freedom = paired.planned(args.seeds, args.questions, args.discordant, args.seed_spread)
    size = paired.detectable(error, freedom, comparisons.ALPHA / args.comparisons)
    print(
        f"{args.seeds} paired seeds x {args.questions:,} questions, {args.discordant:.0%} answered differently, "
        f"difference spread by {100 * args.seed_spread:.1f} points over seeds, {args.comparisons} comparisons: "
        f"standard error {100 * error:.2f} points ({freedom:.1f} degrees of freedom); "
        f"finds {100 * size:.1f} points or more with 80 % power"
    )
    if args.seeds < paired.MIN_SEEDS:
        print(f"these weights only: a method is called better with {paired.MIN_SEEDS} seeds or more")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a record or RESULTS.md is not as it should be")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the records")
    parser.add_argument("--page", type=Path, default=ROOT / "RESULTS.md")
    verbs = parser.add_subparsers(dest="verb")
    verb = verbs.add_parser("add", help="keep finished runs, or what benchmarks stored")
    verb.add_argument("runs", nargs="+", type=Path, metavar="out/RUN")
    verb.add_argument("--id", default="", help="the record's name; the run's by default")
    verbs.add_parser("build", help="write RESULTS.md and the figures")
    verb = verbs.add_parser("rerun", help="what repeats a run")
    verb.add_argument("id")
    verb.add_argument("--run", action="store_true", help="execute it, and compare with the record")
    verb = verbs.add_parser("compare", help="same or different, and why")
    verb.add_argument("names", nargs="+", metavar="NAME", help="record, group of seeds, or run folder")
    verb.add_argument("--kind", choices=("sampled", "greedy"), help="which answers; sampled where there are any")
    verb = verbs.add_parser("plan", help="what a design can see")
    verb.add_argument("--questions", type=int, required=True)
    verb.add_argument("--seeds", type=int, required=True)
    verb.add_argument("--discordant", type=float, required=True, help="share of questions answered differently")
    verb.add_argument("--seed-spread", type=float, default=0.0, help="standard deviation of the true difference")
    verb.add_argument("--comparisons", type=int, default=1, help="how many will be made (the level is divided by it)")
    verb = verbs.add_parser("html", help="a page about a run or a sweep")
    verb.add_argument("folder", type=Path, metavar="out/RUN")
    verb.add_argument("--output", type=Path, help="RUN/report.html by default")
    args = parser.parse_args(arguments)
    if args.check == (args.verb is not None):
        parser.error("one of: add, build, rerun, compare, plan, html; or --check alone")
    return args


def act(args: argparse.Namespace) -> int:
    if args.check:
        faults = pages.check(args.results, args.page)
        print("\n".join(faults) or "records, RESULTS.md and figures agree", file=sys.stderr if faults else sys.stdout)
        return 1 if faults else 0
    if args.verb == "add":
        if args.id and len(args.runs) > 1:
            raise InputError(f"--id: {args.id} for {len(args.runs)} runs; needed: one run, or no --id")
        for run in args.runs:
            if run.suffix == ".json":
                kept = benchmark_records.add(run, args.results, args.id)
            else:
                kept = args.results / records.add(run, args.results, args.id).id
            print(f"{kept}: added; next: python report.py build")
    elif args.verb == "build":
        pages.build(args.results, args.page)
    elif args.verb == "rerun":
        return rerun(args.results, records.load(args.results, args.id), args.run)
    elif args.verb == "compare":
        return compare(args.results, args.names, args.kind)
    elif args.verb == "plan":
        return plan(args)
    else:
        print(run_page.write(args.folder, args.output or args.folder / "report.html"))
    return 0


def main(arguments: list[str]) -> int:
    try:
        return act(parse(arguments))
    except BAD_INPUT as error:
        return refused(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
