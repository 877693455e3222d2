"""The computations that every rank makes for the tests of the model and of LoRA, with every version of Megatron.

A negative control leaves out one reduction of the gradients. A test that passes with it would not test this reduction.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import world
from adapted import SEED, backward, errors, fill, gather, gradient_error, load, logp_error, lora_config, my_rows
from lora_reference import TEMPERATURE, Reference
from torch import Tensor

import lora_megatron
import parallel_setup
from model import megatron_model
from parallel_setup import Parallel
from weights import huggingface

CONTROLS = {  # the omitted reduction: layouts in which several ranks take part in it
    "tensor": ["TP2", "TP2_EP2_DP2", "TP4_EP16"],
    "data": ["DP2", "EP2", "TP2_EP2_DP2", "TP4_EP16"],
    "expert_data": ["DP2", "EP2_DP4", "TP2_EP2_DP2"],
    "experts as dense": ["EP2", "TP2_EP4", "TP4_EP16"],
}


def log_probs(
    parallel: Parallel, paths: dict[str, Path], tokens: Tensor, temperature: float
) -> dict[str, tuple[int, list[Tensor]]]:
    """For each model: the number of this data rank, and log-probs and entropies of its share of the rows."""
    mine, mask = my_rows(tokens, parallel)
    answers = {}
    for name, path in paths.items():
        model, _ = load(path, parallel)
        with torch.no_grad():
            stats = megatron_model.token_logprobs(model, mine, mask, parallel, temperature)
        answers[name] = parallel.data_rank, [value.cpu() for value in stats[:2]]
    return answers


def largest_gap(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu() - expected).abs().max())


def measure(parallel: Parallel, paths: dict[str, Path], references: dict[str, Reference], tokens: Tensor) -> dict:
    """For each kind of model: every number that the tests of LoRA compare."""
    return {kind: _measure(parallel, paths[kind], references[kind], tokens) for kind in paths}


def _measure(parallel: Parallel, path: Path, expected: Reference, tokens: Tensor) -> dict:
    model, arch = load(path, parallel)
    # As attach does. For a weight with a gradient, a GPU takes another product, which rounds otherwise.
    model.requires_grad_(False)
    mine, mask = my_rows(tokens, parallel)

    def log_probs() -> Tensor:
        with torch.no_grad():
            return torch.stack(megatron_model.token_logprobs(model, mine, mask, parallel, TEMPERATURE)[:2])

    bare = log_probs()
    adapters = lora_megatron.attach(model, lora_config(), parallel, SEED)
    factors = lora_megatron.factors(adapters)
    initial = gather(adapters, factors, arch, parallel)
    out: dict = {"initial": {name: value.cpu().numpy().tobytes() for name, value in initial.items()}}
    out["zero B"] = torch.equal(log_probs(), bare)

    fill(adapters, expected.factors, arch, parallel)
    again = gather(adapters, factors, arch, parallel)
    out["round trip"] = all(torch.equal(again[name].cpu(), value) for name, value in expected.factors.items())
    with lora_megatron.disabled(adapters):
        out["disabled"] = torch.equal(log_probs(), bare)
    out["effect"] = float((log_probs() - bare).abs().max())

    logp = backward(model, tokens, parallel)
    out["logp error"] = logp_error(logp, expected, parallel)
    out["without gradients"] = torch.equal(log_probs()[0], logp)
    shares = {name: factor.grad.clone() for name, factor in factors.items()}
    out["error"] = gradient_error(adapters, shares, arch, parallel, expected)
    out["norm"] = float(parallel.gradient_norm(list(factors.values())))
    copies, Parallel.copies = Parallel.copies, lambda self, parameter: 1
    out["norm with copies"] = float(parallel.gradient_norm(list(factors.values())))
    Parallel.copies = copies
    out["with gradient"] = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    sizes = parallel.world_size, parallel.tensor, parallel.expert
    for control in (control for control in CONTROLS if sizes in [world.LAYOUTS[name] for name in CONTROLS[control]]):
        with _left_out(control, parallel, factors):
            out[control] = gradient_error(adapters, shares, arch, parallel, expected)

    exported = dict(huggingface.export(model, arch, parallel))
    assert exported.keys() == expected.merged.keys(), sorted(exported.keys() ^ expected.merged.keys())
    out["merged error"] = max(largest_gap(exported[name], value) for name, value in expected.merged.items())
    if parallel.world_size <= 4:
        partial = dict(huggingface.export(model, arch, parallel, only=()))
        out["partial names"], out["names"] = sorted(partial), sorted(exported)
        out["partial equal"] = all(torch.equal(exported[name], value) for name, value in partial.items())

    out["describe"] = lora_megatron.describe(adapters, parallel)
    out["held"] = sum(factor.numel() for factor in factors.values())
    out["held once"] = sum(factor.numel() / parallel.copies(factor) for factor in factors.values())

    *_, out["error with recompute"] = errors(path, parallel, expected, tokens, recompute=True)
    _, *out["errors with merged weights"] = errors(path, parallel, expected, tokens, merges=True)
    return out


def measure_quantised(
    parallel: Parallel,
    path: Path,
    twin: dict[str, Tensor],
    expected: Reference,
    tokens: Tensor,
) -> dict:
    """An int4 model beside the tensors and the reference of the model that its codes stand for."""
    model, arch = load(path, parallel, quantisation="int4")
    unequal = [key for key, value in huggingface.export(model, arch, parallel) if not value.equal(twin[key])]
    gaps = []
    for how in ({}, {"recompute": True}, {"merges": True}):
        model, *gap = errors(path, parallel, expected, tokens, quantisation="int4", **how)
        gaps.append(gap)
    exported = dict(huggingface.export(model, arch, parallel))
    merged = max(largest_gap(exported[key], value) for key, value in expected.merged.items())
    trained = sorted(key for key, parameter in model.named_parameters() if parameter.grad is not None)
    return {"unequal": unequal, "errors": gaps, "merged error": merged, "trained": trained}


@contextlib.contextmanager
def _left_out(control: str, parallel: Parallel, factors: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """A context without one reduction of sync_gradients_, or without the mark of the experts."""
    reduce, group = parallel_setup.sum_gradients_, getattr(parallel, f"{control}_group", None)
    if control == "experts as dense":
        for factor in factors.values():
            factor.is_expert = False
    parallel_setup.sum_gradients_ = lambda members, over: None if over is group else reduce(members, over)
    try:
        yield
    finally:
        parallel_setup.sum_gradients_ = reduce
