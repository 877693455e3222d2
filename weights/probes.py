"""Probe adapters for one or several kinds of modules, and the log-probs that a correct program computes with them.

    DIR/probes/KIND.FORM    PEFT adapters in the forms of peft_adapters.py, and with other common names and patterns
    DIR/expected.json       prompts; log-probs of the base, with each kind, and with each kind under each known fault

`preflight.py --adapter DIR --stack PROGRAM` compares a program's log-probs with the expected log-probs. A probe adapts
at most LAYERS layers, including the first and the last layer. R is the rank, P the number of prompts, and T the number
of tokens per prompt.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parallel_setup
from facts.architectures import Architecture, every_module, tensor_shapes
from facts.seeds import derive_seed
from inputs.rules import problems, refuse_first
from knobs import Config
from model.megatron_model import token_logprobs
from parallel_setup import Parallel
from weights import huggingface, peft_adapters
from weights.adapter_weights import Adapted, adapted_modules
from weights.peft_adapters import EXPERT, Form, Pair, Pairs
from weights.policy import Policy

RANK, ALPHA = 6, 9.0  # with these, the correct scale and the wrong ones all differ: 9 / 6; 9, 9 / sqrt(6), 1
EFFECT = 0.3  # mean |change| of a prompt token's log-prob by one kind of module, in nats
NEAR, FARTHEST = 0.1, 0.2  # the search for a size stops within NEAR of EFFECT, and accepts no more than FARTHEST
PROMPTS, TOKENS = 4, 32  # a prompt's length is a multiple of 32, because tensor ranks split it
LAYERS = 4
NOT_FAR = 0.02  # a fault that changes the log-probs by less, in nats, is not distinguished from the right answer
PROBES, EXPECTED = "probes", "expected.json"
GIVEN = "given"  # the kind of the adapter that the user gave

KINDS = {  # kind -> its matrices in a layer
    "qkv": r"self_attn\.[qkv]_proj",
    "proj": r"self_attn\.o_proj",
    "dense_fc1": r"mlp\.(gate|up)_proj",
    "dense_fc2": r"mlp\.down_proj",
    "shared_fc1": r"mlp\.shared_expert\.(gate|up)_proj",
    "shared_fc2": r"mlp\.shared_expert\.down_proj",
    "router": r"mlp\.gate",
    "experts_fc1": r"mlp\.experts\.\d+\.(gate|up)_proj",
    "experts_fc2": r"mlp\.experts\.\d+\.down_proj",
    "expert_first": r"mlp\.experts\.0\..*",
    "expert_last": r"mlp\.experts\.LAST\..*",
}
FC1, FC2 = (tuple(f"{place}_{layer}" for place in ("dense", "shared", "experts")) for layer in ("fc1", "fc2"))
TOGETHER = {"experts": ("experts_fc1", "experts_fc2"), "mlp_fc1": FC1, "mlp": FC1 + FC2}
TOGETHER["all"] = ("qkv", "proj", *FC1, *FC2)
OWN_A = "mlp_own_a"  # mlp with a separate A for each up projection, as PEFT draws it; the form stack cannot store this
LEAF = {"experts_fc1", OWN_A, *TOGETHER}  # kinds that are also written in the form leaf, which is the usual one
# Names that some programs write or read, but PEFT does not. A correct program applies or refuses them, but never
# ignores them.
OTHER_NAMES = {  # label -> the replacement of "model.layers"
    "names_language_model": "language_model.model.layers",
    "names_extra_model": "model.model.layers",
    "names_fsdp": "_fsdp_wrapped_module.model.layers",
    "names_megatron": "decoder.layers",
}

Value = Callable[[Pairs], Tensor]  # pairs -> the log-probs of the prompts if the model has these updates


# ------------------------------------------------------------------------------------------------ factors


def draw(names: list[str], arch: Architecture, rank: int, alpha: float, size: float) -> Pairs:
    """Draw random pairs for the matrices ``names``.

    With ``size`` 1, the entries of an update have a standard deviation of 1 / sqrt(number of inputs). Matrices that
    Megatron fuses (q, k, v; gate, up) share their A. The random numbers depend only on the names.
    """
    shapes, pairs = tensor_shapes(arch), {}
    for name in names:
        rows, columns = shapes[f"{name}.weight"]
        block, leaf = name.rsplit(".", 1)
        shared = leaf if leaf in ("o_proj", "down_proj", "gate") else "in"
        of_a, of_b = (
            torch.Generator().manual_seed(derive_seed("probe", text)) for text in (f"{block}.{shared}", f"{name} B")
        )
        a = torch.randn(rank, columns, generator=of_a) / math.sqrt(columns)
        b = torch.randn(rows, rank, generator=of_b) * size * math.sqrt(rank) / alpha
        pairs[name] = Pair(a, b, alpha / rank)
    return pairs


def whole_factors(pairs: Pairs, modules: list[Adapted], alpha: float) -> dict[str, Tensor]:
    """Return the pairs as whole factors of a checkpoint (Adapted.factor_shapes), whose scale is ``alpha`` / R.

    If pairs of one module do not share A, each of them fills a separate part of the R dimension.
    """
    factors = {}
    for adapted in modules:
        (a_name, a_shape), (b_name, b_shape) = adapted.factor_shapes().items()
        a, b = factors[a_name], factors[b_name] = torch.zeros(a_shape), torch.zeros(b_shape)
        for expert in range(adapted.module.copies):
            a_of_it, b_of_it = (a[expert].t(), b[expert].t()) if adapted.is_expert else (a, b)
            held, row, place = None, 0, slice(0, 0)
            for block, (rows, *_) in adapted.module.blocks.items():
                if pair := pairs.get(adapted.layer + block.format(expert)):
                    if held is None or not torch.equal(pair.a, held):
                        place = slice(place.stop, place.stop + len(pair.a))
                    held = a_of_it[place] = pair.a
                    b_of_it[row : row + rows, place] = pair.scale * adapted.rank / alpha * pair.b
                row += rows
    return factors


# ------------------------------------------------------------------------------------------------ faults


def faults(pairs: Pairs, arch: Architecture) -> dict[str, Pairs]:
    """Return, for each known fault of programs, the pairs with which a correct program would give the faulty result.

    A fault that leaves ``pairs`` unchanged, or leaves no pair, is omitted.
    """

    def only(pattern: str) -> Pairs:
        return {name: pair for name, pair in pairs.items() if re.search(pattern, name)}

    def scaled(factor: Callable[[Pair], float], of: str = "") -> Pairs:
        return {name: pair._replace(scale=factor(pair)) if of in name else pair for name, pair in pairs.items()}

    def moved(by: int) -> Pairs:
        def other(match: re.Match) -> str:
            return f".experts.{(int(match[1]) + by) % arch.num_experts}."

        return {re.sub(r"\.experts\.(\d+)\.", other, name): pair for name, pair in pairs.items()}

    def with_gates_a(name: str, pair: Pair) -> Pair:
        gate = pairs.get(exchanged(name), pair)
        return pair._replace(a=gate.a) if name.endswith("up_proj") and gate.a.shape == pair.a.shape else pair

    def exchanged(name: str) -> str:
        return re.sub(r"(gate|up)_proj$", lambda match: {"gate": "up_proj", "up": "gate_proj"}[match[1]], name)

    layers = sorted({int(name.split(".")[2]) for name in pairs})
    half = "|".join(map(str, range(arch.num_experts // 2)))
    found = {
        "scale alpha instead of alpha / R": scaled(lambda pair: pair.scale * len(pair.a)),
        "scale 1 instead of alpha / R": scaled(lambda _: 1.0),
        "scale alpha / sqrt R instead of alpha / R": scaled(lambda pair: pair.scale * math.sqrt(len(pair.a))),
        "applied twice": scaled(lambda pair: 2 * pair.scale),
        "sign reversed": scaled(lambda pair: -pair.scale),
        "experts shifted by one": moved(1),
        "experts shifted by minus one": moved(-1),
        "gate and up swapped": {exchanged(name): pair for name, pair in pairs.items()},
        "up with the A of gate": {name: with_gates_a(name, pair) for name, pair in pairs.items()},
        "attention only": only(r"\.self_attn\."),
        "all but attention": only(r"\.mlp\."),
        "all but routed experts": only(r"^(?!.*\.experts\.)"),
        "routed experts only": only(r"\.experts\."),
        "all but dense and shared MLP": only(r"\.self_attn\.|\.experts\.|\.gate$"),
        "first half of the experts only": only(rf"^(?!.*\.experts\.)|\.experts\.({half})\."),
        "all but the first expert": only(r"^(?!.*\.experts\.0\.)"),
        "all but the last expert": only(rf"^(?!.*\.experts\.{arch.num_experts - 1}\.)"),
        "gate without up": only(r"(?<!up_proj)$"),
        "up without gate": only(r"(?<!gate_proj)$"),
        "fc1 without fc2": only(r"(?<!down_proj)$"),
        "fc2 without fc1": only(r"(?<!gate_proj)(?<!up_proj)$"),
        "q without k, v": only(r"(?<!k_proj)(?<!v_proj)$"),
        "q at half its scale, as without its alpha_pattern": scaled(lambda pair: 0.5 * pair.scale, of="q_proj"),
        "q at twice its scale, as without its rank_pattern": scaled(lambda pair: 2 * pair.scale, of="q_proj"),
        "first layer only": only(rf"^model\.layers\.{layers[0]}\."),
        "all but the last layer": only(rf"^model\.layers\.(?!{layers[-1]}\.)"),
        "factors of the neighbouring TP2 shard": {name: _neighbours(name, pair) for name, pair in pairs.items()},
    } | _stacks_misread(pairs, arch)
    return {name: wrong for name, wrong in found.items() if wrong and not _same(wrong, pairs)}


def _same(some: Pairs, others: Pairs) -> bool:
    return some.keys() == others.keys() and all(
        pair.scale == others[name].scale and torch.equal(pair.a, others[name].a) and torch.equal(pair.b, others[name].b)
        for name, pair in some.items()
    )


def _neighbours(name: str, pair: Pair) -> Pair:
    """Return the pair with the shards of two tensor ranks exchanged: the halves of B's rows, or of A's columns."""
    if name.endswith((".o_proj", ".down_proj")):
        return pair._replace(a=pair.a.roll(pair.a.shape[1] // 2, 1))
    return pair if name.endswith(".gate") else pair._replace(b=pair.b.roll(len(pair.b) // 2, 0))


def _stacks_misread(pairs: Pairs, arch: Architecture) -> dict[str, Pairs]:
    """Return the pairs for two faults in a stack of all experts' B.

    The stack is read, or written, with the dimensions of experts and rank swapped.
    """
    groups: dict[str, list[str]] = {}
    for name in pairs:
        if match := EXPERT.fullmatch(name):
            groups.setdefault(f"{match[1]} {match[3]}", []).append(name)
    read, written = dict(pairs), dict(pairs)
    for names in groups.values():
        if len(names) < arch.num_experts or len({pairs[name].b.shape for name in names}) > 1:
            continue
        names.sort(key=lambda name: int(EXPERT.fullmatch(name)[2]))
        stack = torch.stack([pairs[name].b for name in names])  # (E, out, R)
        sizes = stack.shape[::2]
        as_read = stack.permute(1, 2, 0).flatten(1).unflatten(1, sizes)  # written with E fastest, read with R fastest
        as_written = stack.permute(1, 0, 2).flatten(1).unflatten(1, sizes[::-1]).transpose(1, 2)  # the reverse
        for expert, name in enumerate(names):
            read[name] = pairs[name]._replace(b=as_read[:, expert])
            written[name] = pairs[name]._replace(b=as_written[:, expert])
    return {
        "experts' B read with rank and expert exchanged": read,
        "experts' B written with rank and expert exchanged": written,
    }


# ------------------------------------------------------------------------------------------------ expected log-probs


def prompts_for(arch: Architecture) -> list[list[int]]:
    """Return random prompts, which are equal for all models with a vocabulary of the same size.  (P, T)"""
    generator = torch.Generator().manual_seed(derive_seed("probe", "prompts"))
    return torch.randint(3, min(arch.vocab_size, 2**16), (PROMPTS, TOKENS), generator=generator).tolist()


@torch.no_grad()
def logprobs(model: torch.nn.Module, prompts: list[list[int]]) -> Tensor:
    """Compute, with a transformers model, the log-probs of all prompt tokens but the first.  (P, T - 1) in fp64"""
    ids = torch.tensor(prompts)
    found = model(ids, use_cache=False).logits.double().log_softmax(-1)[:, :-1]
    return found.gather(-1, ids[:, 1:, None])[..., 0]


class Float64:
    """The reference: a transformers model in float64. Each call adds updates to its weights, and then restores them."""

    def __init__(self, model_dir: str, arch: Architecture) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        plain = {"attn_implementation": "eager"}  # not all other implementations support fp64
        if int(transformers.__version__.partition(".")[0]) >= 5:
            plain["experts_implementation"] = "eager"
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(model_dir, dtype=torch.float64, **plain).eval()
        self.weights, self.prompts = huggingface.by_expert(dict(self.model.state_dict())), prompts_for(arch)

    def __call__(self, pairs: Pairs) -> Tensor:
        kept = {name: self.weights[f"{name}.weight"].clone() for name in pairs}
        for name, pair in pairs.items():
            self.weights[f"{name}.weight"].add_(pair.b.double() @ pair.a.double(), alpha=pair.scale)
        try:
            return logprobs(self.model, self.prompts)
        finally:
            for name, weight in kept.items():
                self.weights[f"{name}.weight"].copy_(weight)


class Trainer:
    """The trainer's policy in the layout of a run. All ranks make every call together."""

    def __init__(self, cfg: Config, arch: Architecture, parallel: Parallel, width: int) -> None:
        """Load the policy.

        ``width`` is the largest rank of the pairs that will be passed to a call. If q, k and v may have different
        factors A, it is 3 times this rank.
        """
        targets = sorted({module.target for module in every_module(arch)} - {""})
        lora = {"targets": targets, "rank": width, "expert_rank": width, "alpha": float(width)}
        cfg = cfg.changed(lora=lora, rollout={"temperature": 1.0})
        self.policy, self.modules = Policy.load(cfg, arch, parallel), list(adapted_modules(arch, cfg.lora))
        self.policy.model.to(parallel.device)
        self.tokens = torch.tensor(prompts_for(arch), device=parallel.device)
        self.mask = torch.ones_like(self.tokens).index_fill(1, self.tokens.new_zeros(1), 0)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, cfg: Config, arch: Architecture, width: int) -> Iterator[Trainer]:
        """Make a Trainer in this block, on the ranks that torchrun has launched.

        Raises InputError if the layout does not fit these ranks.
        """
        parallel_setup.check_launch()
        refuse_first(problems(cfg, arch, parallel_setup.launched_world_size()))
        with parallel_setup.open_world(cfg.device, cfg.train, cfg.parallel) as device:
            yield cls(cfg, arch, parallel_setup.open_layout(cfg.parallel, device), width)

    @torch.no_grad()
    def __call__(self, pairs: Pairs) -> Tensor:
        policy = self.policy
        policy.load_(whole_factors(pairs, self.modules, policy.cfg.lora.alpha))
        return token_logprobs(policy.model, self.tokens, self.mask, policy.parallel).logp[:, 1:].double().cpu()


