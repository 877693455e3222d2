"""What a step costs when something doubles: sequences, length, experts, layers, processes; and whether memory grows.

    python benchmarks/bench_scaling.py [--only NAME ...] [--steps 5] [--num-steps 200] [--json]

CPU seconds of a step of the tiny model, one thread a process, the two sizes in turn; medians. Doubling should cost at
most 2.1 x; attention adds its square to a doubled length. Two processes: one's seconds over the busier one's of two.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases
from bench_step import Peer, our_command

CASE = "all_r32_64"
BAR, TWO_PROCESSES_BAR = 2.1, 1.7
TWICE_THE_PROMPTS = {"rollout__prompts_per_step": 16, "optim__prompts_per_update": 16, "data__num_train": 16}
DOUBLED = {  # what it costs against {}; both share one model where they can
    "sequences": TWICE_THE_PROMPTS,
    "length": {"rollout__max_new_tokens": 128},
    "experts": {"tiny_model__num_experts": 16},
    "layers": {"tiny_model__num_layers": 8},
}


def settings(changes: dict) -> list[str]:
    return [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def start(work: Path, name: str, changes: dict) -> Peer:
    """The trainer with ``changes``, ready to step, on a model of its own."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    command = our_command(CASE, folder, *settings(changes))
    subprocess.run([*command, "--make"], check=True, stdout=sys.stderr)
    peer = Peer(command, folder / "log")
    peer.wait_until_ready()
    return peer


def in_turn(peers: dict[str, Peer], steps: int) -> dict[str, list[dict]]:
    """``steps`` steps of each, one after the other, after one that warms up."""
    records: dict[str, list[dict]] = {name: [] for name in peers}
    for step in range(steps + 1):
        for name, peer in peers.items():
            record = peer.ask("step")
            if step:
                records[name].append(record)
    for peer in peers.values():
        peer.close()
    return records


def doubled(work: Path, name: str, steps: int) -> dict:
    """Cost and memory of a step against one that has half of ``name``."""
    records = in_turn({"once": start(work, "once", {}), "twice": start(work, name, DOUBLED[name])}, steps)
    tokens = {size: rows[0]["new_tokens"] for size, rows in records.items()}
    factor = 2 if name in ("sequences", "length") else 1
    assert tokens["twice"] == factor * tokens["once"], tokens
    cpu = {size: statistics.median(row["cpu_s"] for row in rows) for size, rows in records.items()}
    pairs = [b["cpu_s"] / a["cpu_s"] for a, b in zip(*records.values(), strict=True)]
    return {"what": f"twice the {name}", "cost": cpu["twice"] / cpu["once"], "bar": f"<= {BAR}",
            "pairs": f"{min(pairs):.2f}-{max(pairs):.2f}", **cpu,
            "peak MiB": " -> ".join(f"{rows[-1]['peak_mib']:.0f}" for rows in records.values())}  # fmt: skip


def two_processes(work: Path, steps: int) -> dict:
    """Steps of 128 sequences a second: two processes, each with a core to itself, over one; experts split in two."""
    one = start(work, "once", TWICE_THE_PROMPTS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = our_command(CASE, work / "once", *settings(TWICE_THE_PROMPTS | {"parallel__expert": 2}))
    ranks = [
        Peer(command, work / f"rank{rank}.log", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
             MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        rank.wait_until_ready()
    alone, busier, walls = [], [], []
    for step in range(steps + 1):
        single = one.ask("step")
        for rank in ranks:
            rank.tell("step")
        pair = [rank.read() for rank in ranks]
        assert sum(record["new_tokens"] for record in pair) == single["new_tokens"]
        assert abs(pair[0]["loss"] - single["loss"]) < 1e-4 * abs(single["loss"]) + 1e-6, (pair[0], single)
        if step:
            alone.append(single["cpu_s"])
            busier.append(max(record["cpu_s"] for record in pair))
            walls.append(single["wall_s"] / pair[0]["wall_s"])
    for peer in (one, *ranks):
        peer.process.stdin.close()
        peer.process.stdout.close()
    ratios = [a / b for a, b in zip(alone, busier, strict=True)]
    return {"what": "two processes", "cost": statistics.median(alone) / statistics.median(busier),
            "bar": f">= {TWO_PROCESSES_BAR}", "pairs": f"{min(ratios):.2f}-{max(ratios):.2f}",
            "once": statistics.median(alone), "twice": statistics.median(busier),
            "peak MiB": f"wall {statistics.median(walls):.2f}x"}  # fmt: skip


def memory(work: Path, num_steps: int) -> dict:
    """Resident memory after a quarter of the steps and after all: the later peak must not be the higher one."""
    small = {"rollout__prompts_per_step": 2, "optim__prompts_per_update": 2, "rollout__max_new_tokens": 16}
    peer = start(work, "once", small)
    seen = [peer.ask("step")["now_mib"] for _ in range(num_steps)]
    peer.close()
    quarter = len(seen) // 4
    early, late = (statistics.median(part) for part in (seen[quarter : 2 * quarter], seen[-quarter:]))
    return {"what": f"{num_steps} steps", "cost": late / early, "bar": "<= 1.02", "pairs": "", "once": early,
            "twice": late, "peak MiB": f"{max(seen):.0f}"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    choices = [*DOUBLED, "processes", "memory"]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=200, help="of the memory test")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="print the JSON, not the table")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            work = Path(folder) / f"for_{name}"
            if name == "processes":
                rows.append(two_processes(work, args.steps))
            elif name == "memory":
                rows.append(memory(work, args.num_steps))
            else:
                rows.append(doubled(work, name, args.steps))
    path = cases.store("bench_scaling", __doc__, rows, {"scaling": rows}, args.out)
    print(json.dumps({"scaling": rows}) if args.json else f"{cases.table(rows)}\n\nstored in {path}")


if __name__ == "__main__":
    main()
