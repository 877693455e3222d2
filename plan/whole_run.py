"""How long a whole run takes, and how much disk space its checkpoints need, by the plan of one step.

Estimates by the roofline of plan/roofline.py, never measurements. Loading the model and its warm start are not counted.
Nothing here imports torch.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

from inputs import hf_config
from inputs.files import LINES_MIB, InputError, read_bytes
from inputs.hf_config import ELEMENT_BYTES
from inputs.paths import Paths, listed
from knobs import Config
from plan import grid
from plan.hardware import three_digits
from plan.memory import GIB
from plan.parameters import checkpoint_bytes
from plan.roofline import Rows, decode_causes, decode_parts, decode_step, forward_flops
from plan.search import Setting, Verdict, judge

GSM8K_HELD_OUT = 1319  # questions; assumed of a file that is not there
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


def whole_run(verdict: Verdict, setting: Setting) -> WholeRun:
    """The run of a layout that fits."""
    cfg, train = verdict.cfg, verdict.cfg.train
    questions = [_held_out(cfg, paths) for paths in (cfg.data.test_path, *cfg.eval.sets.values())]
    evaluations = 1 + _times_due(cfg.eval.every, train.steps)  # one before the first step
    saved, size = _times_due(train.checkpoint_every, train.steps), checkpoint_bytes(cfg, setting.arch)
    return WholeRun(
        train.steps * verdict.times.total,
        evaluations * sum(evaluation_seconds(verdict, setting, one) for one in questions),
        saved * size / DISK,
        evaluations,
        sum(questions),
        saved,
        min(train.keep_last, saved) * size,
    )


def _held_out(cfg: Config, paths: Paths) -> int:
    """Questions of a set in an evaluation. Of a file that is not .jsonl, or not there, it is GSM8K_HELD_OUT."""
    if cfg.data.source == "arithmetic" and not paths:
        there = cfg.data.num_test
    elif all(path.endswith(".jsonl") and Path(path).is_file() for path in listed(paths)):
        there = sum(read_bytes(Path(path), LINES_MIB).count(b"\n") for path in listed(paths))
    else:
        there = GSM8K_HELD_OUT
    return min(cfg.eval.num_questions or there, there)


def _times_due(every: int, steps: int) -> int:
    """How often something is due every so many steps (0: never), and after the last one."""
    return -(-steps // (every or steps))


def evaluation_seconds(verdict: Verdict, setting: Setting, questions: int) -> float:
    """Seconds in which ``questions`` get a greedy answer and eval.samples others, eval.batch_size of a replica at once.

    The lengths are those of the training's answers.
    """
    sampling, hardware = verdict.samplers or verdict, setting.hardware
    cfg, layout = sampling.cfg, sampling.layout
    prompt, completion, longest = setting.prompt_tokens, setting.completion_tokens, cfg.rollout.max_new_tokens
    own, seconds = -(-questions // layout.replicas), 0.0
    for samples in filter(None, (1, cfg.eval.samples)):
        prefill = forward_flops(setting.arch, Rows(questions, prompt, 0))
        seconds += sum(prefill.values()) / (layout.ranks * hardware.flops * hardware.training_share)
        for start in range(0, own, cfg.eval.batch_size):
            rows = min(cfg.eval.batch_size, own - start) * samples
            waves = -(-rows // max(1, sampling.memory.cached_rows))
            running = -(-rows // waves) * layout.replicas
            for steps, share, tokens in decode_parts(completion, longest, waves, refills=cfg.rollout.kind.refills):
                part = decode_step(
                    setting.arch, hardware, ranks=layout.ranks, tensor=layout.engine_tensor,
                    expert=layout.engine_expert, element=ELEMENT_BYTES[cfg.model.dtype],
                    away=(layout.away("rollout"), layout.away_of(layout.engine_expert)),
                    sequences=max(1, running * share), context=prompt + tokens,
                )  # fmt: skip
                seconds += steps * sum(decode_causes(setting.arch, part, hardware, cfg.rollout.enforce_eager).values())
    return seconds


def of_config(cfg: Config, ranks: int) -> WholeRun | None:
    """The run of a configuration, each answer at its longest; None without a plan.

    There is none on a CPU, for a model of unknown sizes, or for a layout that is refused.
    """
    device = grid.device_of(cfg)
    with contextlib.suppress(InputError):
        arch, _ = hf_config.planned(cfg)
        setting = Setting(arch, device, 16, None, cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens)
        verdict = judge(cfg, ranks, setting)
        if device != "cpu" and not verdict.reasons:
            return whole_run(verdict, setting)
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
