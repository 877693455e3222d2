"""The gap between the log-probs of sampler and trainer, for each sampler and dtype.

    python benchmarks/bench_gap.py [CONFIG] [section.key=value ...] [--steps 4] [--vllm] [--json]

Each row is a training for a few steps, of CONFIG or of the benchmarks' tiny model, in one process with one thread. gap:
mean difference of the log-probs of sampled tokens (rollout/logp_gap_mean), in nats; largest: of one token. The first
step does not count, because the adapters do nothing before the first update.
"""

import statistics
import tempfile
from pathlib import Path

import bench_cases as cases
import bench_floor

from config import to_yaml

TINY = {
    "lora__rank": 64,  # x 128 inputs: with a bf16 matrix of at most 4,096 elements, the kernel depends on the rows
    "loss__entropy_coef": 0.1,  # the gradient, because a model with random weights has no right answer
    "optim__lr": 0.02,  # Adam's first update makes every element of B as large as this
}


def main() -> None:
    parser = bench_floor.parser(__doc__, None, 4)
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM (requirements/cpu-vllm.txt)")
    args = parser.parse_intermixed_args()
    rows = []
    for engine, dtype in [(e, d) for e in ("torch", "vllm")[: 1 + args.vllm] for d in ("fp32", "bf16")]:
        with tempfile.TemporaryDirectory() as folder:
            tiny = Path(folder) / "tiny.yaml"
            tiny.write_text(to_yaml(cases.config(cases.CASES["all_r32_64"], Path(folder), args.steps, **TINY)))
            chosen = [*args.overrides, f"rollout.engine={engine}", f"model.dtype={dtype}", "checks.logp_gap=warn"]
            chosen += [*bench_floor.SETTINGS, f"train.steps={args.steps}"]
            steps = bench_floor.train(args.config or str(tiny), chosen)[1:]
        gap = statistics.fmean(step["rollout/logp_gap_mean"] for step in steps)
        largest = max(step["rollout/logp_gap_max"] for step in steps)
        rows.append({"engine": engine, "dtype": dtype, "gap": gap, "largest": largest})
    cases.report(args, __doc__, rows, {"gaps": rows})


if __name__ == "__main__":
    main()
