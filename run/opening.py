"""Opening a run: its folder, its checkpoint, and its parts as a `Run`.

open_run opens the log, finds the checkpoint to resume from, and makes the model, the adapters, the learner and the
engine. run/check.py has read and checked the input before.
"""

import functools
import gzip
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import evaluate
import lora_megatron
import parallel_setup
import rollout
from data_gsm8k import Question
from engines.interface import Completion
from hardware import device as devices
from inputs.config import changes_at_resume, to_dict, to_yaml
from inputs.files import disk_errors
from knobs import Config
from lab import curves
from learner import Learner
from model.batches import Rollout
from parallel_setup import Parallel
from plan import utilisation
from rollout import Sampled
from run.bridge import Bridge
from run.check import Inputs, checkpoint_to_resume, introduction, texts
from run.sampler import Pushed, Sampler
from run.sampling_ranks import SeparateSampler
from run.tripwires import Tripwires
from runlog.log import LEGEND, RunLog
from runlog.progress import Heartbeat, StepTimer
from tasks.question_files import composed
from weights import checkpoint
from weights.policy import Policy

# ------------------------------------------------------------------------------------------------ opening the run


@dataclass
class Run:
    """The parts of a run; how it records, is checked, evaluates, saves and ends."""

    cfg: Config
    parallel: Parallel
    heartbeat: Heartbeat
    inputs: Inputs
    log: RunLog
    tripwires: Tripwires
    learner: Learner
    sampler: Sampler | SeparateSampler
    first_step: int  # > 0 after a resume
    profiler: Any = None  # of the step that is profiled now
    peak: tuple[float, str] | tuple[()] = ()  # of the device memory in any step, GiB and phase; () on a CPU

    @property
    def ranks(self) -> int:
        """All ranks of the run, also those that sample alone."""
        return self.parallel.world_size + self.cfg.rollout.ranks

    @functools.cached_property
    def not_for_training(self) -> frozenset[str]:
        """The held-out questions of all sets, as they are compared."""
        return frozenset(composed(one.question) for part in self.inputs.held_out.values() for one in part)

    def evaluate(self, after_steps: int) -> None:
        """Evaluate the policy without noise, and log the result. Collective."""
        if after_steps:  # a new sampler has this policy
            self.sampler.push_clean(after_steps)
        summary, outcomes = self.sampler.evaluate(after_steps)
        self.log.log_eval(after_steps, summary, outcomes)
        for name in self.inputs.held_out:
            said = evaluate.headline(summary, name)
            self.log.say(f"{name or 'held-out'} accuracy after {after_steps} steps: {said}")

    def shown_completions(
        self, asked: list[Question], batch: Rollout, completions: list[list[Completion]]
    ) -> list[dict]:
        """The first completions of the first question as text, for completions.jsonl."""
        first = completions[0][: self.cfg.train.completions_logged] if completions else []
        return [
            {
                "question": asked[0].question,
                "gold": asked[0].gold,
                "completion": rollout.text_of(asked[0].prompt, completion.tokens, self.inputs.tokenizer),
                "reward": batch.rewards[0, index].item(),
                "tokens": len(completion.tokens),
            }
            for index, completion in enumerate(first)
        ]

    def start_step(self, step: int) -> StepTimer:
        """The timer of a step, which counts from 0; starts a profiler if train.profile_steps has the step."""
        if step + 1 in self.cfg.train.profile_steps:
            self.profiler = devices.profiler(self.parallel.device)
            self.profiler.start()
        return StepTimer(self.heartbeat, step, self.parallel.device)

    def check_rollout(self, step: int, sampled: Sampled, pushed: Pushed) -> None:
        """Tripped for a push that the sampler has not taken up, and for a question that the step must not ask."""
        self.tripwires.after_push(step, pushed.checksums, pushed.metrics)
        asked = [composed(question.question) for question in sampled.all_asked]
        self.tripwires.asked(step, asked, len(self.inputs.questions), self.not_for_training)

    def record(self, step: int, sampled: Sampled, metrics: dict[str, float], timer: StepTimer) -> dict[str, float]:
        """Log the metrics and times of a step.  -> the metrics of rank 0, by which all ranks decide. Collective."""
        metrics = self.parallel.gather_objects(rollout.metrics(sampled) | metrics)[0]
        completions = self.shown_completions(sampled.asked, sampled.batch, sampled.completions)
        self.log.log_rows("completions.jsonl", step + 1, completions)
        self.log.log_rows("moe.jsonl", step + 1, [self.learner.router_load.by_layer])
        peak = max(self.parallel.gather_objects(timer.peak()))  # of the fullest rank
        self.peak = max(self.peak, peak)
        timing = timer.timing(sampled.num_tokens) | self.sampler.seconds
        self.log.log_step(step + 1, metrics, timing | self.speed(sampled, timing) | device_memory(peak))
        self.end_step(step)
        return metrics

    def check(self, step: int, rewards: Tensor, metrics: dict[str, float]) -> None:
        """Tripped if the step shows that the run is silently wrong. Collective."""
        extremes = rewards.min().item(), rewards.max().item()
        self.tripwires.after_step(step, metrics, extremes, self.sampler.differing_layer)
        self.tripwires.reference(step, self.learner.reference_gap)
        self.tripwires.state(step + 1, lambda: self.learner.policy.unequal(frozen=False))

    def end_step(self, step: int) -> None:
        """Write the trace of this rank, if the step was profiled. Collective: rank 0 alone knows a new run's folder."""
        if self.profiler is None:
            return
        self.profiler.stop()
        folder = Path(self.parallel.gather_objects(str(self.log.run_dir))[0]) / "profile"
        plain = folder / f"step-{step + 1}-rank-{self.parallel.rank}.json"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(plain))  # torch_npu takes no other ending, torch also .json.gz
            plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        self.profiler = None

    def save(self, after_steps: int) -> None:
        """Write a checkpoint, if all ranks hold the same weights and its files hold what the ranks do. Collective."""
        learner, parallel = self.learner, self.parallel
        self.tripwires.state(after_steps, lambda: learner.policy.unequal(frozen=True))
        tensors, counts = learner.state()
        self.tripwires.state(after_steps, lambda: checkpoint.mismatch(after_steps, to_dict(self.cfg), counts))

        def compare(written: checkpoint.Checkpoint | None) -> None:
            self.tripwires.state(after_steps, lambda: learner.not_saved(written))

        if parallel.rank == 0:
            state = counts | {"checks": self.tripwires.messages}
            checkpoint.save(
                self.log.run_dir, after_steps, tensors, state, to_dict(self.cfg), self.cfg.train.keep_last, compare
            )
        else:
            compare(None)
        dist.barrier()

    def speed(self, sampled: Sampled, timing: dict[str, float]) -> dict[str, float]:
        """The metrics of plan/utilisation.py of a step."""
        batch = sampled.batch
        rows = [(s // self.cfg.rollout.group_size, batch.row_length(s) - n, n) for s, n in enumerate(batch.lengths)]
        trained, device = [rows[sequence] for sequence in self.learner.trained], self.parallel.device
        peak = utilisation.peak_flops(device.type, devices.name(device), self.cfg.model.dtype)
        return utilisation.speed(
            self.cfg, self.inputs.arch, rows, trained, timing, self.ranks, peak, sampled.num_tokens
        )

    def finish(self) -> None:
        """Close the engine, and log the peak of the device memory and the result of the run."""
        self.sampler.close()
        if self.peak:
            device = self.parallel.device.type
            self.log.say(utilisation.memory_beside_plan(self.cfg, self.inputs.arch, self.ranks, device, *self.peak))
        summaries = self.log.evaluations()  # none on other ranks than 0
        result = evaluate.result_line(summaries[0], summaries[-1], self.cfg.data.source) if summaries else ""
        self.log.finish(result, self.tripwires.messages)
        if self.parallel.rank == 0:
            try:
                curves.draw_curves(self.log.run_dir)
            except ModuleNotFoundError as error:
                self.log.say(f"curves.png not drawn: {error}")
            self.log.say(f"{(run := self.log.run_dir)}/curves.png; completions of a step: python report.py show {run}")


def device_memory(peak: tuple[float, str] | tuple[()]) -> dict[str, float | str]:
    """The largest memory of a step, and its phase, for timing.jsonl; {} if the device does not count its memory."""
    return {"perf/peak_device_gib": round(peak[0], 3), "perf/peak_device_phase": peak[1]} if peak else {}


def open_run(
    cfg: Config, parallel: Parallel, heartbeat: Heartbeat, inputs: Inputs, bridge: Bridge | None = None
) -> Run:
    """Open the log, make or restore the policy, and give it to the sampler. Collective over the ranks that train."""
    with heartbeat.waiting():  # reading tokenizer and questions takes longer on one node than on another
        read = parallel_setup.refuse_unequal(texts(to_yaml(cfg), inputs))
    saved = agreed_checkpoint(cfg, parallel, heartbeat)
    first_step = saved.step if saved else 0
    ranks = parallel.world_size + cfg.rollout.ranks
    log = heartbeat.log
    log.open(ranks, saved.run_dir if saved else None, heartbeat.beat)
    with heartbeat.waiting():
        dist.barrier()  # rank 0 alone reads the model's files for their checksums
    if saved:
        log.rewind(first_step)
        if changed := changes_at_resume(saved.config, to_dict(cfg))[1]:
            log.say(f"note: changed at this resume: {'; '.join(changed)}")
    log.open_trackers(first_step)
    policy = Policy.load(cfg, inputs.arch, parallel)
    heartbeat.beat("loading the base weights")
    learner = Learner(cfg, policy, inputs.pad_token)

    tripwires = Tripwires(cfg, log.say, saved.state.get("checks") if saved else None)
    if saved:
        learner.restore(saved.tensors, saved.state)
        tripwires.state(first_step, functools.partial(learner.not_saved, saved))
        saved = None  # closes its files: a checkpoint that is removed must give its space back
    tripwires.state(first_step, lambda: policy.unequal(frozen=True))
    if bridge:
        sampler = SeparateSampler(cfg, parallel, inputs, learner, bridge)
        policy.model.to(parallel.device)
        sampler.start(first_step, read)
    else:
        sampler = Sampler(cfg, inputs, policy, heartbeat, learner.sampling_policy)
    log.say(f"run folder: {log.run_dir}\n{introduction(cfg, ranks, inputs)}")
    log.say(f"{lora_megatron.describe(policy.adapters, parallel)}\n{LEGEND}")
    return Run(cfg, parallel, heartbeat, inputs, log, tripwires, learner, sampler, first_step)


def agreed_checkpoint(cfg: Config, parallel: Parallel, heartbeat: Heartbeat) -> checkpoint.Checkpoint | None:
    """The checkpoint to resume from, the same one on all ranks: rank 0 chooses, and every rank opens its files."""
    found = checkpoint_to_resume(cfg, heartbeat.beat) if parallel.rank == 0 else None
    with heartbeat.waiting():
        path = parallel.gather_objects(found and found.path)[0]
    if path is None:
        return None
    # Rank 0 has verified the checksums on its node. On every other node, the first rank verifies them.
    saved = checkpoint.load(path, verified=parallel.rank == 0 or os.environ.get("LOCAL_RANK", "0") != "0")
    parallel_setup.refuse_unequal({f"{saved.path}/checksums.json": repr(saved.checksums)})
    dist.barrier()  # rank 0 must not cut the run's files before all ranks have a checkpoint to go on from
    return saved
