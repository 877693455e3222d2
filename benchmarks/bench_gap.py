"""Where the gap between the log-probs of sampler and trainer comes from: one cause at a time is switched on.

    python benchmarks/bench_gap.py [--engine embedded] [--shape tiny] [--json]

Sampler and trainer on one rank, one thread, with a policy some updates away from its base: the embedded sampler, and
vLLM where it is installed. gap_pair.py says what the shapes tiny and real are, gap_causes.py what each row changes.
`none` is the code as it is. gap: mean difference of the log-probs, nats a token, with a 95 % interval over the
completions; equal: share of the tokens whose log-probs are equal to the last bit; largest: of one token. Each other row
changes one thing, so its difference from `none` is what that cause adds or takes away. Rows with long prompts are
compared with each other.
planted: the gap with an error of the same kind in the trainer, and the lower end of its interval. It shows that the
row would see such an error. The errors are: numbers of 2 or 4 significant bits, a row that sees another row, the routes
of the token before, and (of the sampler) prompts that were computed with other weights.
The last rows are the control of `none`: the update of one expert does not reach the sampler. In the very last row every
update is as large as its matrix. found: the expert whose tokens have the largest median gap, if it is more than twice
that of the other tokens, as in preflight.py --layers, with both medians.
In vLLM these cannot be switched: its attention kernel (a CPU has one), the precision of its router, and the order in
which its fused kernel weights and sums the experts. They are switched in the trainer instead.
All rows take about 10 minutes of one thread, those of the tiny shape half a minute.
"""

import gc
import importlib.util
import sys

import cases
import gap_causes
import torch
from gap_causes import Cause
from gap_pair import Pair, Row
from torch import Tensor

import parallel_setup
from config import load_config
from parallel_setup import Parallel
from plan import layers_check

ENGINES, SHAPES, DTYPES = ("embedded", "vllm"), ("tiny", "real"), ("fp32", "bf16")
LOST = 1  # the expert of the control
LEAST_GAP = 1e-5  # nats; a smaller median of an expert's tokens is rounding of fp32


def differences(rows: list[Row], logp: list[Tensor]) -> list[Tensor]:
    """|trainer's - sampler's log-prob| of the tokens of each row."""
    return [(mine - torch.tensor(one.logp)).abs() for mine, (_, one) in zip(logp, rows, strict=True)]


def figures(rows: list[Row], logp: list[Tensor]) -> dict:
    """Gap with its interval, share of equal tokens, largest gap."""
    by_row = differences(rows, logp)
    gaps, means = torch.cat(by_row).double(), torch.stack([gaps.double().mean() for gaps in by_row])
    half = 1.96 * (means.std() / len(means) ** 0.5).item()
    return {
        "gap": gaps.mean().item(),
        "low": gaps.mean().item() - half,
        "high": gaps.mean().item() + half,
        "equal": (gaps == 0).double().mean().item(),
        "largest": gaps.max().item(),
    }


def found(pair: Pair, rows: list[Row], logp: list[Tensor]) -> str:
    """The expert whose tokens stand out by the rule of preflight.py --layers, with both medians; "" if none does."""
    gaps = torch.cat(differences(rows, logp))
    routes = torch.cat([torch.from_numpy(one.routed_experts)[-len(one.tokens) :].long() for _, one in rows])
    worst = layers_check.by_expert(gaps[None], torch.ones(1, len(gaps), dtype=torch.bool), routes[None], pair.arch)[0]
    if worst["gap"] <= max(layers_check.FACTOR * worst["others"], LEAST_GAP):
        return ""
    return "expert {expert} of layer {layer} ({gap:.2g}, others {others:.2g})".format(**worst)


def measured(pair: Pair, cause: Cause, rows: list[Row]) -> dict:
    """The figures under a cause, of new rows if it changes the sampler, otherwise of ``rows``."""
    with cause.context:
        rows = cause.sampler() if cause.sampler else rows
        return figures(rows, (cause.trainer or pair.trainer)(rows))


def lost_update(pair: Pair) -> tuple[list[Row], list[Tensor]]:
    """Rows that are sampled without the update of expert LOST, and the trainer's log-probs of their tokens."""
    pair.push(lost=LOST)
    rows = pair.sample()
    pair.push()
    return rows, pair.trainer(rows)


def table(pair: Pair, at: dict) -> list[dict]:
    """All rows of one engine, shape and dtype. ``at``: their first columns."""
    rows, lines = pair.sample(), []
    planted = {name: measured(pair, error, rows) for name, error in gap_causes.planted(pair).items()}

    def add(cause: str, gap: dict, error: str = "", expert: str = "") -> None:
        of = planted.get(error, {"gap": "", "low": ""})
        print(*at.values(), f"{cause}: {gap['gap']:.2g} {expert}", file=sys.stderr, flush=True)
        lines.append(at | {"cause": cause} | gap | {"planted": of["gap"], "at least": of["low"], "found": expert})

    logp = pair.trainer(rows)
    add("none", figures(rows, logp), expert=found(pair, rows, logp))
    for name, cause in gap_causes.causes(pair).items():
        add(name, measured(pair, cause, rows), cause.planted)
    lost = lost_update(pair)
    add("an expert's update lost", figures(*lost), expert=found(pair, *lost))
    pair.enlarge()
    lost = lost_update(pair)
    add("an expert's large update lost", figures(*lost), expert=found(pair, *lost))
    return lines


def measure(engines: list[str], shapes: list[str], parallel: Parallel) -> list[dict]:
    """The rows of all dtypes. An engine is closed before the next one starts."""
    rows = []
    for at in ({"engine": e, "shape": s, "dtype": d} for e in engines for s in shapes for d in DTYPES):
        pair = Pair(**at, parallel=parallel)
        rows += table(pair, at)
        pair.sampler.close()
        del pair
        gc.collect()
    return rows


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--engine", choices=ENGINES, help="only this sampler")
    parser.add_argument("--shape", choices=SHAPES, help="only this shape")
    args = parser.parse_args()
    engines = [args.engine] if args.engine else list(ENGINES)
    if "vllm" in engines and importlib.util.find_spec("vllm") is None:
        if args.engine:
            parser.error("--engine vllm: vllm is not installed; needed: requirements/cpu-vllm.txt")
        print("vllm is not installed (requirements/cpu-vllm.txt): its rows are left out", file=sys.stderr)
        engines.remove("vllm")
    torch.set_num_threads(1)
    cfg = load_config(cases.ROOT / "configs" / "tiny_cpu.yaml", ["parallel.expert=1"])
    with parallel_setup.open_world(cfg) as device:
        parallel = parallel_setup.open_layout(cfg.parallel, device)
        rows = measure(engines, [args.shape] if args.shape else list(SHAPES), parallel)
    cases.report(args, __doc__, rows, {"causes": rows})


if __name__ == "__main__":
    main()
