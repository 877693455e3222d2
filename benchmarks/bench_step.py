"""Compares whole training steps with TRL's GRPOTrainer: same model, questions, adapters and completion lengths.

    python benchmarks/bench_step.py [--cases NAME ...] [--steps 10]
    python benchmarks/bench_step.py --cases smol_attention_r16_32 smol_all_r16_32     needs models/smollm2_moe

Each trainer runs in fp32 in its own process, with one thread. The two take turns step by step, so that other load on
the machine affects both. The figures are medians of CPU seconds. Before the timed steps, our trainer computes the
log-probs and the loss of the completions that TRL sampled in its first step. Both must agree with TRL's. TRL runs in
.venv-bench, which launch/setup_cpu.sh creates from requirements/bench.txt. The environment variable TORCH_INDEX may
name the package index for torch without CUDA. After each case, the program writes the figures, the commit and the
machine to out/bench_step.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_cases as cases
import pandas as pd

from facts.variables import ON_CPU
from runlog.run_record import cpu_name, git_state

HERE = Path(__file__).parent
LOGP_BOUND, LOSS_BOUND = 1e-5, 1e-6  # in nats; the loss is a mean of numbers near 1
SMOL_BOUND = 1e-4  # instead of LOGP_BOUND, for 30 layers instead of 4 and 49,152 tokens instead of 512
# A bash script that reads PYTHON, VENV and TORCH_INDEX from its environment.
SET_UP = "set -euo pipefail; source launch/setup_cpu.sh; set_variables; set_up bench"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # as in launch/cpu.sh


class Peer:
    """A trainer in its own process, which waits for a line before every step and answers with one line of JSON."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                bufsize=1,  # each line is sent at once
                env=os.environ | ON_CPU,
            )

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.log} ended early:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, line: str) -> dict:
        self.process.stdin.write(line + "\n")
        return self.read()

    def close(self) -> None:
        self.process.communicate(timeout=60)  # closes its stdin, which ends it


def in_turn(peers: list[Peer], steps: int) -> list[list[dict]]:
    """Let the peers take turns step by step, and return the records of ``steps`` steps for each peer.

    An additional step comes first, as a warm-up. At the end the peers are closed.
    """
    rounds = [[peer.ask("step") for peer in peers] for _ in range(1 + steps)]
    for peer in peers:
        peer.close()
    return [list(records) for records in zip(*rounds[1:], strict=True)]


def our_peer(name: str, work: Path) -> Peer:
    """Start our trainer, which creates the model and the adapter in ``work``."""
    return Peer([sys.executable, str(HERE / "our_side.py"), name, str(work)], work / f"ours_{name}.log")


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
    """Return the Python of .venv-bench, which launch/setup_cpu.sh creates or completes first.

    If the script fails, this program ends with the script's exit code.
    """
    environment = {"TORCH_INDEX": TORCH_INDEX} | os.environ | {"PYTHON": sys.executable, "VENV": ".venv-bench"}
    if code := subprocess.run(["bash", "-c", SET_UP], cwd=cases.ROOT, env=environment, stdout=sys.stderr).returncode:
        sys.exit(code)
    return cases.ROOT / ".venv-bench" / "bin" / "python"


def check_equal_work(name: str, agreed: dict) -> None:
    """Raise AssertionError unless the trainers agree on the log-probs and the loss of TRL's completions.

    Also raises AssertionError if the adapters do not change the log-probs.
    """
    bound = SMOL_BOUND if cases.CASES[name].smol else LOGP_BOUND
    assert agreed["logp_gap"] < bound and agreed["reference_gap"] < bound, (name, agreed)
    assert abs(agreed["loss"] - agreed["their_loss"]) < LOSS_BOUND, (name, agreed)
    assert agreed["largest_log_ratio_to_reference"] > 1e-3, (name, "the adapters do nothing", agreed)


def compare(name: str, work: Path, python: Path, steps: int) -> dict:
    """Run the case ``name`` with both trainers, which take turns step by step, and return its figures."""
    ours = our_peer(name, work)
    ready = ours.read()  # our side has written the adapter with which TRL starts
    theirs = Peer(trl_command(name, work, python, ready["questions"]), work / f"trl_{name}.log")
    assert sorted(ready["prompts"]) == sorted(theirs.read()["prompts"]), "not the same prompts"
    theirs.ask("step")
    agreed = ours.ask(f"check {work / f'record_{name}.json'}")
    check_equal_work(name, agreed)
    ours.ask("step")
    timed = dict(zip(("ours", "trl"), in_turn([ours, theirs], steps), strict=True))
    tokens = cases.CASES[name].prompts * cases.GROUP * cases.CASES[name].new_tokens
    assert all(record["new_tokens"] == tokens for records in timed.values() for record in records), (name, tokens)
    return summary(name, timed, agreed, tokens)


def summary(name: str, timed: dict[str, list[dict]], agreed: dict, tokens: int) -> dict:
    """Return the medians and the spread of each side's figures, and the ratios of ours to TRL's."""
    tables = {side: pd.DataFrame(records) for side, records in timed.items()}
    sides = {
        side: {
            "cpu_s": table["cpu_s"].median(),
            "cpu_s_min": table["cpu_s"].min(),
            "cpu_s_max": table["cpu_s"].max(),
            "wall_s": table["wall_s"].median(),
            "peak_mib": table["peak_mib"].iloc[-1],
        }
        for side, table in tables.items()
    }
    ours, trl = sides["ours"], sides["trl"]
    pairs = tables["ours"]["cpu_s"] / tables["trl"]["cpu_s"]
    return {
        "name": name,
        "step_cpu_ratio": ours["cpu_s"] / trl["cpu_s"],
        "ratio_by_pair": {"min": pairs.min(), "median": pairs.median(), "max": pairs.max()},
        "peak_memory_ratio": ours["peak_mib"] / trl["peak_mib"],
        "steps": len(pairs),
        "new_tokens": tokens,
        "agreed": agreed | {"loss_gap": abs(agreed["loss"] - agreed["their_loss"])},
        **sides,
    }


TABLE = {  # a figure of a case -> its column
    "name": "case",
    "ours.cpu_s": "ours",
    "trl.cpu_s": "TRL",
    "step_cpu_ratio": "ours/TRL",
    "ratio_by_pair.min": "least",
    "ratio_by_pair.max": "largest",
    "peak_memory_ratio": "memory",
    "agreed.logp_gap": "log-prob gap",
    "agreed.loss_gap": "loss gap",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=cases.CASES, default=cases.TINY)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    args = parser.parse_args()
    if {*args.cases} - {*cases.TINY} and not (cases.ROOT / cases.SMOL).is_dir():
        parser.error(f"{cases.SMOL}: there is no such folder; needed: python weights/smol_model.py {cases.SMOL}")
    python = trl_python()
    path = cases.ROOT / "out" / "bench_step.json"
    path.parent.mkdir(exist_ok=True)
    found = []
    with tempfile.TemporaryDirectory() as work:
        for name in args.cases:
            found.append(compare(name, Path(work), python, args.steps))
            machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()}
            path.write_text(json.dumps(git_state()[0] | {"machine": machine, "cases": found}, indent=1) + "\n")
    print("medians of CPU seconds of a step")
    table = pd.json_normalize(found)[[*TABLE]].rename(columns=TABLE)
    print(table.to_string(index=False, float_format="{:.4g}".format))


if __name__ == "__main__":
    main()
