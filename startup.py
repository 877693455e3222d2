"""Checking the input, and opening a run: its folder, its checkpoint, and its parts as a `Run`.

check_inputs reads everything except the weights, and raises InputError for input that cannot work. open_run opens the
log, finds the checkpoint to resume from, and makes the model, the adapters, the learner and the engine.
"""

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import adapter_weights
import aqn
import checkpoint
import data_gsm8k
import device as devices
import evaluate
import lora_megatron
import model_megatron
import reward_gsm8k
import rollout
import run_record
import runlog
import tiny_model
import weights_hf
from architecture import Architecture
from config import changes_at_resume, to_dict, to_yaml
from data_gsm8k import Question, Questions
from engines.interface import Completion, Engine
from inputs import functions, hf_config, question_files
from inputs.config_rules import check_engine_layout, check_layout
from inputs.files import InputError, disk_errors
from inputs.scoring import Call, Score, Scorer
from knobs import Config
from lab import run_page, trackers
from learner import Learner
from parallel_setup import Parallel, launched_rank
from plan import memory, utilisation
from rollout import Rollout, Sampled
from runlog import Heartbeat
from tripwires import Tripwires
from weight_sync import WeightSync

# ------------------------------------------------------------------------------------------------ checking the input


class Inputs(NamedTuple):
    """What was read for the checks, and is used by the run."""

    arch: Architecture
    tokenizer: Any  # of transformers
    questions: Questions
    held_out: Questions
    sets: dict[str, Questions]  # those of eval.sets
    scorer: Scorer

    def not_for_training(self) -> frozenset[str]:
        """The held-out questions of all sets, as they are compared."""
        return frozenset(
            question_files.alike(one.question) for part in (self.held_out, *self.sets.values()) for one in part
        )


def check_inputs(cfg: Config, ranks: int, scorer: Scorer | None = None) -> Inputs | None:
    """Check everything that needs no other rank; InputError for anything that cannot work. No weight is read.

    Returns architecture, tokenizer and questions; None for a tiny model that does not exist yet, of which only the
    configuration can be checked.
    """
    devices.resolve(cfg.device)
    functions.advantage(cfg.loss.advantage)
    functions.token_loss(cfg.loss.kind)
    scorer = scorer or Scorer(cfg.reward)
    check_writable("train.out_dir", Path(cfg.train.out_dir))
    exists = cfg.tiny_model is None or tiny_model.exists(cfg)
    arch = hf_config.read(cfg.model.path) if exists else hf_config.planned(cfg)[0]
    check_layout(cfg, arch, ranks)
    check_engine_layout(cfg, arch, ranks)
    if not exists:
        check_writable("model.path", Path(cfg.model.path))
        check_answers(cfg, scorer)
        return None
    rollout.check_engine(cfg, arch, ranks)
    if cfg.aqn.schedule != "off":
        noise = aqn.norm_targets(arch, cfg.aqn.targets, router=cfg.aqn.router)
        adapted = {
            name for name in aqn.touched_names(noise) if adapter_weights.target_of(arch, name) in cfg.lora.targets
        }
        if adapted and cfg.keeps_factors_apart:
            raise InputError(
                f"rollout.sync: adapter: the noise is in the columns of {min(adapted)}, whose LoRA factors would not "
                "get it; needed: merged, other aqn.targets, or aqn.router noisy"
            )
    weights_hf.read_model(cfg.model.path, arch)
    tokenizer = data_gsm8k.load_tokenizer(cfg.model.path)
    check_answers(cfg, scorer)
    parts = [(cfg.data, "train"), (cfg.data, "test"), *((data, "test") for data in evaluate.data_of_sets(cfg).values())]
    questions, held_out, *others = (data_gsm8k.load(*part, tokenizer, cfg.train.seed) for part in parts)
    for key, count, part, kind in (
        ("rollout.prompts_per_step", cfg.rollout.prompts_per_step, questions, "training"),
        ("eval.num_questions", cfg.eval.num_questions, held_out, "held-out"),
    ):
        if count > len(part):
            raise InputError(f"{key}: {count} exceeds the {len(part)} {kind} questions")
    asked = {question_files.alike(question.question) for question in questions}
    apart = [question.question for part in (held_out, *others) for question in part]
    shared = {question for question in apart if question_files.alike(question) in asked}
    if shared and cfg.checks.held_out == "stop":
        raise InputError(
            f"data: {len(shared)} held-out questions are training questions as well, for example {min(shared)[:60]!r}; "
            "needed: none, or checks.held_out=warn"
        )
    used = data_gsm8k.stop_token_ids(cfg.model.path, tokenizer)
    largest = max(used.union(*(question.prompt for part in (questions, held_out, *others) for question in part)))
    if largest >= arch.vocab_size:
        raise InputError(
            f"model.path: prompts or stop tokens of {cfg.model.path} use token {largest}, beyond its vocabulary of "
            f"{arch.vocab_size}; needed: the model's own tokenizer and generation_config.json"
        )
    return Inputs(arch, tokenizer, questions, held_out, dict(zip(cfg.eval.sets, others, strict=True)), scorer)


