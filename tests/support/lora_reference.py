"""The only reference of the policy: a transformers model in float64 whose weights are the base plus (alpha / R) B A.

Gradients of A and B come from autograd through the sum, the optimizer is torch's, and the loss follows the papers that
grpo.py names. It uses no code of the trainer. Names and shapes of the factors are those of checkpoints
(weights/adapter_weights.py): dense A (R, in), B (out, R); experts A (E, in, R), B (E, R, out).
S is the number of sequences, T of tokens in a row, and E of experts; R is the LoRA rank.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import reference
import torch
from torch import Tensor

from facts.architectures import FAMILIES

Named = dict[str, Tensor]
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
RANK, EXPERT_RANK, ALPHA = 4, 8, 12.0
TEMPERATURE = 0.9
KINDS = [*FAMILIES]
ADAPTED = {  # an adapted module of a layer -> the parameters of transformers that it fuses by rows
    "self_attn.qkv_proj": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attn.o_proj": ("self_attn.o_proj.weight",),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_up_proj",),
    "mlp.experts.down_proj": ("mlp.experts.down_proj",),
    "mlp.gate": ("mlp.gate.weight",),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "mlp.shared_expert.down_proj": ("mlp.shared_expert.down_proj.weight",),
    "mlp.gate_up_proj": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj": ("mlp.down_proj.weight",),
}


@dataclass
class Reference:
    """The results that every layout must reproduce. ``factors``: the non-zero A and B that were merged."""

    factors: Named
    gradients: Named
    norm: float
    logp: Tensor  # (S, T - 1) of the merged model
    merged: Named  # the merged model's weights by Hugging Face checkpoint name


def load(path: Path) -> torch.nn.Module:
    """The model of a folder in float64. Routers and norms of transformers compute in float32 even so."""
    return reference.load(path, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ merged weights


def modules(model: torch.nn.Module) -> dict[str, list[str]]:
    """Adapted module -> its parameters. Routed experts are one 3-D parameter."""
    names = {name for name, _ in model.named_parameters()}
    found = {}
    for layer in range(len(model.model.layers)):
        for module, fused in ADAPTED.items():
            parts = [f"model.layers.{layer}.{part}" for part in fused]
            if names.issuperset(parts):
                found[f"model.layers.{layer}.{module}"] = parts
    return found


def random_factors(model: torch.nn.Module) -> Named:
    """Non-zero A and B for every module of ``model``, in float32."""
    generator, factors = torch.Generator().manual_seed(11), {}
    weights = dict(model.named_parameters())
    for name, parts in modules(model).items():
        shape = weights[parts[0]].shape
        if len(shape) == 3:
            experts, out_size, in_size = shape
            shapes = {"A": (experts, in_size, EXPERT_RANK), "B": (experts, EXPERT_RANK, out_size)}
        else:
            rows = sum(len(weights[part]) for part in parts)
            shapes = {"A": (RANK, shape[1]), "B": (rows, RANK)}
        factors |= {f"{name}.{x}": torch.randn(shape, generator=generator) * 0.1 for x, shape in shapes.items()}
    return factors


def merge(model: torch.nn.Module, factors: Named) -> Named:
    """The weights of ``model`` by name, with (alpha / R) B A added to the adapted ones."""
    weights = dict(model.named_parameters())
    for name, parts in modules(model).items():
        A, B = factors[f"{name}.A"], factors[f"{name}.B"]
        if A.dim() == 3:
            delta = ALPHA / EXPERT_RANK * (A @ B).transpose(1, 2)
        else:
            delta = ALPHA / RANK * B @ A
        rows = [len(weights[part]) for part in parts]
        for part, change in zip(parts, delta.split(rows), strict=True):
            weights[part] = weights[part] + change
    return weights


@contextlib.contextmanager
def routed(model: torch.nn.Module, routes: Tensor) -> Iterator[list[Tensor]]:
    """Inside the block, a token goes to the experts of ``routes``, and to the router's own where these are negative.

    (S, T, L, K), L MoE layers. The list gets the experts of each layer of each forward pass, (S x T, K).
    """
    used: list[Tensor] = []

    def replay(of_layer: Tensor, gate: torch.nn.Module, _: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _, own = output
        used.append(torch.where(of_layer < 0, own, of_layer))
        weights = logits.softmax(-1, dtype=torch.float).gather(-1, used[-1])
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), used[-1]

    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [
        gate.register_forward_hook(functools.partial(replay, of_layer.flatten(0, 1)))
        for gate, of_layer in zip(gates, routes.unbind(2), strict=True)
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()


def token_logprobs(model: torch.nn.Module, weights: Named, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The log-prob of each token given those before it, and the entropy there.  (S, T) -> (S, T - 1) twice"""
    logits = torch.func.functional_call(model, weights, (tokens,)).logits
    return reference.distribution(logits, tokens, temperature)


# ------------------------------------------------------------------------------------------------ gradients


def loss_weights(tokens: Tensor) -> Tensor:
    """A random weight for every log-prob and entropy, so that no gradient cancels.  -> the shape of ``tokens``"""
    return torch.randn(tokens.shape, generator=torch.Generator().manual_seed(5))


def compute(path: Path, tokens: Tensor) -> Reference:
    """Merge random factors into the model of ``path``, and differentiate sum w (logp + 0.3 entropy) by them."""
    model = load(path)
    factors = random_factors(model)
    leaves = {name: value.double().requires_grad_() for name, value in factors.items()}
    weights = merge(model, leaves)
    logp, entropy = token_logprobs(model, weights, tokens, TEMPERATURE)
    loss = (loss_weights(tokens)[:, 1:] * (logp + 0.3 * entropy)).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return Reference(
        factors,
        {name: gradient.float() for name, gradient in gradients.items()},
        float(sum(gradient.square().sum() for gradient in gradients.values()) ** 0.5),
        logp.detach().float(),
        _checkpoint_tensors(model.state_dict() | weights),
    )


def _checkpoint_tensors(weights: Named) -> Named:
    """The ``weights`` as files hold them: each expert has its own gate, up and down matrices."""
    tensors = {}
    for name, value in weights.items():
        value = value.detach().float()
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
    return paths, tokens, {kind: compute(path, tokens) for kind, path in paths.items()}
