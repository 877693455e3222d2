"""GRPO with LoRA on a mixture-of-experts model, start to finish.

    torchrun --nproc_per_node=16 train_grpo.py configs/qwen3.yaml [section.key=value ...]
    python train_grpo.py CONFIG [section.key=value ...] --check [--ranks N]     only refuse bad input

One step: give the sampler the current policy, sample G answers to each of P questions, score them, compare each score
with its group's, and step the LoRA weights on the clipped objective with a KL leash to the reference, which is the
same model with its LoRA off. Each module imported below is one of those verbs. P prompts, G group, b rows, T tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import adapter_weights
import aqn
import aqn_targets
import checkpoint
import data_gsm8k
import device as devices
import evaluate
import grpo
import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import reward_gsm8k
import rollout
import run_record
import runlog
import tiny_model
import weights_hf
from config import derive_seed, load_config, to_yaml
from config_rules import check_engine_layout, check_layout
from hf_config import Architecture
from input_files import MOST_RANKS, InputError, one_line
from knobs import Config
from learner import Clock, Learner
from parallel_setup import Parallel
from plan import doctor
from plan import memory as memory_plan
from rollout import Rollout
from tripwires import Heartbeat, Tripped, Tripwires
from weight_sync import WeightSync

# ------------------------------------------------------------------------------------------------ the algorithm


def train(cfg: Config, parallel: Parallel, heartbeat: Heartbeat, inputs: tuple | None = None) -> None:
    """The whole run: set up or resume, then cfg.train.steps steps, evaluated before the first and after the last.

    ``inputs``: what check_inputs has returned already; None: it is called here.
    """
    arch, tokenizer, questions, held_out = inputs or check_inputs(cfg, parallel.world_size)
    check_same_on_all_ranks(cfg, arch, questions, held_out, parallel)
    log, saved = open_log(cfg, parallel)

    def where_apart(bound: float) -> str:
        weights.push_clean()
        return learner.first_differing_layer(engine, probe, bound)

    tripwires = Tripwires(cfg, log.say, where_apart)
    model = model_megatron.build(arch, parallel, dtype=rollout.DTYPES[cfg.model.dtype], recompute=cfg.model.recompute)
    weights_hf.load(model, arch, parallel, cfg.model.path)
    heartbeat.beat("loading the base weights")
    adapters = lora_megatron.attach(model, cfg.lora, parallel, cfg.train.seed)
    stop_tokens = data_gsm8k.stop_token_ids(cfg.model.path, tokenizer)
    pad_token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_tokens)
    learner = Learner(cfg, arch, parallel, model, adapters, pad_token)
    first_step = 0
    if saved:
        learner.restore(saved.tensors, saved.state)
        tripwires.state(saved.step, adapter_weights.not_restored(saved, *learner.state(), parallel))
        first_step, saved = saved.step, None  # closes its files: a checkpoint that is removed must give its space back
    tripwires.state(
        first_step, adapter_weights.differing(adapter_weights.everything(model, arch, adapters, parallel), parallel)
    )
    engine = rollout.open_engine(cfg, arch, parallel.device, stop_tokens, pad_token)
    engine.beat = heartbeat.go_on  # a rank that decodes does not stand still
    weights = WeightSync(engine, model, arch, parallel, cfg)
    heartbeat.beat("the first push of the whole model")
    probe = held_out[0].prompt
    if cfg.rollout.expert_parallel:
        weights.check_start(probe)
    score = scorer(cfg, tokenizer)
    introduce(log, cfg, parallel, adapters, questions, held_out)
    if first_step == 0:
        log_evaluation(log, 0, engine, held_out, score, cfg, parallel, heartbeat)

    norm, most, reserved = None, (), frozenset(question.question for question in held_out)
    for step in range(first_step, cfg.train.steps):
        clock = Clock(heartbeat, step, parallel.device)
        # 1. Hand over the policy: W + (alpha / R) B A. Noise lives in the sampler's copy; the trainer never sees it.
        pushed = weights.push(step, probe)
        tripwires.after_push(step, weights.checksums(pushed["sync/checksum"]), norm)
        clock.lap("sync")
        # 2. Sample and score G completions for each of P questions; both depend on (seed, step) alone.
        asked = questions.pick(step, cfg.rollout.prompts_per_step)
        tripwires.asked(step, [question.question for question in asked], len(questions), reserved)
        keyed = {"seed": cfg.train.seed, "step": step, "routed_experts": cfg.replay.mode == "r3"}
        batch, completions = rollout.sample(engine, asked, score, cfg.rollout, parallel, **keyed)
        clock.lap("generate")
        # 3. Compare within the group.
        if cfg.reward.permute:
            batch.rewards = permuted(batch.rewards, derive_seed(cfg.train.seed, "permute", step))
        advantages = grpo.group_advantages(batch.rewards, cfg.loss.advantage)  # (P, G)
        # 4. Update the adapters, once for every prompts_per_update prompts.
        metrics = learner.update(batch, completions, advantages.flatten(), step, clock)
        # 5. Book-keeping.
        metrics = parallel.of_rank_0(rollout.metrics(batch) | metrics | pushed)
        norm = metrics["actor/grad_norm"]
        log.log_completions(step, shown_completions(completions, asked, batch, tokenizer, cfg))
        peak = parallel.largest(clock.device_peak())  # (GiB, phase) of the fullest rank; () on a CPU
        most = max(most, peak)
        log.log_step(step, metrics, clock.timing(sum(batch.lengths)) | runlog.device_memory(peak))
        tripwires.after_step(step, metrics, (batch.rewards.min().item(), batch.rewards.max().item()))
        tripwires.state(
            step + 1, adapter_weights.differing(adapter_weights.adapters(adapters, parallel), parallel, exact=False)
        )
        done = step + 1
        if done == cfg.train.steps or (cfg.eval.every and done % cfg.eval.every == 0):
            weights.push_clean()
            log_evaluation(log, done, engine, held_out, score, cfg, parallel, heartbeat)
        if done == cfg.train.steps or (cfg.train.checkpoint_every and done % cfg.train.checkpoint_every == 0):
            tripwires.state(
                done, adapter_weights.differing(adapter_weights.everything(model, arch, adapters, parallel), parallel)
            )
            tensors, counts = learner.state()
            checkpoint.save(log.run_dir, done, tensors, counts, cfg, writes=parallel.rank == 0)
            parallel.barrier()

    engine.close()
    if most:
        log.say(memory_plan.beside_plan(cfg, arch, parallel.world_size, parallel.device.type, *most))
    evaluations = log.evaluations()
    log.finish(evaluate.result_line(evaluations[0], evaluations[-1], cfg.data.source) if evaluations else "")


def permuted(rewards: Tensor, seed: int) -> Tensor:
    """The control experiment: the same rewards, dealt to the step's completions at random.  (P, G) -> (P, G)"""
    order = torch.randperm(rewards.numel(), generator=torch.Generator().manual_seed(seed))
    return rewards.flatten()[order].view_as(rewards)


