"""Opening a run: its folder, its checkpoint, and its parts as a `Run`.

open_run opens the log, finds the checkpoint to resume from, and makes the model, the adapters, the learner and the
engine. inputs/check.py has read and checked the input before.
"""

import functools
import gzip
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import adapter_weights
import checkpoint
import data_gsm8k
import device as devices
import evaluate
import lora_megatron
import parallel_setup
import rollout
import runlog
from config import changes_at_resume, to_dict, to_yaml
from data_gsm8k import Question
from engines.interface import Completion
from inputs.check import Inputs, checkpoint_to_resume, introduction
from inputs.files import disk_errors
from knobs import Config
from lab import curves
from learner import Learner
from parallel_setup import Parallel
from plan import grid, parameters, utilisation
from policy import Policy
from rollout import Rollout, Sampled
from runlog import Heartbeat
from sampling_ranks import Apart, Bridge, Colocated, Samplers
from tripwires import Tripwires
from weight_sync import Push

# ------------------------------------------------------------------------------------------------ opening the run


@dataclass
class Run:
    """The parts of a run; how it evaluates, saves and ends."""

    cfg: Config
    parallel: Parallel
    heartbeat: Heartbeat
    inputs: Inputs
    log: runlog.RunLog
    tripwires: Tripwires
    learner: Learner
    sampler: Colocated | Apart
    first_step: int  # > 0 after a resume
    profiler: Any = None  # of the step that is profiled now

    @property
    def ranks(self) -> int:
        """All ranks of the run, also those that sample alone."""
        return self.parallel.world_size + self.cfg.rollout.ranks

    def evaluate(self, after_steps: int) -> None:
        """Evaluate the policy that the sampler holds, and log the result. Collective."""
        summary, outcomes = self.sampler.evaluate(after_steps)
        self.log.log_eval(after_steps, summary, outcomes)
        self.log.say(f"held-out accuracy after {after_steps} steps: {evaluate.headline(summary)}")
        for name in self.inputs.sets:
            self.log.say(f"{name} accuracy after {after_steps} steps: {evaluate.headline(summary, name)}")

    def shown_completions(
        self, asked: list[Question], batch: Rollout, completions: list[list[Completion]]
    ) -> list[dict]:
        """The first completions of the first question as text, for completions.jsonl."""
        first = completions[0][: self.cfg.train.completions_logged] if completions else []
        return [
            {
                "question": asked[0].question,
                "gold": asked[0].gold,
                "completion": evaluate.text_of(asked[0].prompt, completion.tokens, self.inputs.tokenizer),
                "reward": batch.rewards[0, place].item(),
                "tokens": len(completion.tokens),
            }
            for place, completion in enumerate(first)
        ]

    def start_step(self, step: int) -> runlog.StepTimer:
        """The timer of a step, which counts from 0; starts a profiler if train.profile_steps has the step."""
        if step + 1 in self.cfg.train.profile_steps:
            self.profiler = devices.profiler(self.parallel.device)
            self.profiler.start()
        return runlog.StepTimer(self.heartbeat, step, self.parallel.device)

    def end_step(self, step: int) -> None:
        """Write the trace of this rank, if the step was profiled. Collective: rank 0 alone knows a new run's folder."""
        if self.profiler is None:
            return
        self.profiler.stop()
        folder = Path(self.parallel.gather_objects(str(self.log.run_dir))[0]) / "profile"
        plain = folder / f"step-{step + 1}-rank-{self.parallel.rank}.json"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(plain))
            plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        self.profiler = None

    def save(self, after_steps: int) -> None:
        """Write a checkpoint, if all ranks hold the same weights and its files hold what the ranks do. Collective."""
        learner, parallel = self.learner, self.parallel
        self.tripwires.state(after_steps, lambda: learner.policy.unequal(frozen=True))
        tensors, counts = learner.state()
        self.tripwires.state(after_steps, lambda: checkpoint.misfit(after_steps, to_dict(self.cfg), counts))

        def compare(written: checkpoint.Checkpoint | None) -> None:
            self.tripwires.state(after_steps, lambda: not_saved(learner, written))

        if parallel.rank == 0:
            state = counts | {"checks": self.tripwires.messages}
            checkpoint.save(self.log.run_dir, after_steps, tensors, state, self.cfg, compare)
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

    def finish(self, peak: tuple[float, str] | tuple[()]) -> None:
        """Close the engine, and log the peak of the device memory (GiB, phase) and the result of the run."""
        self.sampler.close()
        if peak:
            self.log.say(
                utilisation.memory_beside_plan(self.cfg, self.inputs.arch, self.ranks, self.parallel.device.type, *peak)
            )
        if self.parallel.expert > 1 and self.learner.router_load.fullest:
            self.log.say(utilisation.imbalance_beside_plan(self.learner.router_load.fullest))
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


def texts(cfg: Config, inputs: Inputs) -> dict[str, str]:
    """What all ranks must have read alike, each from the files of its own node."""
    prompts = {"the training questions": inputs.questions, "the held-out questions": inputs.held_out}
    prompts |= {f"the questions of eval.sets.{name}": part for name, part in inputs.sets.items()}
    return {
        "the configuration": to_yaml(cfg),
        "config.json of model.path": repr(inputs.arch),
        **{f"{name} as prompts": part.as_read() for name, part in prompts.items()},
    }