# ------------------------------------------------------------------------------------------------ the folder


def make(
    model: str, arch: Architecture, value: Value, given: Pairs, say: Callable[[str], None]
) -> tuple[dict[str, Pairs], dict[str, Any]]:
    """Return the pairs of each kind for the base ``model``, and the content of the file EXPECTED.

    ``value`` computes the reference log-probs. ``given`` has the pairs of the user's adapter, whose kind is GIVEN.
    """
    base = value({})
    kinds = {GIVEN: given} | _drawn(arch, value, base, say)
    expected: dict[str, Any] = {"model": model, "prompts": prompts_for(arch), "base": base.tolist(), "kinds": {}}
    for kind, pairs in kinds.items():
        right = value(pairs)
        wrong = {name: value(changed) for name, changed in faults(pairs, arch).items()}
        far = {name: values.tolist() for name, values in wrong.items() if (values - right).abs().mean() > NOT_FAR}
        expected["kinds"][kind] = {"right": right.tolist(), "faults": far}
        effect = (right - base).abs().mean().item()
        say(f"{kind:14} {len(pairs):6} matrices  {effect:.2f} nats  {len(far)} faults")
    return kinds, expected


def _drawn(arch: Architecture, value: Value, base: Tensor, say: Callable[[str], None]) -> dict[str, Pairs]:
    """Draw pairs for each kind in KINDS that the model has, and combine them into the kinds of TOGETHER and OWN_A."""
    kinds = {kind: pairs for kind in KINDS if (pairs := _sized(kind, arch, value, base, say))}
    for kind, parts in TOGETHER.items():
        if there := [part for part in parts if part in kinds]:
            kinds[kind] = {name: pair for part in there for name, pair in kinds[part].items()}
    if "mlp" in kinds:
        kinds[OWN_A] = {
            name: pair._replace(a=pair.a.roll(1, 1)) if name.endswith("up_proj") else pair
            for name, pair in kinds["mlp"].items()
        }
    return kinds


