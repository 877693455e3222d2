"""How many shapes the attention kernel gets: rollout.plan and packing.shapes over the lengths of the run's questions.

Nothing is sampled: the lengths of completions are drawn from the distribution that the plan assumes. On an H100 torch
prefers cuDNN, which plans a kernel anew for each shape: github.com/modelscope/FunASR, issue 3704, measured 0.44 s of a
forward and 0.55 s of a backward pass, on a B200.
"""

import math
import random
from collections import Counter
from pathlib import Path

import data_gsm8k
import packing
import rollout
from architecture import Rounding
from inputs.files import InputError, one_line
from knobs import Config
from plan.grid import RankGrid
from plan.roofline import completion_length

STEPS = 10
MEAN_COMPLETION = 300  # tokens; at most half of rollout.max_new_tokens
CHARACTERS = 2.5  # of one token of a prompt, where there is no tokenizer; its chat template counts as tokens, too


def count(cfg: Config, layout: RankGrid, data_rank: int, rounding: Rounding | None) -> dict:
    """What one rank's attention gets in STEPS steps; or only a ``summary`` that says why nothing was counted.

    ``each_step``: different shapes in each step. ``calls``: of each shape in all steps; (P, T) of the call for the
    prompts of a micro-batch, (r, N, K) of the calls for own tokens.
    """
    try:
        prompts, known = _prompt_lengths(cfg)
    except InputError as error:
        return {"summary": f"not counted: {one_line(error)}"}
    group, longest, draw = cfg.rollout.group_size, cfg.rollout.max_new_tokens, random.Random(cfg.train.seed)
    mean, update = min(MEAN_COMPLETION, longest / 2), cfg.optim.prompts_per_update * group
    steps: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(STEPS)]
    for step in steps:
        asked = [length for length in draw.choices(prompts, k=cfg.rollout.prompts_per_step) for _ in range(group)]
        rows = [length + completion_length(draw.random(), mean, longest) for length in asked]
        shares = [
            share[data_rank]
            for first in range(0, len(rows), update)
            for share in rollout.plan(
                {s: rows[s] for s in range(first, first + update)}, layout.data, cfg.optim.tokens_per_micro_batch,
                layout.tensor, group, dict(enumerate(asked)),
            )
        ]  # fmt: skip
        for share in filter(None, shares):
            own = {row: rows[sequence] - asked[sequence] - 1 for row, sequence in enumerate(share)}
            of_prompts = [asked[place * group] for place in {sequence // group for sequence in share}]
            whole, calls, _ = packing.shapes(own, of_prompts, max(rows[sequence] for sequence in share), rounding)
            step.update([whole, *calls])
    of_steps = sorted(sum(steps, Counter()).items())
    return {
        "summary": f"{min(map(len, steps))} to {max(map(len, steps))} in each of {STEPS} steps, {len(of_steps)} in all,"
        f" those for prompts included; assumed: completions of {mean:g} tokens, at most {longest:,}; prompts: {known}",
        "each_step": [*map(len, steps)],
        "calls": of_steps,
    }


def _prompt_lengths(cfg: Config) -> tuple[list[int], str]:
    """Tokens of the prompt of each training question, and how they are known."""
    if Path(cfg.model.path).is_dir():
        questions = data_gsm8k.load(cfg.data, "train", data_gsm8k.load_tokenizer(cfg.model.path), cfg.train.seed)
        return [len(question.prompt) for question in questions], "as the model's tokenizer makes them"
    fixed = cfg.data.system + cfg.data.instruction
    lengths = [math.ceil(len(row.question + fixed) / CHARACTERS) for row in data_gsm8k.read(cfg.data, "train")[0]]
    return lengths, f"a token for {CHARACTERS} characters"
