"""The phases of a training step beside the times of plan/roofline.py at the rates of this machine.

    python benchmarks/bench_floor.py [CONFIG] [section.key=value ...] [--steps 6] [--json]

CONFIG is configs/smol.yaml if it is not given. One process with one thread trains; the figures are medians of wall
seconds without the first step, so on a busy machine they include waiting. The rates are the best of two things that are
measured in CPU seconds: a large matrix product, and a copy larger than the caches. The roofline uses them in full, for
the mean completion of these steps and the mean prompt of all questions. Sampling has to compute the tokens with which
all prompts begin once in a step, so the roofline counts them once; the update has them once in each prompt.
"""

import argparse
import dataclasses
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import bench_cases as cases
import torch

import data_gsm8k
import device as devices
from config import load_config
from inputs import hf_config
from inputs.environment import ON_CPU
from inputs.files import BAD_INPUT, refused
from lab.run_folders import merged
from plan import grid, memory, roofline
from plan.hardware import HARDWARE, Hardware

PHASES = {  # of timing.jsonl -> those of plan/roofline.py
    "sync": ("sync",),
    "generate": ("prefill", "decode"),
    "update": ("update forward", "update backward", "optimizer"),
}
SETTINGS = (
    "train.checkpoint_every=0", "train.resume=never", "eval.num_questions=1", "eval.samples=0",
    "loss.skip_equal_groups=false",  # every step trains on all of its sequences
)  # fmt: skip


def best(work: Callable[[], object], rounds: int) -> float:
    """The smallest CPU seconds of ``rounds`` calls, after one call that warms up."""
    work()
    return max(min(timeit.repeat(work, number=1, repeat=rounds, timer=time.process_time)), 1e-9)


def measured_hardware(dtype: torch.dtype, rounds: int) -> Hardware:
    """A processor core with the rates of this one, all of which count. ``dtype``: of the matrix product."""
    square, large = torch.randn(1024, 1024).to(dtype), torch.randn(2**26)
    target = torch.empty_like(large)
    flops = 2 * 1024**3 / best(lambda: square @ square, rounds)
    bandwidth = 2 * large.nbytes / best(lambda: target.copy_(large), rounds)
    core = HARDWARE["cpu"]
    return dataclasses.replace(core, flops=flops, bandwidth=bandwidth, training_share=1, link_share=1, link=math.inf)


def train(config: str, overrides: list[str]) -> list[dict]:
    """The steps of a training in a folder that is deleted: metrics and times. Its errors end this program."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "train_grpo.py", config, *overrides, f"train.out_dir={out}"]
        if code := subprocess.run(command, cwd=cases.ROOT, stdout=sys.stderr, env=os.environ | ON_CPU).returncode:
            sys.exit(code)
        (run,) = (path.parent for path in Path(out).glob("*/finished.json"))
        rows = [row for row in merged(run) if "reward/mean" in row]
    return [{key: value for key, value in row.items() if key != "completions"} for row in rows]


def parser(about: str, config: str | None, steps: int) -> argparse.ArgumentParser:
    """The options of a benchmark that trains for a few steps, of which the first does not count."""
    found = cases.parser(about)
    found.add_argument("config", nargs="?", default=config, help="relative to the repository's folder")
    found.add_argument("overrides", nargs="*", metavar="section.key=value")
    found.add_argument("--steps", type=_two_or_more, default=steps, help="2 or more")
    return found


def _two_or_more(text: str) -> int:
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"found {text}; needed: 2 or more, because the first one does not count")
    return number


def main() -> int:
    args = parser(__doc__, "configs/smol.yaml", 6).parse_intermixed_args()
    torch.set_num_threads(1)
    try:
        overrides = [*SETTINGS, f"train.steps={args.steps}", *args.overrides]
        cfg = load_config(cases.ROOT / args.config, overrides)
    except BAD_INPUT as error:
        return refused(error)
    hardware = measured_hardware(devices.DTYPES[cfg.model.dtype], rounds=10)
    steps = train(args.config, overrides)[1:]
    arch = hf_config.read(cases.ROOT / cfg.model.path)
    tokenizer = data_gsm8k.load_tokenizer(cases.ROOT / cfg.model.path)
    questions = data_gsm8k.load(cfg.data, "train", tokenizer, cfg.train.seed)
    prompt = statistics.fmean(len(question.prompt) for question in questions)
    completion = statistics.fmean(step["response_length/mean"] for step in steps)
    longest = statistics.fmean(step["response_length/max"] for step in steps)
    layout = grid.of(cfg, 1)
    planned = memory.step_memory(cfg, arch, layout, "cpu", 2**40)
    least = roofline.step_times(cfg, arch, layout, hardware, planned, prompt, completion, longest)
    shared = len(os.path.commonprefix([question.prompt for question in questions]))
    again = roofline.forward_flops(arch, roofline.Rows(cfg.rollout.prompts_per_step - 1, shared, 0))
    least.causes["prefill"]["arithmetic"] -= (again["layers"] + again["attention"]) / hardware.flops
    rows = []
    for phase, parts in {**PHASES, "step": tuple(least.phases)}.items():
        seconds = statistics.median(step[f"timing/{phase}_s"] for step in steps)
        floor = sum(least.phases[part] for part in parts)
        rows.append({"phase": phase, "s": seconds, "roofline s": floor, "times the roofline": seconds / floor})
    rates = f"{hardware.flops / 1e9:.1f} GFLOP/s, {hardware.bandwidth / 1e9:.1f} GB/s, "
    rates += f"prompts of {prompt:.0f} tokens, {shared} of them common, "
    rates += f"completions of {completion:.0f}, the longest of {longest:.0f}"
    cases.report(args, __doc__, rows, {"flops": hardware.flops, "bandwidth": hardware.bandwidth, "steps": steps,
                                      "causes": least.causes}, above=f"{rates}\n")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
