"""How long a whole run takes, and how much disk space its checkpoints need, by the plan of one step.

This is rough: steps times the expected seconds of a step, evaluations by its prefill and decode steps, and writing of
checkpoints. Loading the model and its warm start are not counted. Nothing here imports torch.
"""

import contextlib
from typing import NamedTuple

from architecture import Architecture
from inputs import hf_config
from inputs.files import InputError
from knobs import Config
from plan import grid
from plan.hardware import HARDWARE, three_digits
from plan.memory import GIB
from plan.parameters import checkpoint_bytes
from plan.search import Setting, Verdict, judge

GSM8K_HELD_OUT = 1319  # questions; assumed of every file, and printed. eval.num_questions sets it
DISK = 1e9  # bytes per second to which a checkpoint is written: a guess


class WholeRun(NamedTuple):
    """Seconds and numbers of a run."""

    steps: float  # seconds, as those of evaluations and checkpoints
    evaluations: float
    checkpoints: float
    num_evaluations: int
    num_questions: int  # of one evaluation
    num_checkpoints: int  # that are written
    kept_bytes: int  # of the checkpoints that stay at the end

    @property
    def hours(self) -> float:
        return (self.steps + self.evaluations + self.checkpoints) / 3600


def whole_run(verdict: Verdict, arch: Architecture) -> WholeRun:
    """The run of a layout that fits.

    In an evaluation, each question of a set gets a greedy answer, then eval.samples others; a replica takes
    eval.batch_size questions at once. Every wave of rows counts with the longest completion; a decode step and a prompt
    count with their seconds in a training step.
    """
    cfg = verdict.cfg
    times = verdict.times
    sampling = verdict.samplers or verdict
    sets = 1 + len(cfg.eval.sets)
    questions = cfg.data.num_test if cfg.data.source == "arithmetic" else GSM8K_HELD_OUT
    questions = min(cfg.eval.num_questions or questions, questions)
    a_set = 0.0
    for answers in filter(None, (1, cfg.eval.samples)):
        rows_at_once = max(1, min(cfg.eval.batch_size * answers, sampling.memory.cached_rows))
        waves = -(-questions * answers // (sampling.layout.replicas * rows_at_once))
        a_set += waves * cfg.rollout.max_new_tokens * times.phases["decode"] / times.decode_steps
        a_set += questions * times.phases["prefill"] / cfg.rollout.prompts_per_step
    evaluations = 1 + _times_due(cfg.eval.every, cfg.train.steps)  # one before the first step
    saved = _times_due(cfg.train.checkpoint_every, cfg.train.steps)
    size = checkpoint_bytes(cfg, arch)
    return WholeRun(
        steps=cfg.train.steps * times.total,
        evaluations=evaluations * sets * a_set,
        checkpoints=saved * size / DISK,
        num_evaluations=evaluations,
        num_questions=sets * questions,
        num_checkpoints=saved,
        kept_bytes=min(cfg.train.keep_last, saved) * size,
    )


def _times_due(every: int, steps: int) -> int:
    """How often something is due every so many steps (0: never), and after the last one."""
    return -(-steps // (every or steps))


def of_config(cfg: Config, ranks: int) -> WholeRun | None:
    """The run of a configuration, each answer at its longest; None without a plan.

    There is none on a CPU, for a model of unknown sizes, or for a layout that is refused.
    """
    device = grid.device_of(cfg)
    with contextlib.suppress(InputError):
        arch, _ = hf_config.planned(cfg)
        setting = Setting(arch, device, HARDWARE[device], 16, cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens)
        verdict = judge(cfg, ranks, setting)
        if device != "cpu" and not verdict.reasons:
            return whole_run(verdict, arch)
    return None


def sentence(run: WholeRun, steps: int) -> str:
    """`estimated run: 3.12 h = 77 steps 2.5 h + 5 evaluations of 1,319 questions 0.588 h + ...`, one line."""

    def time(seconds: float) -> str:
        return f"{three_digits(seconds / 3600)} h" if seconds >= 360 else f"{three_digits(seconds)} s"

    return (
        f"estimated run: {time(3600 * run.hours)} = {steps} steps {time(run.steps)}"
        f" + {run.num_evaluations} evaluations of {run.num_questions:,} questions {time(run.evaluations)}"
        f" + {run.num_checkpoints} checkpoints {time(run.checkpoints)}, of which {three_digits(run.kept_bytes / GIB)} "
        "GiB stay"
    )
