"""Compares every operator of hardware/kernels.py, forward and backward, in bf16 and fp32, with its formula in fp64.

    torchrun --nproc_per_node=N preflight.py --operators CONFIG [section.key=value ...] [--json FILE]

It also times the operators. The sizes are those that a rank has in a full micro-batch, with CONFIG's model and layout.
Each rank checks its device; the formula runs on the CPU. All inputs are numbers that bf16 can represent, so both dtypes
have the same exact answer. The error of an answer is rms(found - exact) / rms(exact) of the worst row. For attention it
is the error of the worst head; short rows are joined until they have enough numbers. The tolerance is

    roundings x u(dtype) + (sqrt(n) + INSIDE) x u(fp32)

u is half of the dtype's epsilon. ``roundings`` counts the roundings to the dtype on the longest path to the answer, and
INSIDE the other roundings to fp32. n is the number of terms of the longest sum, which is computed in fp32. The formula
holds for independent random numbers: their sums and the rounding errors of these sums both grow with sqrt(n).
With Qwen3-30B-A3B, a rank needs 3 GiB of main memory and one core for a minute to compute the exact answers.
E is the number of local experts, N of their rows together, T of tokens per row, and R the LoRA rank. h is the hidden
size, w the expert width, and d the head size.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checks import launched
from facts.architectures import Architecture
from facts.seeds import derive_seed
from hardware import device as devices
from hardware import kernels, quantisation
from hardware.quantisation import Packed
from inputs import hf_config
from inputs.rules import refuse_first, trainer_problems
from knobs import Config
from model import packing
from parallel_setup import Parallel
from plan import grid, memory

INSIDE = 8  # fp32 roundings in a fused operator outside of its sum: squares and means; an exp or rsqrt counts as two
BLOCK = 64  # at least this many numbers are compared together: a few could all be small by chance, with a large error
FP32 = ("probs", "factors")  # inputs that stay in fp32, whatever the dtype of the others
REPEATS = 3  # timed runs, after the run that is compared


class Case(NamedTuple):
    """One use of an operator: its inputs, its formula, and the rounding error that it may have."""

    name: str
    operator: Callable[..., Tensor]  # of hardware/kernels.py
    formula: Callable[..., Tensor]  # the same computation in fp64
    inputs: dict[str, Tensor]  # on the CPU; fp32 tensors are cast to the dtype, except those of FP32
    trained: tuple[str, ...]  # inputs whose gradients the training uses
    roundings: tuple[int, int]  # roundings to the dtype, forward and backward
    sums: tuple[int, int]  # terms of the longest sum, forward and backward
    block: int = 1  # number of trailing axes that are compared together: 1 for a row, 2 for a head of attention


# ------------------------------------------------------------------------------------------------ formulas


def grouped_formula(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    return torch.cat([block @ w for block, w in zip(x.split(tokens_per_expert.tolist()), weight, strict=True)])


def rms_norm_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention_formula(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, *, scale: float) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf).softmax(-1) @ value


def swiglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * gate.sigmoid() * up


def rotary_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


# ------------------------------------------------------------------------------------------------ cases


def rounded(x: Tensor) -> Tensor:
    """Return the nearest numbers that bf16 can represent, in fp32."""
    return x.bfloat16().float()


def cases(
    arch: Architecture,
    layout: grid.RankGrid,
    *,
    tokens: int,
    row_tokens: int,
    lora_rank: int,
    quantised: bool,
    seed: int,
) -> list[Case]:
    """Return a case for each operator that a rank uses in a micro-batch.

    ``tokens`` is the number of tokens in the micro-batch, ``row_tokens`` that in the longest row, and ``lora_rank`` the
    LoRA rank for routed experts. If ``quantised``, the frozen experts are int4. ``seed`` decides the values of the
    inputs, not their sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    h, d = arch.hidden_size, arch.head_dim
    T = min(tokens, -(-row_tokens // layout.tensor) * layout.tensor)
    own_tokens, rows = tokens // layout.tensor, tokens // T
    heads, kv_heads = arch.num_heads // layout.tensor, max(1, arch.num_kv_heads // layout.tensor)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return rounded(torch.randn(shape, generator=generator) * std)

    def norm(name: str, *shape: int) -> Case:
        inputs = {"x": normal(*shape), "weight": rounded(1 + normal(shape[-1], std=0.1))}
        eps = arch.rms_norm_eps
        return Case(
            name, lambda x, weight: kernels.rms_norm(x, weight, eps),
            lambda x, weight: rms_norm_formula(x, weight, eps), inputs, ("x",), (2, 3), (shape[-1],) * 2,
        )  # fmt: skip

    angles = torch.arange(T)[:, None] / arch.rope_theta ** (torch.arange(0, d, 2) / d)
    angles = torch.cat([angles, angles], -1)[:, None, None]  # (T, 1, 1, d)
    turned = {"x": normal(T, rows, heads, d), "cos": rounded(angles.cos()), "sin": rounded(angles.sin())}
    qkv = {"query": normal(1, heads, T, d), "key": normal(1, kv_heads, T, d), "value": normal(1, kv_heads, T, d)}
    # A packed row: its first quarter is the shared prompt, and the other tokens belong to it alone.
    own, keys = T - T // 4, -(-T // packing.KEYS) * packing.KEYS
    packed = {
        "query": normal(1, heads, own, d),
        "key": normal(1, kv_heads, keys, d),
        "value": normal(1, kv_heads, keys, d),
    }
    hidden = torch.arange(keys) > T // 4 + torch.arange(own)[:, None]  # (own, keys)

    def own_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        """Compute attention as model/packing.py does: per sequence on a GPU in 16 bits, otherwise with a mask."""
        if not kernels.takes_sequences(query):
            return kernels.masked_attention(query, key, value, kernels.attention_mask(hidden), scale=d**-0.5)
        query, key, value = (x[0, :, :T].transpose(0, 1) for x in (query, key, value))
        sequences = kernels.sequences([own], [T], query.device)
        return kernels.sequence_attention(query, key, value, sequences, scale=d**-0.5).transpose(0, 1)[None]

    dense = arch.shared_expert_ffn_size or arch.dense_ffn_size  # width of the MLPs with plain swiglu
    gate_up = {"gate_up": normal(tokens, 2 * max(1, dense // layout.tensor))}
    # The operators are looked up in hardware/kernels.py when they are called, so that a test can replace them.
    dense_cases = [
        norm("rms_norm (hidden)", own_tokens, h),
        Case("rotary", lambda *x: kernels.rotary(*x), rotary_formula, turned, ("x",), (3, 3), (1, 1)),
        Case("causal_attention", lambda *x: kernels.causal_attention(*x, scale=d**-0.5),
             lambda q, k, v: attention_formula(q, k, v, torch.ones(T, T).triu(1).bool(), scale=d**-0.5),
             qkv, tuple(qkv), (2, 5), (T + d, T + d), block=2),
        Case("masked_attention",
             lambda q, k, v, hidden: kernels.masked_attention(q, k, v, kernels.attention_mask(hidden), scale=d**-0.5),
             lambda *x: attention_formula(*x, scale=d**-0.5), packed | {"hidden": hidden[None, None]}, tuple(packed),
             (2, 5), (T + d, T + d), block=2),
        Case("sequence_attention", own_attention,
             lambda *x: attention_formula(*x, scale=d**-0.5), packed | {"hidden": hidden[None, None]}, tuple(packed),
             (2, 5), (T + d, T + d), block=2),
        Case("swiglu", lambda *x: kernels.swiglu(*x), swiglu_formula, gate_up, ("gate_up",), (2, 3), (1, 1)),
    ]  # fmt: skip
    if arch.qk_norm:
        each = (heads, d) if arch.qk_norm == "head" else (heads * d,)
        dense_cases.insert(1, norm("rms_norm (heads)", tokens, *each))
    if not any(arch.moe_layers):
        return dense_cases

    w, E = arch.expert_ffn_size, arch.num_experts // layout.expert
    N, R = own_tokens * arch.experts_per_token, lora_rank
    # If there are several experts, the first one gets no row, as can happen in training.
    rows_of = [N * 2 * e // (E * (E - 1)) for e in range(E - 1)] if E > 1 else []
    rows_of.append(N - sum(rows_of))
    counts = torch.tensor(rows_of)

    def grouped(name: str, in_size: int, out_size: int, trained: tuple[str, ...]) -> Case:
        inputs = {"x": normal(N, in_size), "weight": normal(E, in_size, out_size, std=in_size**-0.5), "counts": counts}
        longest = max(out_size, *rows_of) if "weight" in trained else out_size
        return Case(f"grouped_mm ({name})", lambda *x: kernels.grouped_mm(*x), grouped_formula, inputs, trained, (1, 1),
                    (in_size, longest))  # fmt: skip

    def experts(name: str, in_size: int, out_size: int) -> Case:
        """Return the case for the product with the frozen experts."""
        if not quantised:
            return grouped(name, in_size, out_size, ("x",))
        packed = quantisation.empty((E, out_size, in_size), torch.bfloat16)
        for e in range(E):
            packed[e].copy_(quantisation.quantise(normal(out_size, in_size, std=in_size**-0.5).bfloat16()))
        exact = Packed(packed.codes, packed.scales.float()).dequantised().transpose(1, 2)
        inputs = {"x": normal(N, in_size), "weight": exact, "counts": counts}
        inputs |= {"codes": packed.codes, "scales": packed.scales}
        return Case(
            f"quantised_grouped_mm ({name})",
            lambda x, _, counts, codes, scales: kernels.quantised_grouped_mm(x, Packed(codes, scales), counts),
            lambda *x: grouped_formula(*x[:3]), inputs, ("x",), (2, 2), (in_size, out_size),
        )  # fmt: skip

    k = arch.experts_per_token
    chosen = torch.rand(own_tokens, arch.num_experts, generator=generator).topk(k).indices.sort().values
    pairs = chosen.flatten().argsort(stable=True)
    sorted_rows = {"rows": pairs // k, "inverse": pairs.argsort().view_as(chosen)}
    weighted = {"gate_up": normal(N, 2 * w), "probs": rounded(normal(N).sigmoid())}
    return [
        *dense_cases,
        Case("weighted_swiglu", lambda *x: kernels.weighted_swiglu(*x),
             lambda gate_up, probs: swiglu_formula(gate_up) * probs[:, None], weighted, tuple(weighted), (4, 4),
             (1, w)),
        Case("dispatch_rows", lambda x, *order: kernels.dispatch_rows(x, kernels.Order(*order)),
             lambda x, rows, _: x[rows], {"x": normal(own_tokens, h), **sorted_rows}, ("x",), (1, 1), (1, k)),
        Case("combine_rows", lambda x, *order: kernels.combine_rows(x, kernels.Order(*order)),
             lambda x, _, inverse: x[inverse].sum(1), {"x": normal(len(pairs), h), **sorted_rows}, ("x",), (1, 1),
             (k, 1)),
        Case("take", lambda *x: kernels.take(*x), lambda x, places: x[places],
             {"x": normal(own_tokens, h), "places": sorted_rows["rows"]}, ("x",), (1, 1), (1, k)),
        experts("fc1", h, 2 * w),
        experts("fc2", w, h),
        grouped("LoRA A", h, R, ("x", "weight")),
        grouped("LoRA B", R, 2 * w, ("x", "weight")),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ comparing


def check_operator(case: Case, device: torch.device, rank: int) -> list[dict]:
    """Run ``case`` on ``device`` in each dtype, and return a row of the table for each dtype.

    ``milliseconds`` is the time of the forward and the backward pass together.
    """
    exact = _inputs(case, torch.device("cpu"), torch.float64)
    answer = case.formula(*exact.values())
    grad = torch.randn(answer.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    true = [answer.detach(), *torch.autograd.grad(answer, [exact[name] for name in case.trained], grad.double())]
    size = " ".join("x".join(map(str, x.shape)) for x in case.inputs.values() if x.is_floating_point())
    results = []
    for name, dtype in devices.DTYPES.items():
        inputs = _inputs(case, device, dtype)
        wanted, given = [inputs[key] for key in case.trained], grad.to(device, dtype)

        def run(inputs=inputs, wanted=wanted, given=given) -> list[Tensor]:
            out = case.operator(*inputs.values())
            return [out.detach(), *torch.autograd.grad(out, wanted, given)]

        allowed = [tolerance(dtype, *both) for both in zip(case.roundings, case.sums, strict=True)]
        gaps, taken, error = [math.inf, math.inf], math.inf, ""
        try:
            gaps = [relative_error(x.cpu(), y, case.block) for x, y in zip(run(), true, strict=True)]
            taken = devices.median_milliseconds(run, device, REPEATS)
        except RuntimeError as refusal:  # a kernel that refuses this input must not hide the other operators
            error = str(refusal).strip().partition("\n")[0]
        row: dict[str, Any] = {
            "operator": case.name, "size": size, "dtype": name, "forward": gaps[0], "forward_tolerance": allowed[0],
            "backward": max(gaps[1:]), "backward_tolerance": allowed[1], "milliseconds": taken, "rank": rank,
            "error": error,
        }  # fmt: skip
        row["wrong"] = [way for way in ("forward", "backward") if not row[way] <= row[f"{way}_tolerance"]]
        results.append(row)
    return results


def tolerance(dtype: torch.dtype, roundings: int, terms: int) -> float:
    """Return the largest error that rounding can explain. The formula is in this file's docstring; n is ``terms``."""
    u, u_fp32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    return roundings * u + (math.sqrt(terms) + INSIDE) * u_fp32


def relative_error(found: Tensor, true: Tensor, block: int = 1) -> float:
    """Return rms(found - true) / rms(true) of the worst block, or inf if a number is not finite.

    A block consists of the ``block`` trailing axes, or of more axes if it would have fewer than BLOCK numbers.
    """
    if not true.numel():
        return 0.0  # there are no rows
    while block < true.dim() and math.prod(true.shape[-block:]) < BLOCK:
        block += 1
    axes = tuple(range(-block, 0))
    error, size = ((x.square().mean(axes)).sqrt() for x in (found.double() - true, true))
    share = torch.where(error == 0, 0.0, error / size)  # the gradient of an expert without rows is exactly 0
    return share.nan_to_num(math.inf).max().item()


def _inputs(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    def cast(name: str, x: Tensor) -> Tensor:
        kept = x.dtype not in devices.DTYPES.values() or (name in FP32 and dtype != torch.float64)
        return x.to(device, x.dtype if kept else dtype).requires_grad_(name in case.trained)

    return {name: cast(name, x) for name, x in case.inputs.items()}


# ------------------------------------------------------------------------------------------------ the command


def summary(results: list[dict]) -> list[dict]:
    """Return one row for each operator and dtype, with the worst values of all ranks."""
    by_case: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for row in results:
        by_case[row["operator"], row["dtype"]].append(row)
    return [worst(rows) for rows in by_case.values()]


def worst(rows: list[dict]) -> dict:
    """Combine the rows of one operator and dtype: the largest errors, the longest time, and all faults."""
    largest = {part: max(row[part] for row in rows) for part in ("forward", "backward", "milliseconds")}
    return {key: value for key, value in rows[0].items() if key != "rank"} | largest | {
        "wrong": sorted({way for row in rows for way in row["wrong"]}, reverse=True),
        "wrong_ranks": [row["rank"] for row in rows if row["wrong"]],
        "error": next((row["error"] for row in rows if row["error"]), ""),
    }  # fmt: skip


def as_text(table: list[dict]) -> str:
    """Return the table as text, with each error next to its tolerance."""
    lines = [f"{'operator':<27} {'dtype':<5} {'forward':>8} {'at most':>8} {'backward':>8} {'at most':>8} {'ms':>9}"]
    for row in table:
        numbers = [f"{row[p]:>8.1e}" for p in ("forward", "forward_tolerance", "backward", "backward_tolerance")]
        line = f"{row['operator']:<27} {row['dtype']:<5} {' '.join(numbers)} {row['milliseconds']:>9.2f}"
        if row["wrong"]:
            line += f"  WRONG: {' and '.join(row['wrong'])}, on rank {', '.join(map(str, row['wrong_ranks']))}"
            line += f" ({row['error']})" * bool(row["error"])
        lines.append(line)
    return "\n".join(lines)


def cases_of(cfg: Config, arch: Architecture, ranks: int, seed: int) -> list[Case]:
    """Return the cases that each of ``ranks`` ranks checks for ``cfg``."""
    layout = grid.of(cfg.parallel, cfg.rollout, ranks)
    return cases(
        arch,
        layout,
        tokens=memory.micro_batch_tokens(cfg.optim, layout, cfg.rollout.group_size, cfg.row_tokens),
        row_tokens=cfg.row_tokens,
        lora_rank=cfg.lora.rank_of(is_expert=True),
        quantised=cfg.model.quantisation != "none",
        seed=seed,
    )


def answer(cfg: Config, parallel: Parallel) -> launched.Answer:
    """Check the operators on every rank, and return the combined answer."""
    arch, _ = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)
    todo = cases_of(cfg, arch, parallel.world_size, derive_seed(cfg.train.seed, "operators", parallel.rank))
    mine = [result for case in todo for result in check_operator(case, parallel.device, parallel.rank)]
    table = summary([result for one in parallel.gather_objects(mine) for result in one])
    return launched.Answer(not any(row["wrong"] for row in table), as_text(table), table)


def main(arguments: list[str]) -> int:
    """Run the command. Exit code 0: all operators are right. 1: one is wrong; see the table. 2: unusable input."""
    return launched.ask(
        launched.command_line("--operators", __doc__).parse_intermixed_args(arguments),
        lambda cfg, ranks: refuse_first(
            trainer_problems(cfg, hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0], ranks)
        ),
        answer,
    )
