"""What a step costs when something doubles: sequences, length, experts, layers, processes; and whether memory grows.

    python benchmarks/bench_scaling.py [--only NAME ...] [--steps 5] [--num-steps 200] [--json]

Medians of the CPU seconds of a step of the tiny model. A process has one thread, and the two sizes take turns. Doubling
should cost at most 2.1 x, although the cost of attention grows with the square of the length. For two processes the
figure is a speed-up: the seconds of one process, while another process uses the second core, over the seconds of the
busier one of two.
"""

import itertools
import socket
import statistics
import tempfile
from pathlib import Path

import bench_cases as cases
from bench_step import Peer, in_turn, our_command, ready_peer

CASE = "all_r32_64"
BAR, TWO_PROCESSES_BAR = 2.1, 1.7
TWICE_THE_PROMPTS = {"rollout__prompts_per_step": 16, "optim__prompts_per_update": 16, "data__num_train": 16}
DOUBLED = {  # each is compared with a run without changes
    "sequences": TWICE_THE_PROMPTS,
    "length": {"rollout__max_new_tokens": 128},
    "experts": {"tiny_model__num_experts": 16},
    "layers": {"tiny_model__num_layers": 8},
}


def start(work: Path, name: str, changes: dict) -> Peer:
    """The trainer with ``changes`` and its own model, ready for its first step."""
    return ready_peer(CASE, work / name, **changes)[0]


def doubled(work: Path, name: str, steps: int) -> dict:
    """Cost and memory of a step, compared with a step that has half of ``name``."""
    once, twice = in_turn([start(work, "once", {}), start(work, name, DOUBLED[name])], steps)
    factor = 2 if name in ("sequences", "length") else 1
    assert twice[0]["new_tokens"] == factor * once[0]["new_tokens"], (name, twice[0], once[0])
    seconds = [statistics.median(record["cpu_s"] for record in records) for records in (once, twice)]
    pairs = [b["cpu_s"] / a["cpu_s"] for a, b in zip(once, twice, strict=True)]
    return {"what": f"twice the {name}", "cost": seconds[1] / seconds[0], "bar": f"<= {BAR}",
            "pairs": f"{min(pairs):.2f}-{max(pairs):.2f}", "once": seconds[0], "twice": seconds[1],
            "also": f"{once[-1]['peak_mib']:.0f} MiB -> {twice[-1]['peak_mib']:.0f} MiB"}  # fmt: skip


def two_ranks(work: Path, expert: int) -> list[Peer]:
    """One trainer in two processes, ready for its first step; with ``expert`` 2 each holds half of the experts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = our_command(CASE, work / "once", **TWICE_THE_PROMPTS, parallel__expert=expert)
    ranks = [
        Peer(command, work / f"expert{expert}_rank{rank}.log", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
             MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        rank.wait_until_ready()
    return ranks


def together(peers: list[Peer]) -> list[dict]:
    """The records of one step of each peer; all peers run at the same time."""
    for peer in peers:
        peer.tell("step")
    return [peer.read() for peer in peers]


def two_processes(work: Path, steps: int) -> list[dict]:
    """Speed-up of a step of 128 sequences by a second process: data parallel, expert parallel, and as the upper bound
    two independent trainers with 64 sequences each.

    Cores share caches and memory, so a process is slower while another core is busy. Therefore the single process runs
    beside another single process in every second round. "alone" compares with the rounds in which it runs alone.
    """
    one, beside = start(work, "once", TWICE_THE_PROMPTS), start(work, "beside", TWICE_THE_PROMPTS)
    apart = "two independent trainers"
    layouts = {
        apart: [start(work, half, {}) for half in ("first", "second")],
        "two processes, data parallel": two_ranks(work, 1),
        "two processes, expert parallel": two_ranks(work, 2),
    }
    rounds = []
    for number in range(2 * steps + 1):
        single = together([one, beside] if number % 2 else [one])[0]
        rounds.append((single, {name: together(ranks) for name, ranks in layouts.items()}))
        for name, pair in rounds[-1][1].items():
            assert sum(record["new_tokens"] for record in pair) == single["new_tokens"]
            if number == 0 and name != apart:  # in later steps, differences of 1e-7 can change a sampled token
                assert abs(pair[0]["loss"] - single["loss"]) < 1e-4 * abs(single["loss"]) + 1e-6, (pair[0], single)
    for peer in (one, beside, *itertools.chain(*layouts.values())):
        peer.close()
    both_busy, alone = (statistics.median(single["cpu_s"] for single, _ in rounds[first::2]) for first in (1, 2))
    wall = statistics.median(single["wall_s"] for single, _ in rounds[2::2])
    rows = []
    for name in layouts:
        busier = [max(record["cpu_s"] for record in pairs[name]) for _, pairs in rounds[1:]]
        two, walls = statistics.median(busier), statistics.median(pairs[name][0]["wall_s"] for _, pairs in rounds[1:])
        bar = "" if name == apart else f">= {TWO_PROCESSES_BAR}"
        rows.append({"what": name, "cost": both_busy / two, "bar": bar,
                     "pairs": f"{both_busy / max(busier):.2f}-{both_busy / min(busier):.2f}", "once": both_busy,
                     "twice": two, "also": f"alone {alone / two:.2f}x, wall {wall / walls:.2f}x"})  # fmt: skip
    return rows


def memory(work: Path, num_steps: int) -> dict:
    """Median resident memory in the last quarter of the steps over the median in the second quarter."""
    small = {"rollout__prompts_per_step": 2, "optim__prompts_per_update": 2, "rollout__max_new_tokens": 16}
    peer = start(work, "once", small)
    seen = [peer.ask("step")["now_mib"] for _ in range(num_steps)]
    peer.close()
    quarter = len(seen) // 4
    early, late = (statistics.median(part) for part in (seen[quarter : 2 * quarter], seen[-quarter:]))
    return {"what": f"{num_steps} steps", "cost": late / early, "bar": "<= 1.02", "pairs": "", "once": early,
            "twice": late, "also": f"{max(seen):.0f} MiB"}  # fmt: skip


def main() -> None:
    parser = cases.parser(__doc__)
    choices = [*DOUBLED, "processes", "memory"]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=200, help="steps of the measurement of memory")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            work = Path(folder) / f"for_{name}"
            if name == "processes":
                rows += two_processes(work, args.steps)
            elif name == "memory":
                rows.append(memory(work, args.num_steps))
            else:
                rows.append(doubled(work, name, args.steps))
    cases.report(args, __doc__, rows, {"scaling": rows})


if __name__ == "__main__":
    main()