def open_engine(cfg: Config, inputs: Inputs, policy: Policy, heartbeat: Heartbeat) -> Push:
    """The engine, behind the push that has given it ``policy``, whose model goes to the device. Collective."""
    arch, parallel = policy.arch, policy.parallel
    layout = grid.of(cfg, parallel.world_size)
    if cfg.keeps_factors_apart and parameters.shared_experts(cfg, arch, layout, parallel.device.type)[0]:
        Push.frozen_experts_to_host_(policy.model, parallel.device)
    stop_tokens = data_gsm8k.stop_token_ids(cfg.model.path, inputs.tokenizer)
    pad_token = data_gsm8k.pad_token_id(inputs.tokenizer, stop_tokens)
    # The engine reports progress, because decoding may take longer than train.stall_seconds.
    engine = rollout.open_engine(cfg, arch, parallel.device, stop_tokens, pad_token, heartbeat.beat)
    push = Push(cfg, policy, engine)
    if not push.shared_bytes:
        policy.model.to(parallel.device)
    heartbeat.beat("the first push of the whole model")
    if cfg.rollout.expert_parallel:
        push.check_start(inputs.held_out[0].prompt)
    return push


def open_samplers(cfg: Config, parallel: Parallel, heartbeat: Heartbeat, inputs: Inputs, bridge: Bridge) -> Samplers:
    """The ranks that only sample, with the policy that samples first. Collective over them."""
    parallel_setup.refuse_unequal(read := texts(cfg, inputs))
    side = bridge.side.cfg
    # vLLM takes its place in the world of these ranks from the variables of torchrun, which counted all ranks.
    os.environ |= {"RANK": str(parallel.rank), "WORLD_SIZE": str(parallel.world_size)}
    policy = Policy.load(side, inputs.arch, parallel)
    heartbeat.beat("loading the base weights")
    first_step = bridge.agreed_start(read)
    version = max(0, first_step - 1)
    bridge.receive_policy(policy, version)
    push = open_engine(side, inputs, policy, heartbeat)
    return Samplers(side, parallel, inputs, heartbeat, bridge, policy, push, first_step, version)


def open_run(
    cfg: Config, parallel: Parallel, heartbeat: Heartbeat, inputs: Inputs, bridge: Bridge | None = None
) -> Run:
    """Open the log, make or restore the policy, and give it to the sampler. Collective over the ranks that train."""
    parallel_setup.refuse_unequal(read := texts(cfg, inputs))
    saved = agreed_checkpoint(cfg, parallel, heartbeat)
    first_step = saved.step if saved else 0
    ranks = parallel.world_size + cfg.rollout.ranks
    log = heartbeat.log
    log.open(ranks, saved.run_dir if saved else None, heartbeat.beat)
    with heartbeat.waiting():
        dist.barrier()  # rank 0 alone reads the model's files for their checksums
    if saved:
        log.rewind(first_step)
        if changed := changes_at_resume(saved.config, cfg)[1]:
            log.say(f"note: changed at this resume: {'; '.join(changed)}")
    log.open_trackers(first_step)
    policy = Policy.load(cfg, inputs.arch, parallel)
    heartbeat.beat("loading the base weights")
    pad_token = data_gsm8k.pad_token_id(inputs.tokenizer, data_gsm8k.stop_token_ids(cfg.model.path, inputs.tokenizer))
    learner = Learner(cfg, policy, pad_token)

    tripwires = Tripwires(cfg, log.say, saved.state.get("checks") if saved else None)
    if saved:
        learner.restore(saved.tensors, saved.state)
        tripwires.state(first_step, functools.partial(not_saved, learner, saved))
        saved = None  # closes its files: a checkpoint that is removed must give its space back
    tripwires.state(first_step, lambda: policy.unequal(frozen=True))
    if bridge:
        sampler, shared_bytes = Apart(cfg, parallel, inputs, tripwires, learner, bridge), 0
        policy.model.to(parallel.device)
        sampler.start(first_step, read)
    else:
        push = open_engine(cfg, inputs, policy, heartbeat)
        sampler = Colocated(cfg, parallel, inputs, heartbeat, tripwires, learner, push)
        shared_bytes = push.shared_bytes
    log.say(f"run folder: {log.run_dir}\n{introduction(cfg, ranks, inputs)}")
    held = f"share {shared_bytes / 2**30:.3g} GiB of" if shared_bytes else "each hold their own"
    log.say(f"{lora_megatron.describe(policy.adapters, parallel)}\ntrainer and sampler {held} experts\n{runlog.LEGEND}")
    return Run(cfg, parallel, heartbeat, inputs, log, tripwires, learner, sampler, first_step)


def not_saved(learner: Learner, saved: checkpoint.Checkpoint | None) -> str:
    """What adapter_weights.not_saved finds: where ``saved``, which rank 0 has, differs from the learner. Collective."""
    return adapter_weights.not_saved(
        saved,
        learner.policy.adapters,
        learner.saved_parts(),
        {"optimizer_steps": learner.optimizer_steps},
        learner.arch,
        learner.parallel,
    )


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