def write(folder: Path, kinds: dict[str, Pairs], expected: dict[str, Any], arch: Architecture) -> None:
    """Write expected.json, and the adapters of all kinds except GIVEN, the user's adapter."""
    (folder / EXPECTED).write_text(json.dumps(expected))
    for kind in kinds.keys() - {GIVEN}:
        write_forms(folder / PROBES, kind, expected["model"], arch, kinds[kind])


def _sized(kind: str, arch: Architecture, value: Value, base: Tensor, say: Callable[[str], None]) -> Pairs:
    """Draw pairs of a kind with a size that changes the log-probs by about EFFECT.

    The result is empty if the model has no such module, or if no size has this effect.
    """
    names = _names(kind, arch)
    if not names:
        return {}
    found: Pairs = {}
    size, best = 0.1, FARTHEST
    for _ in range(6):  # the effect is roughly proportional to the size, except for a router
        pairs = draw(names, arch, RANK, ALPHA, size)
        effect = (value(pairs) - base).abs().mean().item()
        if abs(effect - EFFECT) < best:
            best, found = abs(effect - EFFECT), pairs
        if best < NEAR:
            break
        size *= min(8.0, EFFECT / effect) if effect else 8.0
    if not found:
        say(f"{kind}: left out, because no factors move the log-probs by about {EFFECT} nats")
    return found


