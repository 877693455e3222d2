"""GRPO with LoRA on a mixture-of-experts model. The function `train` is the whole method, step by step.

    torchrun --nproc_per_node=16 train_grpo.py configs/qwen3.yaml [section.key=value ...]
    python train_grpo.py CONFIG [section.key=value ...] --check [--ranks N]     check the input and stop

GRPO: arXiv 2402.03300. The reference policy of the KL penalty is the same model with its LoRA adapters switched off.
P questions, G completions of each question. Questions, samples and noise depend on (seed, step) alone; with dynamic
sampling, further rounds also depend on the outcomes of the rounds before.
"""

import contextlib
import sys
import traceback

# PYTHONSAFEPATH and `python -P` leave the folder of this file out.
sys.path.insert(0, __file__.rpartition("/")[0])

import runlog

if __name__ == "__main__":  # before the other imports, which take seconds
    runlog.end_on_signals()

import torch
from torch import Tensor

import grpo
import parallel_setup
import rollout
import startup
import tiny_model
from aqn import AqnError
from config import command_line, derive_seed, is_due, resolve_config
from inputs import check, functions
from inputs.files import MOST_RANKS, InputError, one_line
from inputs.question_files import alike
from inputs.scoring import Scorer
from knobs import Config
from lab import trackers
from parallel_setup import Parallel
from plan import doctor
from runlog import Heartbeat, RunLog
from sampling_ranks import Bridge
from tripwires import Tripped

STOPS = (Tripped, AqnError)  # a run that would be silently wrong


def train(
    cfg: Config,
    parallel: Parallel,
    heartbeat: Heartbeat,
    inputs: check.Inputs,
    bridge: Bridge | None = None,
) -> None:
    """Train for cfg.train.steps steps. ``inputs`` is what check.check_inputs returned.

    ``bridge`` leads to the ranks that sample, if they are not these ones (rollout.ranks).
    """
    run = startup.open_run(cfg, parallel, heartbeat, inputs, bridge)
    log, tripwires, learner = run.log, run.tripwires, run.learner
    questions, not_for_training = inputs.questions, inputs.not_for_training()
    if run.first_step == 0:
        run.evaluate(after_steps=0)
    peak = ()  # of the device memory in any step
    for step in range(run.first_step, cfg.train.steps):
        timer = run.start_step(step)

        # 1. Give the sampler the current policy, or that of rollout.staleness steps ago: W + (alpha / R) B A. Noise is
        # added to the sampler's copy only. It is on these ranks (sampling_ranks.Colocated), or on others (Apart).
        with timer.phase("sync"):
            run.sampler.push(step)

        # 2. Sample and score G completions for each of P questions.
        with timer.phase("generate"):
            sampled, pushed = run.sampler.sample(step)
            asked, batch = [alike(question.question) for question in sampled.all_asked], sampled.batch
            tripwires.asked(step, asked, len(questions), not_for_training)

        # 3. Compare each score with its group's.
        if cfg.reward.permute:
            batch.rewards = shuffled(batch.rewards, derive_seed(cfg.train.seed, "permute", step))
        advantages = grpo.group_advantages(batch.rewards, functions.advantage(cfg.loss.advantage))  # (P, G)

        # 4. Update the adapters on the clipped objective: one optimizer step for every prompts_per_update questions.
        updated = learner.update(batch, sampled.completions, advantages.flatten(), step, timer)

        # 5. Record, check, evaluate, save.
        # All ranks decide by the numbers of rank 0.
        metrics = parallel.gather_objects(rollout.metrics(sampled) | updated | pushed)[0]
        log.log_rows("completions.jsonl", step + 1, run.shown_completions(sampled.asked, batch, sampled.completions))
        log.log_rows("moe.jsonl", step + 1, [learner.router_load.by_layer])
        step_peak = max(parallel.gather_objects(timer.peak()))  # (GiB, phase) of the fullest rank; () on a CPU
        peak = max(peak, step_peak)
        timing = timer.timing(sampled.num_tokens) | run.sampler.seconds
        log.log_step(step + 1, metrics, timing | run.speed(sampled, timing) | startup.device_memory(step_peak))
        run.end_step(step)
        extremes = batch.rewards.min().item(), batch.rewards.max().item()
        tripwires.after_step(step, metrics, extremes, run.sampler.where_apart)
        tripwires.reference(step, learner.reference_gap)
        tripwires.state(step + 1, lambda: learner.policy.unequal(frozen=False))
        if is_due(step + 1, cfg.eval.every, cfg.train.steps):
            run.sampler.push_clean(step + 1)
            run.evaluate(after_steps=step + 1)
        if is_due(step + 1, cfg.train.checkpoint_every, cfg.train.steps):
            run.save(after_steps=step + 1)
    run.finish(peak)


