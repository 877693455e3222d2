"""Every operator of kernels.py, forward and backward, in bf16 and fp32, against its formula in fp64 on the CPU; timed.

    torchrun --nproc_per_node=N preflight.py --operators CONFIG [section.key=value ...] [--json FILE]

The sizes are those of a rank of CONFIG's model and layout and of a full micro-batch; each rank checks its own device.
The inputs are numbers that bf16 holds, so both dtypes have the same exact answer. The error of an answer is
rms(found - exact) / rms(exact) of the worst row (of attention: head; of short rows: several). Its tolerance is
roundings x u(dtype) + (sqrt(n) + INSIDE) x u(fp32), where u is half of the dtype's epsilon, the roundings are those to
the dtype on the longest way to the answer, and n is the length of the longest sum, which is taken in fp32. It holds
for independent random numbers, whose sums grow as their rounding errors do, with sqrt(n).
At Qwen3-30B-A3B's sizes the exact answers take a minute of a core and 3 GiB of main memory a rank.
E local experts, N rows of all of them, h hidden size, w expert width, R LoRA rank, T tokens of a row, d head size.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import device as devices
import hf_config
import kernels
import parallel_setup
from config import derive_seed, load_config
from config_rules import check_layout
from hf_config import Architecture
from input_files import BAD_INPUT, one_line
from knobs import Config
from plan import grid
from plan import memory as memory_plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INSIDE = 8  # roundings in fp32 inside a fused operator besides its sum: squares, means, an exp or rsqrt counted as two
BLOCK = 64  # numbers that are compared as one, at least: of a few, all may be small by chance, and their error is not
REPEATS = 3  # timed, after the one that is compared


class Case(NamedTuple):
    """One use of an operator: what is computed, from what, and how much of it may be rounding."""

    name: str
    operator: Callable[..., Tensor]  # of kernels.py
    formula: Callable[..., Tensor]  # the same for fp64
    inputs: dict[str, Tensor]  # on the CPU; fp32 numbers are cast to the dtype, but for ``probs``, which stays fp32
    trained: tuple[str, ...]  # inputs whose gradients the training uses
    roundings: tuple[int, int]  # to the dtype, forward and backward
    sums: tuple[int, int]  # terms of the longest sum, forward and backward
    block: int = 1  # trailing axes of what is compared as one: a row, or of attention a head


class Result(NamedTuple):
    """What came of one case in one dtype on one rank."""

    operator: str
    size: str
    dtype: str
    forward: float
    forward_tolerance: float
    backward: float
    backward_tolerance: float
    milliseconds: float  # forward and backward
    rank: int
    error: str = ""  # why there is no answer

    @property
    def wrong(self) -> list[str]:
        """forward, backward: which of them is beyond its tolerance."""
        return [p for p in ("forward", "backward") if not getattr(self, p) <= getattr(self, f"{p}_tolerance")]


# ------------------------------------------------------------------------------------------------ formulas


def grouped_formula(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    return torch.cat([block @ w for block, w in zip(x.split(tokens_per_expert.tolist()), weight, strict=True)])


def rms_norm_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention_formula(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ value


def swiglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * gate.sigmoid() * up


def weighted_formula(gate_up: Tensor, probs: Tensor) -> Tensor:
    return swiglu_formula(gate_up) * probs[:, None]


def rotary_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    (cos_1, cos_2), (sin_1, sin_2) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat([first * cos_1 - second * sin_1, second * cos_2 + first * sin_2], -1)


# ------------------------------------------------------------------------------------------------ cases


def cases(cfg: Config, arch: Architecture, ranks: int, seed: int) -> list[Case]:
    """What a rank computes in a micro-batch; ``seed`` decides the numbers, not the sizes."""
    layout, generator = grid.of(cfg, ranks), torch.Generator().manual_seed(seed)
    h, d, tokens = arch.hidden_size, arch.head_dim, memory_plan.micro_batch_tokens(cfg, layout)
    T = min(tokens, -(-(cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens) // layout.tensor) * layout.tensor)
    own_tokens, rows = tokens // layout.tensor, tokens // T
    heads, kv_heads = arch.num_heads // layout.tensor, max(1, arch.num_kv_heads // layout.tensor)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).bfloat16().float()

    def norm(name: str, *shape: int) -> Case:
        inputs = {"x": normal(*shape), "weight": 1 + normal(shape[-1], std=0.1)}
        inputs["weight"] = inputs["weight"].bfloat16().float()
        eps = arch.rms_norm_eps
        return Case(
            name, lambda x, weight: kernels.rms_norm(x, weight, eps),
            lambda x, weight: rms_norm_formula(x, weight, eps), inputs, ("x",), (2, 3), (shape[-1],) * 2,
        )  # fmt: skip

    angles = torch.arange(T)[:, None] / arch.rope_theta ** (torch.arange(0, d, 2) / d)
    angles = torch.cat([angles, angles], -1)[:, None, None]  # (T, 1, 1, d)
    turn = {name: value.bfloat16().float() for name, value in (("cos", angles.cos()), ("sin", angles.sin()))}
    scale = d**-0.5
    qkv = {"query": normal(1, heads, T, d), "key": normal(1, kv_heads, T, d), "value": normal(1, kv_heads, T, d)}
    found = [
        norm("rms_norm (hidden)", own_tokens, h),
        *([norm("rms_norm (heads)", tokens, heads, d)] if arch.qk_norm else []),
        Case("rotary", lambda *x: kernels.rotary(*x), rotary_formula, {"x": normal(T, rows, heads, d), **turn},
             ("x",), (3, 3), (1, 1)),
        Case("causal_attention", lambda *x: kernels.causal_attention(*x, scale=scale),
             lambda *x: attention_formula(*x, scale=scale), qkv, tuple(qkv), (2, 5), (T + d, T + d), block=2),
    ]  # fmt: skip
    dense = arch.shared_expert_ffn_size or arch.dense_ffn_size  # of the layers or shared experts that use plain swiglu
    found.append(
        Case("swiglu", lambda *x: kernels.swiglu(*x), swiglu_formula,
             {"gate_up": normal(tokens, 2 * max(1, dense // layout.tensor))}, ("gate_up",), (2, 3), (1, 1))
    )  # fmt: skip
    return found + (_of_experts(cfg, arch, layout, own_tokens, normal) if any(arch.moe_layers) else [])


def _of_experts(
    cfg: Config, arch: Architecture, layout: grid.Layout, own_tokens: int, normal: Callable[..., Tensor]
) -> list[Case]:
    """The grouped operators; of several experts one gets no row, which routing can bring about."""
    h, w, E = arch.hidden_size, arch.expert_ffn_size // layout.expert_tensor, arch.num_experts // layout.expert
    N, rank = own_tokens * arch.experts_per_token * layout.expert_tensor, cfg.lora.expert_rank or cfg.lora.rank
    shares = torch.arange(E) if E > 1 else torch.ones(1)
    counts = (shares / shares.sum() * N).long()
    counts[-1] += N - counts.sum()
    fullest = int(counts.max())

    def grouped(name: str, in_size: int, out_size: int, trained: bool) -> Case:
        inputs = {"x": normal(N, in_size), "weight": normal(E, in_size, out_size, std=in_size**-0.5), "counts": counts}
        wanted, longest = (("x", "weight"), max(out_size, fullest)) if trained else (("x",), out_size)
        return Case(f"grouped_mm ({name})", lambda *x: kernels.grouped_mm(*x), grouped_formula, inputs, wanted, (1, 1),
                    (in_size, longest))  # fmt: skip

    probs = normal(N).sigmoid().bfloat16().float()
    return [
        Case("weighted_swiglu", lambda *x: kernels.weighted_swiglu(*x), weighted_formula,
             {"gate_up": normal(N, 2 * w), "probs": probs}, ("gate_up", "probs"), (4, 4), (1, w)),
        grouped("fc1", h, 2 * w, trained=False),
        grouped("fc2", w, h, trained=False),
        grouped("LoRA A", h, rank, trained=True),
        grouped("LoRA B", rank, 2 * w, trained=True),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ checking


def check(case: Case, device: torch.device, rank: int) -> list[Result]:
    """``case`` on ``device`` in each dtype."""
    exact = _inputs(case, torch.device("cpu"), torch.float64)
    answer = case.formula(*exact.values())
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(answer.shape, generator=generator).bfloat16()
    true = [answer.detach(), *torch.autograd.grad(answer, [exact[name] for name in case.trained], grad.double())]
    size = " ".join("x".join(map(str, x.shape)) for x in case.inputs.values() if x.is_floating_point())
    results = []
    for name, dtype in DTYPES.items():
        inputs = _inputs(case, device, dtype)
        wanted, given = [inputs[key] for key in case.trained], grad.to(device, dtype)

        def run(inputs=inputs, wanted=wanted, given=given) -> list[Tensor]:
            out = case.operator(*inputs.values())
            return [out.detach(), *torch.autograd.grad(out, wanted, given)]

        bounds = [tolerance(dtype, *pair) for pair in zip(case.roundings, case.sums, strict=True)]
        try:
            gaps = [apart(x.cpu(), y, case.block) for x, y in zip(run(), true, strict=True)]
            taken, error = devices.median_milliseconds(run, device, REPEATS), ""
        except RuntimeError as refused:  # a kernel that does not take this: the other operators still say something
            gaps, taken, error = [math.inf, math.inf], math.inf, str(refused).strip().partition("\n")[0]
        apart_by = (gaps[0], bounds[0], max(gaps[1:]), bounds[1])
        results.append(Result(case.name, size, name, *apart_by, taken, rank, error))
    return results


def tolerance(dtype: torch.dtype, roundings: int, terms: int) -> float:
    """The error that rounding can make; see the head of this file."""
    u, u_fp32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    return roundings * u + (math.sqrt(terms) + INSIDE) * u_fp32


def apart(found: Tensor, true: Tensor, block: int = 1) -> float:
    """rms(found - true) / rms(true) of the worst block; inf where a number is not finite.

    A block is the ``block`` trailing axes, and more of them until it has BLOCK numbers.
    """
    while block < true.dim() and math.prod(true.shape[-block:]) < BLOCK:
        block += 1
    axes = tuple(range(-block, 0))
    error, size = ((x.square().mean(axes)).sqrt() for x in (found.double() - true, true))
    share = torch.where(error == 0, 0.0, error / size)  # an expert without rows has a gradient of exactly 0
    return share.nan_to_num(math.inf).max().item()


def _inputs(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    def made(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.to(device)
        narrow = name != "probs" or dtype == torch.float64
        return x.to(device, dtype if narrow else torch.float32).requires_grad_(name in case.trained)

    return {name: made(name, x) for name, x in case.inputs.items()}


# ------------------------------------------------------------------------------------------------ the command


def summary(results: list[Result]) -> list[dict]:
    """One row for an operator and dtype: the largest errors and the longest time of all ranks, and what was wrong."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        rows.setdefault((result.operator, result.dtype), []).append(result)
    table = []
    for found in rows.values():
        worst = {part: max(getattr(one, part) for one in found) for part in ("forward", "backward", "milliseconds")}
        wrong = sorted({part for one in found for part in one.wrong}, reverse=True)
        ranks = [one.rank for one in found if one.wrong]
        error = next((one.error for one in found if one.error), "")
        table.append({**found[0]._asdict(), **worst, "wrong": wrong, "wrong_ranks": ranks, "error": error})
        del table[-1]["rank"]
    return table