def check_answers(cfg: Config, scorer: Scorer) -> None:
    """InputError unless every gold answer is correct under the chosen reward: otherwise the advantages are noise."""
    if not cfg.reward.check_gold or (scorer.workers and launched_rank()):  # one rank is enough for a slow reward
        return
    method, asks_for_box = cfg.reward.method, reward_gsm8k.BOXED in cfg.data.instruction
    parts = [("training", cfg.data, "train"), ("held-out", cfg.data, "test")]
    for kind, data, split in [*parts, *((name, data, "test") for name, data in evaluate.data_of_sets(cfg).items())]:
        rows = data_gsm8k.read(data, split)[0]
        answers = [row.answer if "#### " in row.answer else f"#### {row.gold}" for row in rows]
        if not cfg.reward.function:
            answers = [reward_gsm8k.in_form(answer, method, asks_for_box) for answer in answers]
        scores = scorer([Call(answer, row.gold, row.columns) for answer, row in zip(answers, rows, strict=True)])
        wrong = [answer for answer, score in zip(answers, scores, strict=True) if not score.correct]
        if wrong:
            needs_box = method == "base_acc" and not asks_for_box
            form = f" or an instruction that asks for {reward_gsm8k.BOX_FORM}, or" if needs_box else " or"
            raise InputError(
                f"{scorer.name} finds {len(wrong)} of {len(answers)} gold {kind} answers not correct, the first being "
                f"{wrong[0][-60:]!r}; needed: a reward that fits the data's answers,{form} reward.check_gold=false"
            )


