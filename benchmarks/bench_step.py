"""A whole training step against TRL's GRPOTrainer: same model, questions, adapters and forced token counts, in turn.

    python benchmarks/bench_step.py [--cases NAME ...] [--steps 10] [--json] [--trl-python PATH]
    python benchmarks/bench_step.py --cases smol_attention_r16_32 smol_all_r16_32     needs models/smollm2_moe

Each trainer is a process with one thread in fp32. They take turns step by step, so that other load on the machine
affects both. The figures are medians of CPU seconds. Before the timed steps, the trainer computes log-probs and the
loss of the completions that TRL sampled in its first step; both must agree. TRL runs in .venv-bench, which
launch/setup_cpu.sh makes from requirements/bench.txt. TORCH_INDEX in the environment is its source of torch without
CUDA.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_cases as cases
import pandas as pd

from facts.exits import InputError
from facts.variables import ON_CPU

HERE = Path(__file__).parent
LOGP_BOUND, LOSS_BOUND = 1e-5, 1e-6  # in nats; the loss is a mean of numbers near 1
SMOL_BOUND = 1e-4  # in place of LOGP_BOUND, for 30 layers instead of 4 and 49,152 tokens instead of 512
BARS = {  # ours over TRL
    "attention_r8_64": 0.70, "attention_r8_128": 0.70, "all_r32_64": 0.55, "all_r32_128": 0.55,
    "smol_attention_r16_32": 0.70, "smol_all_r16_32": 0.70,
}  # fmt: skip
MEMORY_BAR = 0.7
# With PYTHON, VENV and TORCH_INDEX.
SET_UP = "set -euo pipefail; source launch/setup_cpu.sh; set_variables; set_up bench"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # as in run_cpu.sh
PHASES = ("sync", "generate", "reference", "forward", "backward", "optimizer")


class Peer:
    """A trainer in its own process, which waits for a line before every step and answers with one line of JSON."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log, self.began = log, time.perf_counter()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env=os.environ | ON_CPU | environment,
            )  # fmt: skip

    def wait_until_ready(self) -> dict:
        return self.read() | {"startup_wall_s": time.perf_counter() - self.began}

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.log} ended early:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> dict:
        self.tell(line)
        return self.read()

    def close(self) -> None:
        self.process.communicate(timeout=60)  # closes its stdin, which ends it


def in_turn(peers: list[Peer], steps: int) -> list[list[dict]]:
    """For each peer the records of ``steps`` steps, after one that warms up. The peers take turns, and end."""
    rounds = [[peer.ask("step") for peer in peers] for _ in range(1 + steps)]
    for peer in peers:
        peer.close()
    return [list(records) for records in zip(*rounds[1:], strict=True)]


def our_command(name: str, work: Path, **changes: object) -> list[str]:
    """The command of our_side.py. ``changes``: see cases.config."""
    return [sys.executable, str(HERE / "our_side.py"), name, "--work", str(work), "--set", json.dumps(changes)]


def ready_peer(name: str, work: Path, **changes: object) -> tuple[Peer, dict]:
    """A trainer that waits for its first step, and what it said. It has made the model in ``work``."""
    work.mkdir(parents=True, exist_ok=True)
    peer = Peer(our_command(name, work, **changes), work / f"ours_{name}.log")
    return peer, peer.wait_until_ready()


def trl_command(name: str, work: Path, python: Path, questions: list[str]) -> list[str]:
    case, settings = cases.CASES[name], work / f"settings_{name}.json"
    settings.write_text(json.dumps({
        "model": str(case.model(work)), "questions": questions,
        "group": cases.GROUP, "new_tokens": case.new_tokens, "rank": case.rank,
        "experts": "linear_fc1" in case.targets, "shared_expert": "linear_fc1" in case.targets and case.smol,
        "beta": cases.KL_COEF, "lr": cases.LEARNING_RATE,
        "adapter": str(work / f"adapter_{name}"), "record": str(work / f"record_{name}.json"), "work": str(work),
    }))  # fmt: skip
    return [str(python), str(HERE / "trl_side.py"), str(settings)]


def trl_python() -> Path:
    """The interpreter of .venv-bench. launch/setup_cpu.sh makes it if it is incomplete; its errors end this program."""
    environment = {"TORCH_INDEX": TORCH_INDEX} | os.environ | {"PYTHON": sys.executable, "VENV": ".venv-bench"}
    if code := subprocess.run(["bash", "-c", SET_UP], cwd=cases.ROOT, env=environment, stdout=sys.stderr).returncode:
        sys.exit(code)
    return cases.ROOT / ".venv-bench" / "bin" / "python"


def check_equal_work(name: str, agreed: dict) -> None:
    """AssertionError unless both agree on the log-probs and the loss of TRL's completions, and the adapters matter."""
    bound = SMOL_BOUND if cases.CASES[name].smol else LOGP_BOUND
    assert agreed["logp_gap"] < bound and agreed["reference_gap"] < bound, (name, agreed)
    assert abs(agreed["loss"] - agreed["their_loss"]) < LOSS_BOUND, (name, agreed)
    assert agreed["largest_log_ratio_to_reference"] > 1e-3, (name, "the adapters do nothing", agreed)