def as_text(table: list[dict]) -> str:
    """The table for a reader; errors beside their tolerances."""
    lines = [f"{'operator':<20} {'dtype':<5} {'forward':>8} {'at most':>8} {'backward':>8} {'at most':>8} {'ms':>9}"]
    for row in table:
        numbers = [f"{row[p]:>8.1e}" for p in ("forward", "forward_tolerance", "backward", "backward_tolerance")]
        why = f" ({row['error']})" * bool(row["error"])
        wrong = f"  WRONG: {' and '.join(row['wrong'])}, on rank {', '.join(map(str, row['wrong_ranks']))}{why}"
        lines.append(
            f"{row['operator']:<20} {row['dtype']:<5} {' '.join(numbers)} {row['milliseconds']:>9.2f}"
            + wrong * bool(row["wrong"])
        )
    return "\n".join(lines)


def run(cfg: Config, json_path: str | None) -> bool:
    """Check on every rank, print one table; whether every operator was right everywhere."""
    arch, ranks = hf_config.planned(cfg)[0], parallel_setup.launched_world_size()
    check_layout(cfg, arch, ranks)
    with parallel_setup.open_world(cfg) as device:
        parallel = parallel_setup.open_layout(cfg.parallel, device)
        seed = derive_seed(cfg.train.seed, "operators", parallel.rank)
        mine = [result for case in cases(cfg, arch, ranks, seed) for result in check(case, device, parallel.rank)]
        everyones: list[list[Result]] = [[]] * ranks
        dist.all_gather_object(everyones, mine)
        table = summary([result for one in everyones for result in one])
        if parallel.rank == 0:
            print(as_text(table), flush=True)
            if json_path:
                Path(json_path).write_text(json.dumps(table, indent=1) + "\n")
    return not any(row["wrong"] for row in table)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: every operator is right; 1: one is not, named in the table; 2: unusable input, one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", help="YAML file, e.g. configs/qwen3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--json", metavar="FILE", help="write the table there as well")
    args = parser.parse_intermixed_args(arguments)
    rank = 0
    try:
        rank = parallel_setup.check_launch()
        return 0 if run(load_config(args.config, args.overrides), args.json) else 1
    except BAD_INPUT as error:
        parallel_setup.report(rank, f"error: {one_line(error)}")
        return 2
