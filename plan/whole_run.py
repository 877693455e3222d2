"""Estimates the hours of a whole run, and the disk space of its checkpoints and completions, from the plan of one step.

The estimate is rough. It is the number of steps times the expected seconds of a step, plus the prefill and the decode
steps of all evaluations. It does not count the time to load the model, warm-start a tiny model, or write checkpoints.
Nothing here imports torch.
"""

from typing import NamedTuple

from facts.architectures import Architecture
from facts.devices import three_digits
from plan.memory import GIB
from plan.parameters import checkpoint_bytes
from plan.search import Verdict

# Bytes of a compressed completion: per token, and in addition per row. English text with 4 letters per token takes 1.64
# bytes per token.
TOKEN_BYTES, ROW_BYTES = 2, 100
# The plan reads no questions. It assumes this number for every file, and says so if the file may not be GSM8K's.
# A smaller eval.num_questions replaces it.
GSM8K_HELD_OUT = 1319


class WholeRun(NamedTuple):
    """The seconds that the steps and evaluations of a run take, and the bytes that the run leaves on disk."""

    steps: float
    evaluations: float
    num_evaluations: int
    num_questions: int  # of each set in one evaluation
    kept_bytes: int  # bytes of the checkpoints that stay at the end
    completion_bytes: float  # bytes of the folder completions/, if every completion has the maximum length
    num_sets: int = 1
    assumed: bool = False  # whether num_questions is GSM8K_HELD_OUT for another file

    @property
    def hours(self) -> float:
        return (self.steps + self.evaluations) / 3600


def whole_run(verdict: Verdict, arch: Architecture) -> WholeRun:
    """Return the estimate for a layout that fits.

    In an evaluation, each question gets a greedy answer, then eval.samples sampled answers. A replica processes
    eval.batch_size questions at once. The estimate counts the longest completion for every wave of rows. It assumes
    that a decode step and a prompt take as many seconds as in a training step.
    """
    cfg = verdict.cfg
    times = verdict.times
    sets = 1 + len(cfg.eval.sets)
    questions = cfg.data.num_test if cfg.data.source == "arithmetic" else GSM8K_HELD_OUT
    questions = min(cfg.eval.num_questions or questions, questions)
    other_files = cfg.data.source == "file" or bool(cfg.eval.sets)
    a_set = 0.0
    for answers in filter(None, (1, cfg.eval.samples)):
        rows_at_once = max(1, min(cfg.eval.batch_size * answers, verdict.memory.cached_rows))
        waves = -(-questions * answers // (verdict.layout.replicas * rows_at_once))
        a_set += waves * cfg.rollout.max_new_tokens * times.phases["decode"] / times.decode_steps
        a_set += questions * times.phases["prefill"] / cfg.rollout.prompts_per_step
    evaluations = 1 + _times_due(cfg.eval.every, cfg.train.steps)  # one before the first step
    rounds = cfg.train.steps * (1 + cfg.rollout.dynamic_rounds)
    completions = rounds * min(cfg.train.questions_logged, cfg.rollout.prompts_per_step) * cfg.rollout.group_size
    if cfg.train.questions_logged:
        completions += evaluations * sets * questions * (1 + cfg.eval.samples)
    kept = min(cfg.train.keep_last, _times_due(cfg.train.checkpoint_every, cfg.train.steps))
    return WholeRun(
        steps=cfg.train.steps * times.total,
        evaluations=evaluations * sets * a_set,
        num_evaluations=evaluations,
        num_questions=questions,
        kept_bytes=kept * checkpoint_bytes(arch, cfg.lora, cfg.rollout.staleness),
        completion_bytes=completions * (ROW_BYTES + TOKEN_BYTES * cfg.rollout.max_new_tokens),
        num_sets=sets,
        assumed=other_files and questions == GSM8K_HELD_OUT,
    )


def _times_due(every: int, steps: int) -> int:
    """Return the number of times that an action is due, every ``every`` steps and after the last step.

    If ``every`` is 0, the action is due only after the last step.
    """
    return -(-steps // (every or steps))


def sentence(run: WholeRun, steps: int) -> str:
    """Return the line `estimated run: 3.12 h = 77 steps 2.5 h + 5 evaluations of 1,319 questions 0.588 h; ...`."""
    hours = [three_digits(seconds / 3600) for seconds in (run.steps, run.evaluations)]
    questions = f"{run.num_sets} x {run.num_questions:,}" if run.num_sets > 1 else f"{run.num_questions:,}"
    assumed = " (assumed, because the plan reads no questions; eval.num_questions=N sets another number)" * run.assumed
    return (
        f"estimated run: {three_digits(run.hours)} h = {steps} steps {hours[0]} h"
        f" + {run.num_evaluations} evaluations of {questions} questions {hours[1]} h{assumed}"
        f"; {three_digits(run.kept_bytes / GIB)} GiB of checkpoints stay, and at most "
        f"{three_digits(run.completion_bytes / GIB)} GiB of completions"
    )