def check_writable(key: str, folder: Path) -> None:
    """InputError unless ``folder`` is a folder that can be written, or can be made. Nothing is made here."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{key}: {folder}: {nearest} is not a folder that can be written; needed: one that can")


def checkpoint_to_resume(cfg: Config) -> checkpoint.Checkpoint | None:
    """The checkpoint that train.resume asks for, its checksums verified; None for a new run.

    InputError if the named run has no good checkpoint or another configuration, or if the files of the model, the
    tokenizer or the data have changed since the run was started.
    """
    if cfg.train.resume == "never":
        return None
    is_auto = cfg.train.resume == "auto"
    saved = checkpoint.find_resumable(cfg) if is_auto else checkpoint.latest(Path(cfg.train.resume))
    if saved is None and is_auto:
        return None
    if saved is None:
        raise InputError(
            f"train.resume: {cfg.train.resume} holds no usable checkpoint; needed: auto, never, or a run's folder"
        )
    checkpoint.check_resume(saved, cfg)
    for line in run_record.refuse_changed_inputs(
        saved.run_dir,
        cfg,
        accept=cfg.train.changed_inputs == "accept",
        how="train.resume=never for a new run, or train.changed_inputs=accept to go on",
    ):
        print(f"note: train.changed_inputs: accepted: {line}", flush=True)
    return saved


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
    engine: Engine
    weights: WeightSync  # gives the policy to the engine
    first_step: int  # > 0 after a resume
    profiler: Any = None  # of the step that is profiled now

    def evaluate(self, after_steps: int) -> None:
        """Evaluate the policy that the engine holds, and log the result. Collective."""
        summary, outcomes = evaluate.evaluate(
            self.engine,
            {"": self.inputs.held_out, **self.inputs.sets},
            self.score,
            self.cfg.eval,
            self.cfg.rollout,
            self.parallel,
            self.heartbeat.beat,
        )
        self.log.log_eval(after_steps, summary, outcomes)
        self.log.say(f"held-out accuracy after {after_steps} steps: {evaluate.headline(summary)}")
        for name in self.inputs.sets:
            self.log.say(f"{name} accuracy after {after_steps} steps: {evaluate.headline(summary, name)}")

    def score(self, answers: Sequence[tuple[Question, Completion]]) -> list[Score]:
        """As evaluate.score, with the tokenizer and the reward of this run."""
        return evaluate.score(answers, self.inputs.tokenizer, self.inputs.scorer)

    def shown_completions(
        self, asked: list[Question], batch: Rollout, completions: list[list[Completion]]
    ) -> list[dict]:
        """The first completions of the first question as text, for completions.jsonl."""
        first = completions[0][: self.cfg.train.completions_logged] if completions else []
        return [
            {
                "question": asked[0].question,
                "gold": asked[0].gold,
                "completion": self.inputs.tokenizer.decode(completion.tokens),
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
        pieces = adapter_weights.all_pieces(learner.model, self.inputs.arch, learner.adapters, parallel)
        self.tripwires.state(after_steps, adapter_weights.differing(pieces, parallel))
        tensors, counts = learner.state()
        self.tripwires.state(after_steps, checkpoint.misfit(after_steps, to_dict(self.cfg), counts))
        checkpoint.save(
            self.log.run_dir,
            after_steps,
            tensors,
            counts,
            self.cfg,
            writes=parallel.rank == 0,
            check=lambda written: self.tripwires.state(after_steps, not_saved(learner, written)),
        )
        dist.barrier()

    def speed(self, sampled: Sampled, timing: dict[str, float]) -> dict[str, float]:
        """The metrics of plan/utilisation.py of a step."""
        batch = sampled.batch
        rows = [(s // self.cfg.rollout.group_size, batch.row_length(s) - n, n) for s, n in enumerate(batch.lengths)]
        trained, device = [rows[sequence] for sequence in self.learner.trained], self.parallel.device
        peak = utilisation.peak_flops(device.type, devices.name(device), self.cfg.model.dtype)
        place = timing, self.parallel.world_size, peak, sampled.num_tokens
        return utilisation.speed(self.cfg, self.inputs.arch, rows, trained, *place)

    def where_apart(self, bound: float) -> str:
        """The layer in which sampler and trainer differ by more than ``bound``, after another push. Collective."""
        self.weights.push_clean()
        return self.learner.first_differing_layer(self.engine, self.inputs.held_out[0].prompt, bound)

    def finish(self, peak: tuple[float, str] | tuple[()]) -> None:
        """Close the engine, and log the peak of the device memory (GiB, phase) and the result of the run."""
        self.engine.close()
        if peak:
            place = (self.parallel.world_size, self.parallel.device.type)
            self.log.say(memory.beside_plan(self.cfg, self.inputs.arch, *place, *peak))
        if self.parallel.expert > 1 and self.learner.router_load.fullest:
            self.log.say(memory.imbalance_beside_plan(self.learner.router_load.fullest))
        summaries = self.log.evaluations()  # none on other ranks than 0
        self.log.finish(evaluate.result_line(summaries[0], summaries[-1], self.cfg.data.source) if summaries else "")
        if self.parallel.rank == 0:
            try:
                run_page.draw_curves(self.log.run_dir)
            except ModuleNotFoundError as error:
                self.log.say(f"curves.png not drawn: {error}")


def open_run(cfg: Config, parallel: Parallel, heartbeat: Heartbeat, inputs: Inputs) -> Run:
    """Open the log, make or restore the policy, and give it to the engine. Collective."""
    arch, tokenizer, questions, held_out, sets, _ = inputs
    parallel.refuse_unequal({  # each rank reads the files of its own node
        "the configuration": to_yaml(cfg),
        "config.json of model.path": repr(arch),
        "the training questions as prompts": repr([(question.prompt, question.gold) for question in questions]),
        "the held-out questions as prompts": repr([(question.prompt, question.gold) for question in held_out]),
        **{f"the questions of eval.sets.{name}": repr([(question.prompt, question.gold) for question in part])
           for name, part in sets.items()},
    })  # fmt: skip
    saved = agreed_checkpoint(cfg, parallel)
    first_step = saved.step if saved else 0
    log = runlog.open_run(cfg, parallel.world_size, parallel.rank, resume=saved.run_dir if saved else None)
    heartbeat.continue_with(log)
    if saved:
        log.rewind(first_step)
        if changed := changes_at_resume(saved.config, cfg)[1]:
            log.say(f"note: changed at this resume: {'; '.join(changed)}")
    if parallel.rank == 0:
        log.trackers = trackers.start(cfg.train.trackers, log.run_dir, log.say)
    model = model_megatron.build_for(cfg.model, arch, parallel)
    weights_hf.load(model, arch, parallel, cfg.model.path)
    heartbeat.beat("loading the base weights")
    adapters = lora_megatron.attach(model, cfg.lora, parallel, cfg.train.seed, merges=cfg.trains_merged)
    stop_tokens = data_gsm8k.stop_token_ids(cfg.model.path, tokenizer)
    pad_token = rollout.pad_token_id(tokenizer, stop_tokens)
    learner = Learner(cfg, arch, parallel, model, adapters, pad_token)

    tripwires = Tripwires(cfg, log.say)
    if saved:
        learner.restore(saved.tensors, saved.state)
        tripwires.state(first_step, not_saved(learner, saved))
        saved = None  # closes its files: a checkpoint that is removed must give its space back
    pieces = adapter_weights.all_pieces(model, arch, adapters, parallel)
    tripwires.state(first_step, adapter_weights.differing(pieces, parallel))
    # The engine reports progress, because decoding may take longer than train.stall_seconds.
    engine = rollout.open_engine(cfg, arch, parallel.device, stop_tokens, pad_token, heartbeat.beat)
    weights = WeightSync(engine, model, arch, parallel, cfg)
    heartbeat.beat("the first push of the whole model")
    if cfg.rollout.expert_parallel:
        weights.check_start(held_out[0].prompt)
    log.say(introduction(cfg, parallel, log.run_dir, lora_megatron.describe(adapters, parallel), questions, held_out))
    for name, part in sets.items():
        log.say(f"{name}: {part.description}")
    return Run(cfg, parallel, heartbeat, inputs, log, tripwires, learner, engine, weights, first_step)


def not_saved(learner: Learner, saved: checkpoint.Checkpoint | None) -> str:
    """What adapter_weights.not_saved finds: where ``saved``, which rank 0 has, differs from the learner. Collective."""
    return adapter_weights.not_saved(
        saved,
        learner.adapters,
        {"": learner.factors} | {f".{moment}": values for moment, values in learner.moments.items()},
        {"optimizer_steps": learner.optimizer_steps},
        learner.arch,
        learner.parallel,
    )


def agreed_checkpoint(cfg: Config, parallel: Parallel) -> checkpoint.Checkpoint | None:
    """The checkpoint to resume from, the same one on all ranks: rank 0 chooses, and every rank opens its files."""
    found = checkpoint_to_resume(cfg) if parallel.rank == 0 else None
    path = parallel.gather_objects(found and found.path)[0]
    if path is None:
        return None
    # Rank 0 has verified the checksums on its node. On every other node, the first rank verifies them.
    saved = checkpoint.load(path, verified=parallel.rank == 0 or os.environ.get("LOCAL_RANK", "0") != "0")
    parallel.refuse_unequal({f"{saved.path}/checksums.json": repr(saved.checksums)})
    dist.barrier()  # rank 0 must not cut the run's files before all ranks have a checkpoint to go on from
    return saved


def introduction(
    cfg: Config, parallel: Parallel, run_dir: Path | None, adapters: str, questions: Questions, held_out: Questions
) -> str:
    """What is printed before the first step: folder, layout, data, ``adapters``, and the batch arithmetic."""
    p, prompts, group = parallel, cfg.rollout.prompts_per_step, cfg.rollout.group_size
    updates = prompts // cfg.optim.prompts_per_update
    return (
        f"run folder: {run_dir}\n"
        f"layout: {p.world_size} ranks = tensor {p.tensor} x data {p.data}"
        f" = expert_tensor {p.expert_tensor} x expert {p.expert} x expert_data {p.expert_data}\n"
        f"train: {questions.description}\nheld out: {held_out.description}\n"
        f"{adapters}\n"
        f"a step: {prompts} prompts x {group} = {prompts * group} sequences, "
        f"{updates} update{'s' * (updates > 1)} of {cfg.optim.prompts_per_update} prompts x {group}"
    )
