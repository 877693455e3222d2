"""LoRA gradients without LoRA code, from the full weight gradients of a transformers model with merged weights.

With W' = W + s B A the chain rule gives dA = s B^T dW' and dB = s dW' A^T. Names and shapes are those of checkpoints
(adapter_weights.py): dense A (R, in), B (out, R); experts A (E, in, R), B (E, R, out).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import reference
import torch
from torch import Tensor

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
RANK, EXPERT_RANK, ALPHA = 4, 8, 12.0
TEMPERATURE = 0.9


KINDS = ["qwen3_moe", "qwen2_moe", "olmoe"]


@dataclass
class Reference:
    """The results that every layout must reproduce. ``factors``: the non-zero A and B that were merged."""

    factors: dict[str, Tensor]
    gradients: dict[str, Tensor]
    norm: float
    logp: Tensor  # (b, T - 1) of the merged model
    merged: dict[str, Tensor]  # the merged model's weights by Hugging Face checkpoint name


def modules(model: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """Adapted module -> the transformers parameters that it fuses by rows. Routed experts are one 3-D parameter."""
    found = {}
    for i, layer in enumerate(model.model.layers):
        name, attention, mlp = f"model.layers.{i}", layer.self_attn, layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        found[f"{name}.self_attn.qkv_proj"] = [linear.weight for linear in qkv]
        found[f"{name}.self_attn.o_proj"] = [attention.o_proj.weight]
        swiglus = {f"{name}.mlp": mlp}
        if hasattr(mlp, "experts"):
            found[f"{name}.mlp.experts.gate_up_proj"] = [mlp.experts.gate_up_proj]
            found[f"{name}.mlp.experts.down_proj"] = [mlp.experts.down_proj]
            found[f"{name}.mlp.gate"] = [mlp.gate.weight]
            swiglus = {f"{name}.mlp.shared_expert": mlp.shared_expert} if hasattr(mlp, "shared_expert") else {}
        for prefix, swiglu in swiglus.items():
            found[f"{prefix}.gate_up_proj"] = [swiglu.gate_proj.weight, swiglu.up_proj.weight]
            found[f"{prefix}.down_proj"] = [swiglu.down_proj.weight]
    return found


def random_factors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Non-zero A and B for every module of ``model``."""
    generator, factors = torch.Generator().manual_seed(11), {}
    for name, parts in modules(model).items():
        if parts[0].dim() == 3:
            experts, out_size, in_size = parts[0].shape
            shapes = {"A": (experts, in_size, EXPERT_RANK), "B": (experts, EXPERT_RANK, out_size)}
        else:
            shapes = {"A": (RANK, parts[0].shape[1]), "B": (sum(len(part) for part in parts), RANK)}
        factors |= {f"{name}.{x}": torch.randn(shape, generator=generator) * 0.1 for x, shape in shapes.items()}
    return factors


def loss_weights(tokens: Tensor) -> Tensor:
    """A random weight for every log-prob and entropy, so that no gradient cancels.  -> the shape of ``tokens``"""
    return torch.randn(tokens.shape, generator=torch.Generator().manual_seed(5))


def compute(model: torch.nn.Module, tokens: Tensor) -> Reference:
    """Merge random factors into ``model``, differentiate sum w (logp + 0.3 entropy), and apply the chain rule."""
    factors = random_factors(model)
    parts_of = modules(model)
    with torch.no_grad():
        for name, parts in parts_of.items():
            A, B = factors[f"{name}.A"], factors[f"{name}.B"]
            if A.dim() == 3:
                parts[0] += ALPHA / EXPERT_RANK * (A @ B).transpose(1, 2)
                continue
            for part, delta in zip(parts, (ALPHA / RANK * B @ A).split([len(part) for part in parts]), strict=True):
                part += delta
    log_p = torch.log_softmax(model(tokens).logits[:, :-1] / TEMPERATURE, -1)
    logp, entropy = log_p.gather(2, tokens[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    (loss_weights(tokens)[:, 1:] * (logp + 0.3 * entropy)).sum().backward()
    gradients = {}
    for name, parts in parts_of.items():
        A, B = factors[f"{name}.A"], factors[f"{name}.B"]
        grad = torch.cat([part.grad for part in parts])
        if A.dim() == 3:
            grad = grad.transpose(1, 2)  # (E, in, out)
            gradients[f"{name}.A"] = ALPHA / EXPERT_RANK * grad @ B.transpose(1, 2)
            gradients[f"{name}.B"] = ALPHA / EXPERT_RANK * A.transpose(1, 2) @ grad
        else:
            gradients[f"{name}.A"] = ALPHA / RANK * B.t() @ grad
            gradients[f"{name}.B"] = ALPHA / RANK * grad @ A.t()
    norm = float(sum(grad.square().sum() for grad in gradients.values()) ** 0.5)
    return Reference(factors, gradients, norm, logp.detach(), _checkpoint_tensors(model))


def _checkpoint_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    # In files each expert has its own gate, up and down matrices; transformers 5 fuses them in memory.
    tensors = {}
    for name, value in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("mlp.experts"):
            tensors[name] = value
            continue
        for expert, matrix in enumerate(value):
            blocks = {"gate_proj": matrix, "up_proj": matrix} if last == "gate_up_proj" else {"down_proj": matrix}
            if last == "gate_up_proj":
                blocks["gate_proj"], blocks["up_proj"] = matrix.chunk(2)
            tensors |= {f"{prefix}.{expert}.{block}.weight": part for block, part in blocks.items()}
    return tensors


def save_and_compute(folder: Path) -> tuple[dict[str, Path], Tensor, dict[str, Reference]]:
    """For each of KINDS a saved model and its reference, and the tokens."""
    paths, tokens = {kind: reference.save(kind, folder / kind) for kind in KINDS}, reference.tokens()
    return paths, tokens, {kind: compute(reference.load(path), tokens) for kind, path in paths.items()}