# ------------------------------------------------------------------------------------------------ setting up


def check_inputs(cfg: Config, world_size: int) -> tuple:
    """Architecture, tokenizer, training and held-out questions; InputError for whatever cannot work, weights unread."""
    arch = hf_config.read(cfg.model.path)
    check_layout(cfg, arch, world_size)
    check_engine_layout(cfg, arch, world_size)
    rollout.check_engine(cfg, arch, world_size)
    if cfg.aqn.schedule != "off":
        aqn_targets.norm_targets(arch, cfg.aqn.targets, router=cfg.aqn.router)
    weights_hf.check(cfg.model.path, arch)
    tokenizer = data_gsm8k.load_tokenizer(cfg.model.path)
    check_answers(cfg)
    questions, held_out = (data_gsm8k.load(cfg, split, tokenizer) for split in ("train", "test"))
    for key, count, part, kind in (
        ("rollout.prompts_per_step", cfg.rollout.prompts_per_step, questions, "training"),
        ("eval.num_questions", cfg.eval.num_questions, held_out, "held-out"),
    ):
        if count > len(part):
            raise InputError(f"{key}: {count} exceeds the {len(part)} {kind} questions")
    shared = {question.question for question in questions}.intersection(question.question for question in held_out)
    if shared and cfg.checks.held_out == "stop":
        raise InputError(
            f"data: {len(shared)} held-out questions are training questions as well, for example {min(shared)[:60]!r}; "
            "needed: none, or checks.held_out=warn"
        )
    used = data_gsm8k.stop_token_ids(cfg.model.path, tokenizer)
    largest = max(used.union(*(question.prompt for part in (questions, held_out) for question in part)))
    if largest >= arch.vocab_size:
        raise InputError(
            f"model.path: prompts or stop tokens of {cfg.model.path} use token {largest}, beyond its vocabulary of "
            f"{arch.vocab_size}; needed: the model's own tokenizer and generation_config.json"
        )
    return arch, tokenizer, questions, held_out


def check_same_on_all_ranks(cfg: Config, arch: Architecture, questions, held_out, parallel: Parallel) -> None:
    """InputError, on all ranks, unless all have read the same: each reads its own node's files, and plans by them."""
    parallel.refuse_unequal({
        "the configuration": to_yaml(cfg),
        "config.json of model.path": repr(arch),
        "the training questions as prompts": repr([(question.prompt, question.gold) for question in questions]),
        "the held-out questions as prompts": repr([(question.prompt, question.gold) for question in held_out]),
    })  # fmt: skip


