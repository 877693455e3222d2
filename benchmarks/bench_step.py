"""A whole training step against TRL's GRPOTrainer: same model, questions, adapters and forced token counts, in turn.

    python benchmarks/bench_step.py [--cases NAME ...] [--steps 10] [--json] [--trl-python PATH]

Both run on one thread in fp32 in processes of their own, and take turns step by step, so that whatever else the machine
does falls on both alike. Figures are medians of CPU seconds. TRL lives in .venv-bench, made from requirements/bench.txt
if it is not there.  Before anything is timed, the trainer computes log-probs and the loss of what TRL sampled in its
first step, and the two must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases

HERE = Path(__file__).parent
LOGP_BOUND, LOSS_BOUND = 1e-5, 1e-6  # nats; the loss is a mean over tokens of numbers near 1
BARS = {"attention_r8_64": 0.70, "attention_r8_128": 0.70, "all_r32_64": 0.55, "all_r32_128": 0.55}  # of TRL's CPU
MEMORY_BAR, STARTUP_BAR = 0.7, 1.0
PHASES = ("sync", "generate", "reference", "forward", "backward", "optimizer", "other")


class Peer:
    """A process that takes its steps when it is told to, and answers with one line of JSON."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log, self.began = log, time.perf_counter()
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | environment
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env=os.environ | environment,
            )  # fmt: skip

    def wait_until_ready(self) -> dict:
        ready = self.read()
        return ready | {"startup_wall_s": time.perf_counter() - self.began}

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
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def our_command(name: str, work: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(HERE / "our_side.py"), name, "--work", str(work), *arguments]


def trl_command(name: str, work: Path, python: Path) -> list[str]:
    case = cases.CASES[name]
    settings = {
        "model": str(work / "model"), "questions": json.loads((work / "questions.json").read_text()),
        "group": cases.GROUP, "new_tokens": case.new_tokens, "rank": case.rank,
        "experts": "linear_fc1" in case.targets, "beta": cases.KL_COEF, "lr": cases.LEARNING_RATE,
        "adapter": str(work / f"adapter_{name}"), "record": str(work / f"record_{name}.json"), "work": str(work),
    }  # fmt: skip
    return [str(python), str(HERE / "trl_side.py"), json.dumps(settings)]


