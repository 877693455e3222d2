"""This trainer's side of the benchmarks: train_grpo.start, whose timer waits for a line on stdin before every step.

    python benchmarks/our_side.py CASE --work DIR [--set section__key=JSON ...] [--make]

Every answer is one line of JSON on stdout: `ready`, then a record a step. A line `step` asks for the next step, `check
FILE` for the log-probs and the loss of what TRL sampled (FILE, by trl_side.py), the end of the input for the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases
import torch

import adapter_weights
import data_gsm8k
import export
import packing
import reward_gsm8k
import rollout
import startup
import train_grpo
from learner import Learner, StepTimer

FACTOR_STD = 0.02  # of B, which starts at 0 in a real run


class Enough(Exception):
    """There is no further step to do."""


class Side:
    """What is measured of the running trainer; one a process."""

    def __init__(self, answers, adapter_dir: Path) -> None:
        self.answers, self.adapter_dir = answers, adapter_dir
        self.learner: Learner | None = None
        self.phases: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.start: tuple[float, float] | None = None
        self.num_tokens = 0

    def answer(self, record: dict) -> None:
        print(json.dumps(record), file=self.answers, flush=True)

    def timed(self, function, phase: str):
        """``function``, its CPU seconds added to ``phase``."""

        def run(*args, **kwargs):
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + time.process_time() - before

        return run

    def turn(self) -> None:
        """Between two steps: report the one that ended, and wait until the next is asked for."""
        if self.start is None:
            self.answer({"ready": True, "startup_cpu_s": cpu_seconds(), "prompts": self.prompts()})
        else:
            cpu, wall = (now - then for now, then in zip(clocks(), self.start, strict=True))
            self.answer({
                "cpu_s": cpu, "wall_s": wall, "phases": self.phases, "new_tokens": self.num_tokens,
                "loss": self.metrics["actor/loss"], "kl": self.metrics.get("actor/kl_loss", 0.0),
                "logp_gap": self.metrics["rollout/logp_gap_max"], "peak_mib": peak_mib(), "now_mib": now_mib(),
            })  # fmt: skip
        for line in sys.stdin:
            if line.startswith("check "):
                self.answer(self.check(json.loads(Path(line[6:].strip()).read_text())))
            else:
                break
        else:
            raise Enough
        self.phases, self.num_tokens = {}, 0
        self.start = clocks()

    def prompts(self) -> list[list[int]]:
        cfg = self.learner.cfg
        return [
            question.prompt for question in data_gsm8k.load(cfg, "train", data_gsm8k.load_tokenizer(cfg.model.path))
        ]

    def check(self, theirs: dict) -> dict:
        """Largest differences in log-probs (nats) and the two losses, on the sequences of ``theirs``."""
        learner, rows = self.learner, len(theirs["tokens"])
        width = len(theirs["tokens"][0])
        batch = rollout.Rollout(
            prompts=theirs["prompts"], tokens=torch.tensor(theirs["tokens"]), logp=torch.zeros(rows, width),
            lengths=[width] * rows, truncated=torch.ones(rows, dtype=torch.bool),
            rewards=torch.zeros(rows, 1), parsable=torch.ones(1),
        )  # fmt: skip
        micro = rollout.pack(batch, list(range(rows)), torch.tensor(theirs["advantages"]), torch.device("cpu"), 0, 1)
        micro.packing = packing.pack(micro.tokens, micro.mask, 1)
        counts = {"num_tokens": rows * width, "num_sequences": rows, "max_new_tokens": width}
        with torch.no_grad():
            reference = learner._reference_logp(micro)
            logp = learner._logp(micro)[0]
            loss = learner._loss(micro, None, reference, counts)[0].item()

        def gap(ours: torch.Tensor, name: str) -> float:
            return (ours[micro.mask == 1].view(rows, width) - torch.tensor(theirs[name])).abs().max().item()

        kl = (reference - logp)[micro.mask == 1].abs().max().item()
        return {"logp_gap": gap(logp, "logp"), "reference_gap": gap(reference, "reference"), "loss": loss,
                "their_loss": theirs["loss"], "largest_log_ratio_to_reference": kl}  # fmt: skip


def clocks() -> tuple[float, float]:
    """CPU seconds of all threads of this process, and wall seconds."""
    return time.process_time(), time.perf_counter()


def cpu_seconds() -> float:
    """CPU seconds since this process started, its children included."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_mib() -> float:
    """The largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20)


def now_mib() -> float:
    """The resident set now; 0 where /proc does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20 if path.exists() else 0.0


