"""The plan beside a dry run, for every layout of the run scripts for NPUs.

    python benchmarks/bench_dry_run.py [--only TEXT] [--json]

Each layout is `preflight.py CONFIG --dry-run` with what its script would start, all layers included. bytes, operations,
sent: the largest relative difference between plan and dry run among the figures of memory, of floating-point operations
and of traffic; apart: how many figures differ by more than 10 %. preflight.py looks into the newest record of this
script, to say whether a dry run has confirmed the figures that it prints. A layout takes about a minute of one core.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import cases

UNITS = {"GiB": "bytes", "TFLOP": "operations", "MiB sent": "sent"}
SMALL = 2**24  # a figure below it, in bytes or operations, does not count for the largest difference


def layouts() -> dict[str, list[str]]:
    """Script and layout -> the arguments of preflight.py, as `--plan-only` prints them."""
    found = {}
    for script in sorted(path.name for path in cases.ROOT.glob("run_*.sh")):
        text = (cases.ROOT / script).read_text()
        offered = re.search(r"^LAYOUT=.*$", text, re.M)
        for layout in sorted(set(re.findall(r"tp\d+_ep\d+", offered[0]))) if offered and "npu_env.sh" in text else ():
            environment = os.environ | {"LAYOUT": layout, "RENDEZVOUS": "first:29400"}
            command = ["bash", str(cases.ROOT / script), "--plan-only"]
            printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            (line,) = re.findall(r"^\S+ preflight\.py (configs/.*)$", printed, re.M)
            words = shlex.split(re.sub(r"--ranks-per-node \d+", "", line))
            found[f"{script} {layout}"] = [word for word in words if not re.match(r"(model|data|train)\.\w+=", word)]
    return found


def dry_run(arguments: list[str]) -> dict:
    """What `preflight.py --dry-run --json` prints, without the lists of allocations."""
    command = [sys.executable, "preflight.py", *arguments, "--dry-run", "--json"]
    done = subprocess.run(command, cwd=cases.ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{shlex.join(command)}: exit code {done.returncode}")
    found = json.loads(done.stdout)
    for phase in found["phases"].values():
        del phase["largest"], phase["flops_by_operator"]
    return found


def row(name: str, found: dict) -> dict:
    """The largest differences of one layout."""
    worst = dict.fromkeys(UNITS.values(), 0.0)
    for one in found["compared"]:
        if one["planned"] > SMALL:
            kind = UNITS[one["unit"]]
            worst[kind] = max(worst[kind], abs(one["found"] / one["planned"] - 1))
    peak = max(phase["peak_bytes"] for phase in found["phases"].values())
    return {
        "layout": name,
        "fullest GiB": round(peak / 2**30, 2),
        **{kind: f"{difference:.1%}" for kind, difference in worst.items()},
        "apart": sum(not one["agrees"] for one in found["compared"]),
        "seconds": found["seconds"],
        "memory GiB": found["rss_gib"],
    }


def main() -> int:
    parser = cases.parser(__doc__)
    parser.add_argument("--only", default="", help="only layouts whose name contains this text")
    args = parser.parse_args()
    chosen = {name: arguments for name, arguments in layouts().items() if args.only in name}
    if not chosen:
        raise SystemExit(f"--only: no layout contains {args.only!r}; there are: {', '.join(layouts())}")
    table, runs = [], []
    for name, arguments in chosen.items():
        found = dry_run(arguments)
        table.append(row(name, found))
        runs.append({"layout": name, "arguments": arguments, "found": found})
        print(table[-1], file=sys.stderr, flush=True)
    cases.report(args, __doc__, table, {"runs": runs})
    return int(any(one["apart"] for one in table))


if __name__ == "__main__":
    sys.exit(main())