def trl_python(given: Path | None) -> Path:
    """An interpreter with TRL: the given one, or .venv-bench's, installed first if it is not there."""
    if given:
        return given
    venv = cases.ROOT / ".venv-bench"
    if not (venv / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        requirements = cases.ROOT / "requirements" / "bench.txt"
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps"]
        torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
        if subprocess.run([*pip, torch], stdout=sys.stderr).returncode:  # PyPI does not carry the build without CUDA
            index = ["--index-url", "https://download.pytorch.org/whl/cpu"]
            subprocess.run([*pip, *index, torch], check=True, stdout=sys.stderr)
        subprocess.run([*pip, "-r", str(requirements)], check=True, stdout=sys.stderr)
        (venv / "installed").touch()
    return venv / "bin" / "python"


def check_equal_work(name: str, agreed: dict) -> None:
    """The same log-probs and the same loss for what TRL sampled, with adapters that make both non-trivial."""
    assert agreed["logp_gap"] < LOGP_BOUND and agreed["reference_gap"] < LOGP_BOUND, (name, agreed)
    assert abs(agreed["loss"] - agreed["their_loss"]) < LOSS_BOUND, (name, agreed)
    assert agreed["largest_log_ratio_to_reference"] > 1e-3, (name, "the adapters do nothing", agreed)


def compare(name: str, work: Path, python: Path, steps: int, warmup: int) -> dict:
    """Both trainers on one case, step by step in turn."""
    log = f"{name}_{time.strftime('%H%M%S')}.log"
    ours = Peer(our_command(name, work), work / f"ours_{log}")
    ready = {"ours": ours.wait_until_ready()}  # it writes the adapter that TRL starts from
    theirs = Peer(trl_command(name, work, python), work / f"trl_{log}")
    ready["trl"] = theirs.wait_until_ready()
    assert sorted(ready["ours"]["prompts"]) == sorted(ready["trl"]["prompts"]), "not the same prompts"
    theirs.ask("step")
    agreed = ours.ask(f"check {work / f'record_{name}.json'}")
    check_equal_work(name, agreed)
    ours.ask("step")
    found: dict[str, list[dict]] = {"ours": [], "trl": []}
    expected = cases.PROMPTS * cases.GROUP * cases.CASES[name].new_tokens
    for step in range(warmup - 1 + steps):
        for side, peer in (("ours", ours), ("trl", theirs)):
            record = peer.ask("step")
            assert record["new_tokens"] == expected, (side, record["new_tokens"], expected)
            if step >= warmup - 1:
                found[side].append(record)
    ours.close()
    theirs.close()
    return summary(name, found, ready, agreed, expected)


def summary(name: str, found: dict[str, list[dict]], ready: dict[str, dict], agreed: dict, tokens: int) -> dict:
    """Medians and spread of each side, and the ratios that the bars are about."""
    sides = {}
    for side, records in found.items():
        cpu = [record["cpu_s"] for record in records]
        phases = {}
        for phase in PHASES[:-1]:
            phases[phase] = statistics.median(record["phases"].get(phase, 0.0) for record in records)
        if side == "ours":  # the clock's `generate` holds scoring, its `update` forward, backward and optimizer
            phases["generate"] = statistics.median(record["phases"]["sampling"] for record in records)
            update = statistics.median(record["phases"]["update"] for record in records)
            phases["backward"] = update - phases["forward"] - phases["optimizer"]
        phases["other"] = statistics.median(cpu) - sum(phases.values())
        sides[side] = {
            "cpu_s": statistics.median(cpu), "cpu_s_min": min(cpu), "cpu_s_max": max(cpu),
            "wall_s": statistics.median(record["wall_s"] for record in records), "phases_cpu_s": phases,
            "tokens_per_cpu_s": {phase: tokens / seconds for phase, seconds in phases.items() if seconds > 1e-4},
            "peak_mib": records[-1]["peak_mib"],
            "startup_cpu_s": ready[side]["startup_cpu_s"], "startup_wall_s": ready[side]["startup_wall_s"],
        }  # fmt: skip
    ours, trl = sides["ours"], sides["trl"]
    pairs = [a["cpu_s"] / b["cpu_s"] for a, b in zip(found["ours"], found["trl"], strict=True)]
    return {
        "name": name, "step_cpu_ratio": ours["cpu_s"] / trl["cpu_s"], "bar": BARS[name],
        "ratio_by_pair": {"min": min(pairs), "median": statistics.median(pairs), "max": max(pairs)},
        "generate_speedup": trl["phases_cpu_s"]["generate"] / ours["phases_cpu_s"]["generate"],
        "peak_memory_ratio": ours["peak_mib"] / trl["peak_mib"],
        "startup_cpu_ratio": ours["startup_cpu_s"] / trl["startup_cpu_s"],
        "steps": len(pairs), "new_tokens": tokens, "agreed": agreed, **sides,
    }  # fmt: skip


def sides(found: list[dict]) -> list[dict]:
    """A row a side of each case: CPU seconds, medians; wall seconds; tokens a CPU second; MiB; start-up's seconds."""
    return [
        {"case": case["name"], "": side, "step": case[side]["cpu_s"], "min": case[side]["cpu_s_min"],
         "max": case[side]["cpu_s_max"], "wall": case[side]["wall_s"], **case[side]["phases_cpu_s"],
         "tok/s": case["new_tokens"] / case[side]["cpu_s"], "MiB": round(case[side]["peak_mib"]),
         "startup": case[side]["startup_cpu_s"]}
        for case in found for side in ("ours", "trl")
    ]  # fmt: skip


def ratios(found: list[dict]) -> list[dict]:
    """A row a case: ours over TRL's, with the bars."""
    return [
        {"case": case["name"], "step ours/TRL": case["step_cpu_ratio"], "bar": case["bar"],
         "pairs": "{min:.2f}-{max:.2f}".format(**case["ratio_by_pair"]), "generate": f"{case['generate_speedup']:.2f}x",
         "memory": case["peak_memory_ratio"], "memory bar": MEMORY_BAR, "start-up": case["startup_cpu_ratio"],
         "log-prob gap": case["agreed"]["logp_gap"],
         "loss gap": abs(case["agreed"]["loss"] - case["agreed"]["their_loss"])}
        for case in found
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=cases.CASES, default=list(cases.CASES))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those, at least 1")
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL, instead of .venv-bench's")
    parser.add_argument(
        "--work", type=Path, help="folder for the model, adapters and logs; a temporary one if not given"
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes; out/bench_step.json if not given")
    parser.add_argument("--json", action="store_true", help="print the JSON, not the tables")
    args = parser.parse_args()
    python = trl_python(args.trl_python)
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(our_command(args.cases[0], work, "--make"), check=True, stdout=sys.stderr)
        result = {"cases": [compare(name, work, python, args.steps, args.warmup) for name in args.cases]}
    rows = ratios(result["cases"])
    path = cases.store("bench_step", __doc__, rows, result, args.out)
    if args.json:
        print(json.dumps(result))
    else:
        print("CPU seconds, medians (wall: wall seconds)")
        print(f"{cases.table(sides(result['cases']))}\n\n{cases.table(rows)}\n\nstored in {path}")


if __name__ == "__main__":
    main()
