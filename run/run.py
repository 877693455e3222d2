"""The record of a run: its folder, checkpoints and logs, and the checks that end it if it is silently wrong."""

import functools
import gzip
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import evaluate
import lora_megatron
import parallel_setup
import rollout
from engines.interface import Engine
from hardware import device as devices
from inputs import teacher as teachers
from inputs.config import changes_at_resume, to_dict, to_yaml
from inputs.files import disk_errors
from knobs import Config
from lab import curves
from learner import Learner
from parallel_setup import Parallel
from plan import utilisation
from rollout import Sampled
from run.input_check import Inputs, checkpoint_to_resume, introduction, texts
from run.start import Start
from run.tripwires import Tripwires
from runlog import run_record
from runlog.log import LEGEND
from runlog.progress import Heartbeat, StepTimer
from tasks.question_files import composed
from weight_sync import Push
from weights import checkpoint, teacher


class Run:
    """A training run. Its methods open, record, check, evaluate, save and end it. All ranks make the same calls."""

    def __init__(self, start: Start, parallel: Parallel, inputs: Inputs) -> None:
        """Open the folder of a new run, or of the run to resume. All ranks call this together."""
        cfg, log, heartbeat = self.cfg, self.log, self.heartbeat = start.cfg, start.log, start.heartbeat
        self.parallel, self.inputs = parallel, inputs
        self.profiler: Any = None  # the profiler of the current step, if the step is profiled
        self.peak: tuple[float, str] | tuple[()] = ()  # peak of the device memory in GiB, and its phase; () on a CPU
        with heartbeat.waiting():  # reading tokenizer and questions takes longer on one node than on another
            parallel_setup.refuse_unequal(texts(to_yaml(cfg), inputs))
        self.saved = saved = agreed_checkpoint(cfg, parallel, heartbeat)  # kept until restore
        self.first_step = saved.step if saved else 0  # > 0 after a resume
        # Only rank 0 reads the model's files for their checksums.
        read = run_record.inputs(run_record.input_files(cfg), heartbeat.beat) if parallel.rank == 0 else {}
        if cfg.loss.teacher:
            check_teacher(cfg.loss.teacher, parallel, heartbeat, read)
        log.open(parallel.world_size, saved.run_dir if saved else None, read)
        with heartbeat.waiting():
            dist.barrier()
        if saved:
            log.rewind(self.first_step)
            if changed := changes_at_resume(saved.config, to_dict(cfg))[1]:
                log.say(f"note: changed at this resume: {'; '.join(changed)}")
        log.open_trackers(self.first_step)
        self.tripwires = Tripwires(cfg, log.say, saved.state.get("checks") if saved else None)

    def restore(self, learner: Learner) -> None:
        """Load the checkpoint, if there is one, into ``learner``, and check that all ranks have equal states."""
        self.heartbeat.beat("loading the base weights")
        if self.saved:
            learner.restore(self.saved.tensors, self.saved.state)
            self.tripwires.state(self.first_step, functools.partial(learner.not_saved, self.saved))
            self.saved = None  # closes its files, so that removing the checkpoint frees the space
        self.tripwires.state(self.first_step, lambda: learner.policy.unequal(frozen=True))

    def introduce(self, learner: Learner, push: Push) -> None:
        """Print the folder of the run, the layout, the data and the trained modules.

        With rollout.expert_parallel, this first checks the push of the whole model, and raises Tripped if it did not
        reach the engine. All ranks call this together.
        """
        parallel = self.parallel
        self.heartbeat.beat("the first push of the whole model")
        if self.cfg.rollout.expert_parallel:
            push.check_start(self.inputs.probe)
        self.log.say(f"run folder: {self.log.run_dir}\n{introduction(self.cfg, parallel.world_size, self.inputs)}")
        self.log.say(f"{lora_megatron.describe(learner.policy.adapters, parallel)}\n{LEGEND}")

    @functools.cached_property
    def not_for_training(self) -> frozenset[str]:
        """The held-out questions of all sets, in the form in which questions are compared."""
        return frozenset(composed(one.question) for part in self.inputs.held_out.values() for one in part)

    def evaluate(self, engine: Engine, after_steps: int) -> None:
        """Evaluate the policy in ``engine`` after ``after_steps`` steps, and log the result.

        All ranks call this together.
        """
        cfg, inputs = self.cfg, self.inputs
        summary, outcomes, answers = evaluate.evaluate(
            engine,
            inputs.held_out,
            inputs.score,
            cfg.eval,
            cfg.rollout,
            self.parallel,
            self.heartbeat.beat,
            inputs.environment,
        )
        headlines = {name: evaluate.headline(summary, name) for name in inputs.held_out}
        if cfg.train.questions_logged:
            self.log.log_completions("eval", after_steps, answers)
        self.log.log_eval(after_steps, summary, outcomes)
        for name, said in headlines.items():
            self.log.say(f"{name or 'held-out'} accuracy after {after_steps} steps: {said}")

    def start_step(self, step: int) -> StepTimer:
        """Start the timer of ``step`` (from 0), and a profiler if train.profile_steps contains the step."""
        if step + 1 in self.cfg.train.profile_steps:
            self.profiler = devices.profiler(self.parallel.device)
            self.profiler.start()
        if self.inputs.environment:
            self.inputs.environment.seconds = 0.0  # an evaluation may have left some
        return StepTimer(self.heartbeat, step, self.parallel.device)

    def check_push(self, step: int, pushed: dict[str, float]) -> None:
        """Raise Tripped if the pushed tensors are wrong, or have not changed although they should have.

        ``pushed`` has the metrics of the push. All ranks call this together.
        """
        self.tripwires.after_push(step, self.parallel.gather_objects(pushed["sync/checksum"]), pushed)

    def check_rollout(self, step: int, sampled: Sampled) -> None:
        """Raise Tripped if the step asks a held-out question, or if several steps in a row ask the same questions."""
        asked = [composed(question.question) for question in sampled.all_asked]
        self.tripwires.asked(step, asked, len(self.inputs.questions), self.not_for_training)

    def record(
        self,
        step: int,
        sampled: Sampled,
        advantages: Tensor,
        metrics: dict[str, float],
        learner: Learner,
        timer: StepTimer,
    ) -> dict[str, float]:
        """Log the completions, metrics and times of a step, and return the metrics of rank 0.

        All ranks base their decisions on these metrics. All ranks call this together.
        """
        rows = rollout.of_step(sampled, advantages, learner.teacher_kl, self.parallel)
        computed = rollout.metrics(sampled) | rollout.part_means(rows) | metrics
        metrics = self.parallel.gather_objects(computed)[0]
        logged = self.cfg.train.questions_logged
        self.log.log_completions("step", step + 1, [row for row in rows if row["prompt"] < logged])
        self.log.log_rows("moe.jsonl", step + 1, [learner.router_load.by_layer])
        peak = max(self.parallel.gather_objects(timer.peak()))  # the memory of the fullest rank
        self.peak = max(self.peak, peak)
        timing = timer.timing(sampled.num_tokens)
        if self.inputs.environment:
            waited = self.inputs.environment.seconds
            timing["timing/environment_s"] = round(waited, 4)
            timing["timing/generate_s"] = round(timing["timing/generate_s"] - waited, 4)  # phases add up to the step
        speed = self.speed(sampled, learner.trained, timing)
        self.log.log_step(step + 1, metrics, timing | speed | device_memory(peak))
        self.end_step(step)
        return metrics

    def check(self, step: int, rewards: Tensor, metrics: dict[str, float], learner: Learner, push: Push) -> None:
        """Raise Tripped if the step shows that the run is silently wrong. All ranks call this together."""
        extremes = rewards.min().item(), rewards.max().item()
        self.tripwires.after_step(step, metrics, extremes, functools.partial(push.differing_layer, self.inputs.probe))
        self.tripwires.reference(step, learner.reference_gap)
        self.tripwires.state(step + 1, lambda: learner.policy.unequal(frozen=False))

    def end_step(self, step: int) -> None:
        """Write this rank's profiler trace if the step was profiled.

        All ranks call this together, because only rank 0 knows the folder of a new run.
        """
        if self.profiler is None:
            return
        self.profiler.stop()
        folder = Path(self.parallel.gather_objects(str(self.log.run_dir))[0]) / "profile"
        plain = folder / f"step-{step + 1}-rank-{self.parallel.rank}.json"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(plain))  # torch_npu accepts only this ending, torch also .json.gz
            plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        self.profiler = None

    def save(self, learner: Learner, after_steps: int) -> None:
        """Write a checkpoint, and check that all ranks and the files have the same weights.

        All ranks call this together.
        """
        self.tripwires.state(after_steps, lambda: learner.policy.unequal(frozen=True))
        tensors, counts = learner.state()
        self.tripwires.state(after_steps, lambda: checkpoint.mismatch(after_steps, to_dict(self.cfg), counts))

        def compare(written: checkpoint.Checkpoint | None) -> None:
            self.tripwires.state(after_steps, lambda: learner.not_saved(written))

        if self.parallel.rank == 0:
            state = counts | {"checks": self.tripwires.messages}
            checkpoint.save(
                self.log.run_dir, after_steps, tensors, state, to_dict(self.cfg), self.cfg.train.keep_last, compare
            )
        else:
            compare(None)
        dist.barrier()

    def speed(self, sampled: Sampled, trained: list[int], timing: dict[str, float]) -> dict[str, float]:
        """Return a step's metrics of speed, which plan/utilisation.py computes. ``trained`` is Learner.trained."""
        batch = sampled.batch
        rows = [(s // self.cfg.rollout.group_size, batch.row_length(s) - n, n) for s, n in enumerate(batch.lengths)]
        learned, device = [rows[sequence] for sequence in trained], self.parallel.device
        peak = utilisation.peak_flops(device.type, devices.name(device), self.cfg.model.dtype)
        return utilisation.speed(
            self.cfg, self.inputs.arch, rows, learned, timing, self.parallel.world_size, peak, sampled.num_tokens
        )

    def finish(self) -> None:
        """Log the peak of the device memory and the result of the run, and draw its curves."""
        if self.peak:
            gib, phase = self.peak
            self.log.say(f"device memory: at most {gib:.2f} GiB in {phase}")
        summaries = self.log.evaluations()  # [] except on rank 0
        result = evaluate.result_line(summaries[0], summaries[-1], self.cfg.data.source) if summaries else ""
        self.log.finish(result, self.tripwires.messages)
        if self.parallel.rank == 0:
            try:
                curves.draw_curves(self.log.run_dir)
            except ModuleNotFoundError as error:
                self.log.say(f"curves.png was not drawn: {error}")
            self.log.say(f"{(run := self.log.run_dir)}/curves.png; read completions with: python report.py show {run}")


def device_memory(peak: tuple[float, str] | tuple[()]) -> dict[str, float | str]:
    """Return a step's memory peak and its phase for timing.jsonl, or {} if the device does not count its memory."""
    return {"perf/peak_device_gib": round(peak[0], 3), "perf/peak_device_phase": peak[1]} if peak else {}


def check_teacher(named: str, parallel: Parallel, heartbeat: Heartbeat, inputs: dict[str, dict[str, str]]) -> None:
    """Raise InputError unless all nodes have the same undamaged teacher, made for the run's base model.

    ``named`` is loss.teacher. ``inputs`` is the result of run_record.inputs on rank 0, and {} on other ranks. On every
    node but that of rank 0, the first rank computes the teacher's checksums. All ranks call this together.
    """
    own = inputs.get("teacher")
    if own is None and os.environ.get("LOCAL_RANK", "0") == "0":
        own = run_record.inputs({"teacher": teachers.files(named)}, heartbeat.beat)["teacher"]
    with heartbeat.waiting():
        inputs = parallel.gather_objects(inputs)[0]
    parallel_setup.refuse_unequal({f"loss.teacher, {named}": repr(own or inputs["teacher"])})
    teacher.refuse_other_files(named, inputs)


def agreed_checkpoint(cfg: Config, parallel: Parallel, heartbeat: Heartbeat) -> checkpoint.Checkpoint | None:
    """Return the checkpoint to resume from, the same one on all ranks, or None if there is none.

    Rank 0 chooses it, and every rank opens its files. All ranks call this together.
    """
    found = checkpoint_to_resume(cfg, heartbeat.beat) if parallel.rank == 0 else None
    with heartbeat.waiting():
        path = parallel.gather_objects(found and found.path)[0]
    if path is None:
        return None
    # Rank 0 has verified the checksums on its node. On every other node, the first rank verifies them.
    saved = checkpoint.load(path, verified=parallel.rank == 0 or os.environ.get("LOCAL_RANK", "0") != "0")
    parallel_setup.refuse_unequal({f"{saved.path}/checksums.json": repr(saved.checksums)})
    dist.barrier()  # rank 0 must not shorten the run's files before all ranks have a checkpoint to continue from
    return saved