def install(side: Side) -> None:
    """Put the stops and the stopwatches into the trainer; what it computes stays as it is."""

    class TurnTimer(StepTimer):
        def __init__(self, *args) -> None:
            side.turn()
            super().__init__(*args)
            self.cpu = time.process_time()

        def end_phase(self, phase: str) -> None:
            super().end_phase(phase)
            now = time.process_time()
            side.phases[phase] = side.phases.get(phase, 0.0) + now - self.cpu
            self.cpu = now

    class AdaptedLearner(Learner):
        def __init__(self, cfg, arch, parallel, model, adapters, pad_token: int) -> None:
            super().__init__(cfg, arch, parallel, model, adapters, pad_token)
            generator = torch.Generator().manual_seed(0)
            whole = adapter_weights.gather(adapters, self.factors, arch, parallel)
            for name, factor in whole.items():
                if name.endswith(".B"):  # whole, so that every layout starts from the same adapters
                    factor.normal_(0, FACTOR_STD, generator=generator)
            with torch.no_grad():
                for name, piece in adapter_weights.scatter(adapters, whole, arch, parallel).items():
                    self.factors[name].copy_(piece)
            if parallel.rank == 0 and not side.adapter_dir.exists():
                export.write_adapter(side.adapter_dir, cfg, list(export.adapted_modules(arch, cfg.lora)), whole)
            side.learner = self
            self._loss = side.timed(self._loss, "forward")
            self._step = side.timed(self._step, "optimizer")

    def log_step(self, step: int, metrics: dict, timing: dict) -> None:
        side.metrics = metrics
        write_step(self, step, metrics, timing)

    def sample(engine, asked, *args, **options):
        sampling = engine.sample
        engine.sample = side.timed(sampling, "sampling")
        batch, completions = real_sample(engine, asked, *args, **options)
        engine.sample = sampling
        side.num_tokens += sum(len(answer.tokens) for group in completions for answer in group)
        return batch, completions

    write_step, real_sample = train_grpo.runlog.RunLog.log_step, rollout.sample
    train_grpo.runlog.RunLog.log_step, rollout.sample = log_step, sample
    train_grpo.StepTimer, startup.Learner = TurnTimer, AdaptedLearner
    startup.check_answers = lambda cfg: None  # the benchmark's reward does not know right answers
    reward_gsm8k.score = lambda text, gold, method="strict": cases.reward(text)
    # No token ends an answer: every completion has max_new_tokens.
    data_gsm8k.stop_token_ids = lambda model_dir, tokenizer: set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("case", choices=cases.CASES)
    parser.add_argument("--work", type=Path, required=True, help="folder of the model, the adapter and the run")
    parser.add_argument("--set", action="append", default=[], metavar="section__key=JSON")
    parser.add_argument("--make", action="store_true", help="only make the model and the list of questions")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the trainer prints goes to stderr
    changes = {key: json.loads(value) for key, _, value in (text.partition("=") for text in args.set)}
    cfg = cases.config(cases.CASES[args.case], args.work / "model", args.work / "runs", 10**6, **changes)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    if args.make:
        with train_grpo.parallel_setup.open_world(cfg) as device:
            train_grpo.tiny_model.make(cfg, device)
        questions = [question for question, _ in data_gsm8k.read(cfg, "train")[0]]
        (args.work / "questions.json").write_text(json.dumps(questions) + "\n")
        return
    side = Side(answers, args.work / f"adapter_{args.case}")
    install(side)
    try:
        train_grpo.start(cfg)
    except Enough:
        sys.stderr.flush()
        os._exit(0)  # as after an exception: no tear-down


if __name__ == "__main__":
    main()