def compare(name: str, work: Path, python: Path, steps: int) -> dict:
    """The figures of both trainers on one case; they take turns step by step."""
    ours, our_start = ready_peer(name, work)  # it writes the adapter with which TRL starts
    theirs = Peer(trl_command(name, work, python, our_start["questions"]), work / f"trl_{name}.log")
    ready = {"ours": our_start, "trl": theirs.wait_until_ready()}
    assert sorted(ready["ours"]["prompts"]) == sorted(ready["trl"]["prompts"]), "not the same prompts"
    theirs.ask("step")
    agreed = ours.ask(f"check {work / f'record_{name}.json'}")
    check_equal_work(name, agreed)
    ours.ask("step")
    timed = dict(zip(("ours", "trl"), in_turn([ours, theirs], steps), strict=True))
    tokens = cases.CASES[name].prompts * cases.GROUP * cases.CASES[name].new_tokens
    assert all(record["new_tokens"] == tokens for records in timed.values() for record in records), (name, tokens)
    return summary(name, timed, ready, agreed, tokens)


def summary(name: str, timed: dict[str, list[dict]], ready: dict[str, dict], agreed: dict, tokens: int) -> dict:
    """Medians and spread of each side, and the ratios that are compared with the bars."""
    sides = {}
    for side, records in timed.items():
        cpu = [record["cpu_s"] for record in records]
        median = pd.DataFrame([record["phases"] for record in records]).fillna(0.0).median().to_dict()
        phases = {phase: median.get(phase, 0.0) for phase in PHASES}
        if side == "ours":  # the clock's "generate" includes scoring; its "update" is forward, backward and optimizer
            phases["generate"] = median["sampling"]
            phases["backward"] = median["update"] - phases["forward"] - phases["optimizer"]
        phases["other"] = statistics.median(cpu) - sum(phases.values())
        sides[side] = {
            "cpu_s": statistics.median(cpu), "cpu_s_min": min(cpu), "cpu_s_max": max(cpu),
            "wall_s": statistics.median(record["wall_s"] for record in records), "phases_cpu_s": phases,
            "tokens_per_cpu_s": {phase: tokens / seconds for phase, seconds in phases.items() if seconds > 1e-4},
            "peak_mib": records[-1]["peak_mib"],
            "startup_cpu_s": ready[side]["startup_cpu_s"], "startup_wall_s": ready[side]["startup_wall_s"],
        }  # fmt: skip
    ours, trl = sides["ours"], sides["trl"]
    pairs = [a["cpu_s"] / b["cpu_s"] for a, b in zip(timed["ours"], timed["trl"], strict=True)]
    return {
        "name": name, "step_cpu_ratio": ours["cpu_s"] / trl["cpu_s"], "bar": BARS[name],
        "ratio_by_pair": {"min": min(pairs), "median": statistics.median(pairs), "max": max(pairs)},
        "generate_speedup": trl["phases_cpu_s"]["generate"] / ours["phases_cpu_s"]["generate"],
        "peak_memory_ratio": ours["peak_mib"] / trl["peak_mib"],
        "startup_cpu_ratio": ours["startup_cpu_s"] / trl["startup_cpu_s"],
        "steps": len(pairs), "new_tokens": tokens, "agreed": agreed, **sides,
    }  # fmt: skip


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=cases.CASES, default=cases.TINY)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL; .venv-bench if not given")
    args = parser.parse_args()
    try:
        for name in args.cases:
            cases.CASES[name].model(Path())
    except InputError as error:
        parser.error(str(error))
    python = args.trl_python or trl_python()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for name in [name for name in args.cases if name in cases.TINY][:1]:
            ready_peer(name, work)[0].close()  # it makes the tiny model, so that no start-up time includes that
        found = [compare(name, work, python, args.steps) for name in args.cases]
    by_side = [
        {"case": case["name"], "": side, "step": case[side]["cpu_s"], "min": case[side]["cpu_s_min"],
         "max": case[side]["cpu_s_max"], "wall": case[side]["wall_s"], **case[side]["phases_cpu_s"],
         "tok/s": case["new_tokens"] / case[side]["cpu_s"], "MiB": round(case[side]["peak_mib"]),
         "startup": case[side]["startup_cpu_s"]}
        for case in found for side in ("ours", "trl")
    ]  # fmt: skip
    ratios = [
        {"case": case["name"], "step ours/TRL": case["step_cpu_ratio"], "bar": case["bar"],
         "pairs": "{min:.2f}-{max:.2f}".format(**case["ratio_by_pair"]), "generate": f"{case['generate_speedup']:.2f}x",
         "memory": case["peak_memory_ratio"], "memory bar": MEMORY_BAR, "start-up": case["startup_cpu_ratio"],
         "log-prob gap": case["agreed"]["logp_gap"],
         "loss gap": abs(case["agreed"]["loss"] - case["agreed"]["their_loss"])}
        for case in found
    ]  # fmt: skip
    cases.report(
        args, __doc__, ratios, {"cases": found},
        above=f"medians of CPU seconds (wall: wall seconds)\n{cases.table(by_side)}\n\n",
    )  # fmt: skip


if __name__ == "__main__":
    main()
