"""A learning curve against TRL's GRPOTrainer: same model, questions, reward and settings, other code throughout.

    python benchmarks/bench_curve.py [--seeds 0 1 2 3 4 5] [--json] [--trl-python PATH]

The condition is bench_experts of configs/sweeps/bench.yaml: LoRA on the experts, one update a step, no KL penalty. Its
adapters have the same form in PEFT. The curve is the mean reward of a step, which is the accuracy of the policy on 64
training questions, because sampler and trainer are one policy. Both sides draw their own initial LoRA factors and
samples. The difference is that of the means along the run, paired by seed, with a t interval. TRL runs in .venv-bench
(bench_step.py makes it) and takes the advantage's epsilon 1e-4 instead of 1e-6.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_cases as cases
import bench_floor
import bench_step
import numpy as np

import data_gsm8k
from config import load_config
from inputs.environment import ON_CPU
from inputs.files import read_file
from knobs import Config
from lab import comparisons

SWEEP, VARIANT = cases.ROOT / "configs" / "sweeps" / "bench.yaml", "bench_experts"
LAST = 10  # steps of the second column


def theirs(cfg: Config, python: Path, work: Path) -> dict:
    """Train with TRL.  -> its curve"""
    tokenizer = data_gsm8k.load_tokenizer(cfg.model.path)
    questions = data_gsm8k.load(cfg.data, "train", tokenizer, cfg.train.seed)
    asked = [q for step in range(cfg.train.steps) for q in questions.pick(step, cfg.rollout.prompts_per_step)]
    settings = {
        "model": cfg.model.path, "questions": [(q.question, q.gold) for q in asked], "seed": cfg.train.seed,
        "steps": cfg.train.steps, "prompts": cfg.rollout.prompts_per_step, "group": cfg.rollout.group_size,
        "new_tokens": cfg.rollout.max_new_tokens, "lr": cfg.optim.lr, "warmup_steps": cfg.optim.warmup_steps,
        "rank": cfg.lora.rank, "alpha": cfg.lora.alpha,
    }  # fmt: skip
    (work / "settings.json").write_text(json.dumps(settings))
    command = [str(python), str(bench_step.HERE / "trl_side.py"), str(work / "settings.json"), str(work / "curve.json")]
    subprocess.run(command, cwd=cases.ROOT, env=os.environ | ON_CPU, stdout=sys.stderr, check=True)
    return json.loads((work / "curve.json").read_text())


def compared(name: str, differences: list[float]) -> dict:
    """A difference with its interval, in points."""
    found = comparisons.effect(np.array(differences)[:, None])
    low, high = found.interval()
    return {
        "outcome": name,
        "TRL - ours, points": 100 * float(found.mean),
        "low": 100 * float(low),
        "high": 100 * float(high),
    }


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(6)))
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL; .venv-bench if not given")
    args = parser.parse_args()
    python = args.trl_python or bench_step.trl_python()
    sweep, curves = read_file(SWEEP), {}
    for seed in args.seeds:
        overrides = [*sweep["variants"][VARIANT]["overrides"], *(text.format(seed=seed) for text in sweep["each_seed"])]
        mine = [step["reward/mean"] for step in bench_floor.train(sweep["config"], overrides)]
        with tempfile.TemporaryDirectory() as temporary:
            cfg = load_config(cases.ROOT / sweep["config"], overrides)
            curves[seed] = {"ours": mine, "trl": theirs(cfg, python, Path(temporary))}
        a, b = mine, curves[seed]["trl"]["reward"]
        print(f"seed {seed}: ours {100 * np.mean(a):.1f}, TRL {100 * np.mean(b):.1f}", file=sys.stderr, flush=True)
    rows = [
        compared(name, [np.mean(c["trl"]["reward"][part]) - np.mean(c["ours"][part]) for c in curves.values()])
        for name, part in (("reward, all steps", slice(None)), (f"reward, last {LAST} steps", slice(-LAST, None)))
    ]
    cases.report(args, __doc__, rows, {"curves": curves})


if __name__ == "__main__":
    main()