def shuffled(rewards: Tensor, seed: int) -> Tensor:
    """The control experiment: the same rewards, shuffled over all completions of the step.  (P, G) -> (P, G)"""
    order = torch.randperm(rewards.numel(), generator=torch.Generator().manual_seed(seed))
    return rewards.flatten()[order].view_as(rewards)


# ------------------------------------------------------------------------------------------------ the command


def start(cfg: Config, is_command: bool = False) -> None:
    """Check the input, start the device, join the other ranks, and train. A command says how to continue it."""
    log = RunLog(cfg, parallel_setup.launched_rank())
    bridge = Bridge(cfg) if cfg.rollout.ranks else None
    heartbeat = Heartbeat(cfg.train.stall_seconds, log, bridge.note_progress if bridge else lambda: None)
    if is_command:
        runlog.end_on_signals(log.reached, log.note)
    scorer = Scorer(cfg.reward, heartbeat.beat)  # its processes begin before the device does
    try:
        parallel_setup.start_device(cfg)
        heartbeat.beat("the start of the device")
        ranks = parallel_setup.launched_world_size()
        inputs = check.check_inputs(cfg, ranks, scorer, heartbeat.beat)
        check.check_answers(cfg, scorer)
        doctor.quick(cfg)
        heartbeat.beat("the checks of the input")
        side, samples = (bridge.side, bridge.samples) if bridge else (None, False)
        with contextlib.ExitStack() as world:
            with heartbeat.waiting():
                device = world.enter_context(parallel_setup.open_world(cfg, side))
            if cfg.tiny_model is not None and not samples:
                tiny_model.make(cfg, device, heartbeat.beat)
            if bridge:
                with heartbeat.waiting():
                    bridge.open(heartbeat)
            parallel = parallel_setup.open_layout((side.cfg if side else cfg).parallel, device)
            heartbeat.beat("the meeting of all ranks")
            inputs = inputs or check.check_inputs(cfg, ranks, scorer, heartbeat.beat)  # of the tiny model, made now
            assert inputs
            if bridge and samples:
                startup.open_samplers(cfg, parallel, heartbeat, inputs, bridge).serve()
            else:
                train(cfg, parallel, heartbeat, inputs, bridge)
    except Exception as error:
        log.note(f"{'stopped' if isinstance(error, STOPS) else 'error'}: {one_line(error)}")
        raise
    finally:
        scorer.close()
        heartbeat.stop()
        log.close()


def main(arguments: list[str]) -> int:
    """Exit code 0: done; 2: input that cannot be used, in one line; 3: a tripwire's message; 1: any other error.

    A rank that stands still ends itself with 4 (runlog.Heartbeat); 130 and 143: ended by Ctrl-C or SIGTERM.
    """
    parser = command_line("train_grpo.py", __doc__)
    parser.add_argument("--check", action="store_true", help="check the input and stop")
    parser.add_argument("--ranks", type=int, help="with --check: the number of ranks of the run")
    args = parser.parse_intermixed_args(arguments)
    rank, trains = 0, False
    try:
        rank = parallel_setup.check_launch()
        cfg, notes = resolve_config(args.config, args.overrides)
        if rank == 0:
            print("".join(f"note: {note}\n" for note in notes), end="", flush=True)
            trackers.refuse_missing(cfg.train.trackers)
        if args.ranks is not None and not (args.check and 1 <= args.ranks <= MOST_RANKS):
            raise InputError(f"--ranks: found {args.ranks}; needed: 1 or more, and --check: torchrun starts the ranks")
        if args.check:
            doctor.quick(cfg)
            print(check.report(cfg, args.ranks or parallel_setup.launched_world_size()), flush=True)
        else:
            trains = True
            start(cfg, is_command=True)
    except STOPS as error:
        parallel_setup.report(rank, f"stopped: {error}")
        return 3
    except Exception as error:
        if isinstance(error, InputError) or (isinstance(error, OSError) and error.filename):  # the user's file
            cause = traceback.format_exc() if trains and not isinstance(error, InputError) else ""
            parallel_setup.report(rank, f"{cause}error: {one_line(error)}")
            return 2
        lost = parallel_setup.lost_others(error)
        hint = "perhaps another rank ended, and its message says why; the traceback of this one:\n" if lost else ""
        parallel_setup.report(rank, hint + traceback.format_exc(), late=lost)
        return 1
    return 0


if __name__ == "__main__":
    parallel_setup.run_command(main, sys.argv[1:])