def check_answers(cfg: Config) -> None:
    """InputError unless every gold answer scores 1.0 under the chosen reward: else all advantages would be noise."""
    for split, kind in (("train", "training"), ("test", "held-out")):
        method, asks = cfg.reward.method, reward_gsm8k.BOXED in cfg.data.instruction
        answers = [reward_gsm8k.in_form(answer, method, asks) for _, answer in data_gsm8k.read(cfg, split)[0]]
        wrong = [a for a in answers if reward_gsm8k.score(a, reward_gsm8k.gold_answer(a), method) != 1.0]
        if wrong:
            form = f", or an instruction that asks for {reward_gsm8k.BOX_FORM}" * (method == "base_acc" and not asks)
            raise InputError(
                f"reward.method: {method} gives {len(wrong)} of {len(answers)} gold {kind} answers less than 1.0, the "
                f"first being {wrong[0][-60:]!r}; needed: a method that fits the data's answers{form}"
            )


def open_log(cfg: Config, parallel: Parallel) -> tuple[runlog.RunLog, checkpoint.Checkpoint | None]:
    """The run's log, and the checkpoint to go on from. Rank 0 chooses; all ranks read the same folder."""
    choice: list[str | None] = [None]
    if parallel.rank == 0 and cfg.train.resume != "never":
        found = checkpoint_to_resume(cfg)
        choice = [str(found.path) if found else None]
    dist.broadcast_object_list(choice)
    if choice[0] is None:
        return runlog.open_run(cfg, parallel.world_size, parallel.rank), None
    # Rank 0 has verified it on its own node, another node's first rank does it there.
    path, verified = Path(choice[0]), parallel.rank == 0 or os.environ.get("LOCAL_RANK", "0") != "0"
    saved = checkpoint.load(path, verified=verified)
    parallel.refuse_unequal({f"{path}/checksums.json": repr(saved.checksums)})
    parallel.barrier()  # rank 0 must not cut the run's files before all ranks have a checkpoint to go on from
    log = runlog.open_run(cfg, parallel.world_size, parallel.rank, resume=saved.path.parent.parent)
    log.rewind(saved.step)
    return log, saved


def checkpoint_to_resume(cfg: Config) -> checkpoint.Checkpoint | None:
    """What train.resume goes on with, its checksums held; None for a new run.

    InputError if the named run has no good checkpoint, or one of another configuration, or if the run's model,
    tokenizer or data have changed since.
    """
    if cfg.train.resume == "never":
        return None
    if cfg.train.resume == "auto":
        saved = checkpoint.find_resumable(cfg)
    elif (saved := checkpoint.latest(Path(cfg.train.resume))) is None:
        found = f"{cfg.train.resume} holds no usable checkpoint"
        raise InputError(f"train.resume: {found}; needed: auto, never, or a run's folder")
    if saved is None:
        return None
    checkpoint.check_resume(saved, cfg)
    run, how = saved.path.parent.parent, "train.resume=never for a new run, or train.changed_inputs=accept to go on"
    for line in run_record.refuse_changed_inputs(run, cfg, cfg.train.changed_inputs == "accept", how):
        print(f"note: train.changed_inputs: accepted: {line}", flush=True)
    return saved


def scorer(cfg: Config, tokenizer):
    """(question, completion) -> reward, and whether an answer was found. Text is cut at the first stop token."""

    def score(question, completion) -> tuple[float, bool]:
        tokens = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
        text = tokenizer.decode(tokens)
        method = cfg.reward.method
        return reward_gsm8k.score(text, question.gold, method), reward_gsm8k.parsable(text, method)

    return score


# ------------------------------------------------------------------------------------------------ telling


def introduce(log: runlog.RunLog, cfg: Config, parallel: Parallel, adapters, questions, held_out) -> None:
    """What this run is, before its first step: folder, layout, data, adapters, and the batch equation."""
    p, r, o = parallel, cfg.rollout, cfg.optim
    updates = r.prompts_per_step // o.prompts_per_update
    description = lora_megatron.describe(adapters, parallel)
    log.say(
        f"run folder: {log.run_dir}\n"
        f"layout: {p.world_size} ranks = tensor {p.tensor} x data {p.data}"
        f" = expert_tensor {p.expert_tensor} x expert {p.expert} x expert_data {p.expert_data}\n"
        f"train: {questions.description}\nheld out: {held_out.description}\n"
        f"{description}\n"
        f"a step: {r.prompts_per_step} prompts x {r.group_size} = {r.prompts_per_step * r.group_size} sequences, "
        f"{updates} update{'s' * (updates > 1)} of {o.prompts_per_update} prompts x {r.group_size}"
    )