def _names(kind: str, arch: Architecture) -> list[str]:
    """Return the names of a kind's matrices, in at most LAYERS of the layers that have them."""
    pattern = rf"(model\.layers\.\d+)\.{KINDS[kind].replace('LAST', str(arch.num_experts - 1))}\.weight"
    of_layer: dict[str, list[str]] = defaultdict(list)
    for name in tensor_shapes(arch):
        if match := re.fullmatch(pattern, name):
            of_layer[match[1]].append(name.removesuffix(".weight"))
    count = min(LAYERS, len(of_layer))
    step = (len(of_layer) - 1) / max(count - 1, 1)
    chosen = {list(of_layer)[round(i * step)] for i in range(count)}
    return [name for layer, names in of_layer.items() if layer in chosen for name in names]


def write_forms(folder: Path, kind: str, base_model: str, arch: Architecture, pairs: Pairs) -> None:
    """Write the adapter in every form that its modules allow.

    The kind qkv is also written under OTHER_NAMES, with an alpha_pattern, and with a rank_pattern.
    """
    forms: list[Form] = ["full"]
    if kind in LEAF:
        forms.append("leaf")
    if kind != OWN_A and any(".mlp." in name for name in pairs):
        forms.append("stack")
    for form in forms:
        peft_adapters.write(folder / f"{kind}.{form}", base_model, arch, pairs, ALPHA, form)
    if kind != "qkv":
        return
    tensors = peft_adapters.tensors(arch, pairs, "leaf")
    settings = peft_adapters.config(base_model, arch, pairs, ALPHA, "leaf")
    for label, other in OTHER_NAMES.items():
        named = {name.replace("model.layers", other): tensor for name, tensor in tensors.items()}
        peft_adapters.save(folder / f"{kind}.{label}", named, settings)
    half = {n: t / 2 if re.search(r"q_proj\.lora_B", n) else t for n, t in tensors.items()}
    peft_adapters.save(folder / f"{kind}.alpha_pattern", half, settings | {"alpha_pattern": {"q_proj": 2 * ALPHA}})
    wide = {n: _padded(n, t) if "q_proj" in n else t for n, t in tensors.items()}
    peft_adapters.save(folder / f"{kind}.rank_pattern", wide, settings | {"rank_pattern": {"q_proj": 2 * RANK}})


def _padded(name: str, tensor: Tensor) -> Tensor:
    """Pad a factor with zeros to twice its rank. B is also doubled, because the scale alpha / R is halved."""
    zeros = torch.zeros_like(tensor)
    return torch.cat([tensor, zeros]) if "lora_A" in name else 2 * torch.cat([tensor, zeros], 1)
