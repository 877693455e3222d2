"""Every heavy operation against what this machine can do: matrix products in GFLOP/s, the rest in GB/s.

    python benchmarks/bench_ops.py [--rounds 20] [--json]

One thread, fp32, minima of CPU seconds, because other processes can only make an operation slower. The ceilings are
measured in the same run: a large matrix product, and a copy that is larger than the caches. The sizes are those of a
training step of the tiny model: 4,286 packed tokens of width 128 with 2 of 8 experts each, or decoding of 64 rows.
"""

import time
import timeit
from collections.abc import Callable
from types import SimpleNamespace

import cases
import torch
import torch.nn.functional as F

import kernels
import model_megatron
import packing
from engines.torch_sampler import Rule, pick

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K, VOCABULARY, RANK = 4286, 128, 128, 8, 2, 512, 32
PROMPTS, GROUP, PROMPT_TOKENS, OWN_TOKENS = 8, 8, 33, 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def best(work: Callable[[], object], rounds: int) -> float:
    """The smallest CPU seconds of ``rounds`` calls, after one call that warms up."""
    work()
    return max(min(timeit.repeat(work, number=1, repeat=rounds, timer=time.process_time)), 1e-9)


def peak_rates(rounds: int, dtype: torch.dtype = torch.float32, numbers: int = 2**24) -> tuple[float, float]:
    """Operations a second of a large matrix product in ``dtype``, and bytes a second of a copy of so many numbers."""
    square, large = torch.randn(1024, 1024).to(dtype), torch.randn(numbers)
    target = torch.empty_like(large)
    product, copy = best(lambda: square @ square, rounds), best(lambda: target.copy_(large), rounds)
    return 2 * 1024**3 / product, 2 * large.nbytes / copy


def both_passes(work: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], object]:
    """Forward and backward pass of ``work`` on inputs that need gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    grad = torch.randn_like(work(*leaves))
    return lambda: torch.autograd.grad(work(*leaves), leaves, grad)


def products() -> dict[str, tuple[Callable, float]]:
    """Name -> (work, floating-point operations)."""
    rows, counts = TOKENS * TOP_K, torch.full((EXPERTS,), TOKENS * TOP_K // EXPERTS)
    counts[0] += rows - int(counts.sum())
    x, weight = torch.randn(rows, HIDDEN), torch.randn(EXPERTS, HIDDEN, 2 * WIDTH)
    thin, wide = torch.randn(EXPERTS, HIDDEN, RANK), torch.randn(EXPERTS, RANK, 2 * WIDTH)
    few, few_counts = torch.randn(128, HIDDEN), torch.full((EXPERTS,), 128 // EXPERTS)
    flop = 2 * rows * HIDDEN * 2 * WIDTH
    hidden, head = torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    chosen, alone = torch.randint(VOCABULARY, (TOKENS,)), SimpleNamespace(tensor=1, tensor_rank=0)
    prompts = torch.arange(PROMPTS)[:, None].expand(-1, PROMPT_TOKENS).repeat_interleave(GROUP, 0)
    tokens = torch.cat([prompts, torch.zeros(PROMPTS * GROUP, OWN_TOKENS, dtype=torch.long)], 1)
    mask = torch.zeros(tokens.shape).index_fill_(1, torch.arange(PROMPT_TOKENS, tokens.shape[1]), 1)
    packed = packing.pack(tokens, mask, 1)
    line = len(packed.source)
    query = torch.randn(line, HEADS, HEAD_DIM)
    key, value = torch.randn(2, line, KV_HEADS, HEAD_DIM)
    pairs = PROMPTS * PROMPT_TOKENS**2 / 2 + len(tokens) * OWN_TOKENS * (PROMPT_TOKENS + OWN_TOKENS / 2)
    head_flop = 2.0 * TOKENS * HIDDEN * VOCABULARY
    attention = 4 * pairs * HEADS * HEAD_DIM  # query x key and weights x value, for the pairs that the mask allows

    def log_probs(hidden: torch.Tensor) -> torch.Tensor:
        return model_megatron._VocabularyLogProbs.apply(hidden, head, chosen, 1.0, alone)[0]

    def low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kernels.grouped_mm(kernels.grouped_mm(x, a, counts), b, counts)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return packed.attention(*inputs, HEAD_DIM**-0.5)

    return {
        "linear qkv": (lambda: F.linear(hidden, weight[0].t()), 2 * TOKENS * HIDDEN * 2 * WIDTH),
        "experts forward": (lambda: kernels.grouped_mm(x, weight, counts), flop),
        "experts both passes": (both_passes(lambda x: kernels.grouped_mm(x, weight, counts), x), 2 * flop),
        "expert LoRA both passes": (both_passes(low_rank, x, thin, wide), 6 * rows * RANK * (HIDDEN + 2 * WIDTH)),
        "experts, decoding": (lambda: kernels.grouped_mm(few, weight, few_counts), 2 * 128 * HIDDEN * 2 * WIDTH),
        "attention forward": (lambda: attend(query, key, value), attention),
        "attention both passes": (
            both_passes(attend, query, key, value),
            3.5 * attention,
        ),  # the backward recomputes the scores
        "log-probs forward": (lambda: log_probs(hidden), head_flop),
        "log-probs both passes": (both_passes(log_probs, hidden), 3 * head_flop),
    }


def passes() -> dict[str, tuple[Callable, float]]:
    """Name -> (work, bytes that are read and written)."""
    x, weight = torch.randn(TOKENS, HIDDEN), torch.ones(HIDDEN)
    gate_up, probs = torch.randn(TOKENS * TOP_K, 2 * WIDTH), torch.rand(TOKENS * TOP_K)
    logits, uniform, rule = torch.randn(64, VOCABULARY), torch.rand(64, 1), Rule(64, 1.0, 1.0, 0)
    return {
        "RMSNorm forward": (lambda: kernels.rms_norm(x, weight, 1e-6), 8 * x.numel()),
        "RMSNorm both passes": (both_passes(lambda x: kernels.rms_norm(x, weight, 1e-6), x), 20 * x.numel()),
        "SwiGLU forward": (lambda: kernels.weighted_swiglu(gate_up, probs), 6 * gate_up.numel()),
        "SwiGLU both passes": (both_passes(lambda x: kernels.weighted_swiglu(x, probs), gate_up), 16 * gate_up.numel()),
        "picking 64 tokens": (lambda: pick(logits, uniform, rule), 4 * logits.numel()),
    }


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of every operation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ceilings = {unit: rate / 1e9 for unit, rate in zip(("GFLOP/s", "GB/s"), peak_rates(args.rounds), strict=True)}
    rows = []
    for unit, operations in (("GFLOP/s", products()), ("GB/s", passes())):
        for name, (work, amount) in operations.items():
            seconds = best(work, args.rounds)
            rate = amount / seconds / 1e9
            rows.append({"operation": name, "ms": 1e3 * seconds, "rate": rate, "unit": unit,
                         "of the ceiling": rate / ceilings[unit]})  # fmt: skip
    cases.report(
        args, __doc__, rows, {"ceilings": ceilings, "operations": rows},
        above=f"ceilings: {', '.join(f'{rate:.3g} {unit}' for unit, rate in ceilings.items())}\n",
    )  # fmt: skip


if __name__ == "__main__":
    main()
