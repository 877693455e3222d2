"""Runs our side of the benchmarks: a training run that waits for a line on stdin before every step.

    python benchmarks/our_side.py CASE FOLDER      writes the model, the adapter and the run to FOLDER

Every answer is one line of JSON on stdout: first the questions, then a record for each step. The line `step` starts the
next step. The line `check FILE` asks how log-probs and loss differ from TRL's on the completions in FILE, which
trl_side.py has sampled. The process ends when stdin is closed.
"""

import functools
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import bench_cases as cases
import torch

import data_gsm8k
import export
import reward_gsm8k
import train_grpo
from learner import Learner
from model import batches
from run.run import Run
from runlog.progress import StepTimer

FACTOR_STD = 0.02  # standard deviation of B at the start; in a real run B starts at 0


class Side:
    """The measurements of the run in this process."""

    def __init__(self, run: Run, learner: Learner, answers: TextIO) -> None:
        self.run, self.learner, self.answers = run, learner, answers
        self.start_step, self.record = run.start_step, run.record
        self.metrics: dict[str, float] = {}  # of the last step
        self.start = 0.0, 0.0  # CPU and wall seconds

    def answer(self, record: dict) -> None:
        print(json.dumps(record), file=self.answers, flush=True)

    def questions(self) -> dict:
        asked = self.run.inputs.questions
        return {"questions": [one.question for one in asked], "prompts": [one.prompt for one in asked]}

    def step(self) -> dict:
        """Return the seconds, tokens, loss, KL, gap to the sampler and peak memory of the last step."""
        cpu, wall = self.start
        rollout = self.learner.cfg.rollout
        return {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "new_tokens": round(self.metrics["response_length/mean"] * rollout.prompts_per_step * rollout.group_size),
            "loss": self.metrics["actor/loss"],
            "kl": self.metrics.get("actor/kl_loss", 0.0),
            "logp_gap": self.metrics["rollout/logp_gap_max"],
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            / (1024 if sys.platform == "linux" else 2**20),
        }

    def turn(self, step: int) -> StepTimer:
        """Report the previous step, wait for the next line on stdin, and start ``step``. Replaces Run.start_step."""
        self.answer(self.step() if self.metrics else self.questions())
        while (line := sys.stdin.readline()).startswith("check "):
            self.answer(self.check(json.loads(Path(line[6:].strip()).read_text())))
        if not line:
            os._exit(0)  # without the trainer's clean-up, as after an exception
        self.start = time.process_time(), time.perf_counter()
        return self.start_step(step)

    def keep(self, *step: object) -> dict[str, float]:
        """Record a step and keep its metrics. Replaces Run.record."""
        self.metrics = self.record(*step)
        return self.metrics

    def check(self, theirs: dict) -> dict:
        """Return the largest differences in log-probs (nats), and both losses, for the completions in ``theirs``.

        ``theirs`` is the record that trl_side.py has written.
        """
        learner, rows = self.learner, len(theirs["tokens"])
        width = len(theirs["tokens"][0])
        batch = batches.Rollout(
            prompts=theirs["prompts"],
            tokens=torch.tensor(theirs["tokens"]),
            logp=torch.zeros(rows, width),
            lengths=[width] * rows,
            truncated=torch.ones(rows, dtype=torch.bool),
            rewards=torch.zeros(rows, 1),
            parsable=torch.ones(1),
            correct=torch.ones(1),
        )
        micro = batches.pack(batch, list(range(rows)), torch.tensor(theirs["advantages"]), torch.device("cpu"), 0, 1)
        with torch.no_grad():
            with learner.policy.reference():
                reference = micro.ref_logp = learner._logp(micro)
            logp = learner._logp(micro)
            counts = {"num_tokens": rows * width, "num_sequences": rows, "max_new_tokens": width}
            loss = learner._loss(micro, counts).loss

        def gap(ours: torch.Tensor, name: str) -> float:
            return (ours[micro.mask == 1].view(rows, width) - torch.tensor(theirs[name])).abs().max().item()

        return {
            "logp_gap": gap(logp, "logp"),
            "reference_gap": gap(reference, "reference"),
            "loss": loss.item(),
            "their_loss": theirs["loss"],
            "largest_log_ratio_to_reference": (reference - logp)[micro.mask == 1].abs().max().item(),
        }


def adapt(learner: Learner, folder: Path) -> None:
    """Draw random values for every LoRA factor B, and write the adapter to ``folder``."""
    policy, lora = learner.policy, learner.cfg.lora
    generator = torch.Generator().manual_seed(0)
    whole = {name: factor.clone() for name, factor in policy.whole()}
    for name, factor in whole.items():
        if name.endswith(".B"):
            factor.normal_(0, FACTOR_STD, generator=generator)
    policy.load_(whole)
    folder.mkdir()
    pairs = export.pairs_of(list(export.adapted_modules(policy.arch, lora)), whole, lora.alpha)
    export.write_adapter(folder, learner.cfg.model.path, policy.arch, pairs, lora.alpha, "stack")


def train(real: Callable, answers: TextIO, adapter_dir: Path, run: Run, learner: Learner, *parts: Any) -> None:
    """Train with ``real``, the original train_grpo.train, but first draw every B (`adapt`).

    Before each step, wait for a line on stdin. The wait does not change the results.
    """
    adapt(learner, adapter_dir)
    side = Side(run, learner, answers)
    run.start_step, run.record = side.turn, side.keep  # type: ignore[method-assign]
    real(run, learner, *parts)


def main(name: str, work: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for the answers; the trainer's own output goes to stderr
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    reward_gsm8k.score = lambda text, gold, method="strict": cases.reward(text)
    # Without stop tokens every completion has max_new_tokens tokens.
    data_gsm8k.stop_token_ids = lambda model_dir, tokenizer: set()
    train_grpo.train = functools.partial(train, train_grpo.train, answers, work / f"adapter_{name}")
    train_grpo.launch(cases.config(cases.CASES[name], work))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