def log_evaluation(
    log: runlog.RunLog, step: int, engine, held_out, score, cfg: Config, parallel: Parallel, heartbeat: Heartbeat
) -> None:
    """Evaluate the policy that the engine holds, after ``step`` steps."""
    summary, outcomes = evaluate.evaluate(engine, held_out, score, cfg.eval, cfg.rollout, parallel, heartbeat.beat)
    log.log_eval(step, summary, outcomes)
    log.say(f"held-out accuracy after {step} steps: {evaluate.headline(summary)}")


def shown_completions(completions, asked, batch: Rollout, tokenizer, cfg: Config) -> list[dict]:
    """The first few completions of rank 0's first question, as text."""
    rows = []
    for j, answer in enumerate(completions[0][: cfg.train.completions_logged] if completions else []):
        text = tokenizer.decode(answer.tokens)
        reward = batch.rewards[0, j].item()
        shown = {"question": asked[0].question, "gold": asked[0].gold, "completion": text, "reward": reward}
        rows.append(shown | {"tokens": len(answer.tokens)})
    return rows


# ------------------------------------------------------------------------------------------------ the command


def check_only(cfg: Config, ranks: int) -> tuple | None:
    """All that can be refused without other ranks, and what was read for it.

    None for a tiny model that is yet to be made: it is checked by its config.
    """
    devices.resolve(cfg.device)
    check_writable("train.out_dir", Path(cfg.train.out_dir))
    if cfg.tiny_model is not None and not tiny_model.exists(cfg):
        check_writable("model.path", Path(cfg.model.path))
        arch, _ = hf_config.planned(cfg)
        check_layout(cfg, arch, ranks)
        check_engine_layout(cfg, arch, ranks)
        check_answers(cfg)
        return None
    return check_inputs(cfg, ranks)


def check_writable(key: str, folder: Path) -> None:
    """InputError unless ``folder`` is or can be made a folder to write in; nothing is made."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{key}: {folder}: {nearest} is not a folder that can be written; needed: one that can")


def run(cfg: Config) -> None:
    """Train in the world that torchrun opened, or alone."""
    heartbeat = Heartbeat(parallel_setup.check_launch(), cfg.train.stall_seconds)  # before anything that can wait
    try:
        parallel_setup.start_device(cfg)
        heartbeat.beat("the start of the device")
        inputs = check_only(cfg, parallel_setup.launched_world_size())
        doctor.quick(cfg)
        heartbeat.beat("the checks of the input")
        with parallel_setup.open_world(cfg) as device:
            if cfg.tiny_model is not None:
                tiny_model.make(cfg, device, heartbeat.beat)
            parallel = parallel_setup.open_layout(cfg, device)
            heartbeat.beat("the meeting of all ranks")
            train(cfg, parallel, heartbeat, inputs)
    finally:
        heartbeat.stop()


def main(arguments: list[str]) -> int:
    """Exit code 0; 2: input that cannot be used, one line; 3: a tripwire, its cause; 1: anything else, a traceback."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", help="YAML file, e.g. configs/tiny_cpu.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--check", action="store_true", help="check the input and stop")
    parser.add_argument("--ranks", type=int, help="with --check: how many the run will have")
    args = parser.parse_intermixed_args(arguments)
    rank = 0
    try:
        rank = parallel_setup.launched_rank()
        notes: list[str] = []
        cfg = load_config(args.config, args.overrides, notes)
        if rank == 0:
            print("".join(f"note: {note}\n" for note in notes), end="", flush=True)
        if args.ranks is not None and not (args.check and 1 <= args.ranks <= MOST_RANKS):
            raise InputError(f"--ranks: found {args.ranks}; needed: 1 or more, and --check: torchrun starts the ranks")
        if args.check:
            check_only(cfg, args.ranks or parallel_setup.launched_world_size())
            checkpoint_to_resume(cfg)
        else:
            run(cfg)
    except InputError as error:
        parallel_setup.report(rank, f"error: {one_line(error)}")
        return 2
    except (Tripped, aqn.AqnError) as error:
        parallel_setup.report(rank, f"stopped: {error}")
        return 3
    except Exception as error:
        if isinstance(error, OSError) and error.filename:  # a file or folder of the user's
            parallel_setup.report(rank, f"error: {one_line(error)}")
            return 2
        lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("onnection", "peer"))
        found = f"another rank ended, and its message says why ({error})" if lost else traceback.format_exc()
        parallel_setup.report(rank, found, late=lost)
        return 1
    return 0


if __name__ == "__main__":
    parallel_setup.run_command(main, sys.argv[1:])
