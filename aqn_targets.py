"""Which tensors take the noise of AQN (aqn.py): the norms, and the matrices that read a norm's output.

A matrix that must not see the noise of its norm gets the inverse in its columns: (W diag(w / (w + d))) ((w + d) x) =
W (w x). A matrix that alone must see it gets (w + d) / w in its columns, and the norm stays clean. w clean norm weight
(h,), d its noise (h,), W a matrix that reads the norm's output (out, h), h hidden size. Names are Hugging Face's.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hf_config import Architecture
from input_files import InputError
from weights_hf import tensor_shapes

ROLES = ("attention", "experts", "mlp", "router")
NORM = "norm.weight"  # the names of all RMSNorms end so, and no other name does


@dataclass(frozen=True)
class NormNoise:
    """What the noise of one norm changes: the norm itself, or only the columns of the `scaled` matrices."""

    noisy: bool = True
    restored: tuple[str, ...] = ()  # matrices that must not see the noise of a noisy norm: columns times w / (w + d)
    scaled: tuple[str, ...] = ()  # matrices that alone see the noise of a clean norm: columns times (w + d) / w


def norm_targets(arch: Architecture, targets: Collection[str], *, router: str) -> dict[str, NormNoise]:
    """Norm name -> what its noise changes, in the order of the checkpoint.

    attention   input_layernorm of every layer, which feeds q, k and v.
    experts     post_attention_layernorm of every MoE layer, for its routed experts.
    mlp         post_attention_layernorm of every dense layer. In a MoE layer, the same norm for the shared expert: its
                gate_proj, up_proj and shared_expert_gate see the noise. Without `experts` the norm itself stays clean
                and the noise is in their columns. `experts` without `mlp` takes the noise out of their columns.
    router      the gate of every MoE layer, in its columns. Alone, it makes the disturbance that routing replay is for.
    a pattern   (fnmatch) of whole names, such as model.layers.3.*_layernorm.weight: everything that reads those norms
                sees the noise. q_norm, k_norm and the final norm can only be named so.
    With ``router`` clean, the columns of every MoE layer's gate take the noise of its norm out; with noisy, the gate
    sees what the routed experts see. The compensation is exact in fp32. In bf16, rounding leaves a part of the noise:
    in rms 14 % at sigma 0.01 and 40 % at 0.001 (w = 1). With 128 experts and 8 a token, 2 % of the tokens then change
    one of their experts at sigma 0.01, and 9 % with noisy.

    Raises InputError for a target that touches nothing, for a pattern that matches a tensor which is not the weight of
    an RMSNorm, and for the target router where ``router`` is clean.
    """
    if "router" in targets and router == "clean":
        raise InputError("aqn.targets: found router while aqn.router is clean; needed: one of the two")
    readers: dict[str, set[str]] = {}  # norm -> all, or of a MoE layer those of experts, router, shared that see noise
    for target in targets:
        for norm, reader in _norms_of(arch, target).items():
            readers.setdefault(norm, set()).add(reader)
    return {norm: _effect(arch, norm, readers[norm], router) for norm in tensor_shapes(arch) if norm in readers}


def touched_names(plan: Mapping[str, NormNoise]) -> set[str]:
    """The names of all tensors that noise of any sigma changes. A push with noise, or back to clean, brings them."""
    return {name for norm, effect in plan.items() for name in (norm,) * effect.noisy + effect.restored + effect.scaled}


def _norms_of(arch: Architecture, target: str) -> dict[str, str]:
    """The norms of a target -> which reader sees their noise: all, or in a MoE layer experts, router or shared."""
    names = list(tensor_shapes(arch))
    if target not in ROLES:
        matched = [name for name in names if fnmatchcase(name, target)]
        others = [name for name in matched if not name.endswith(NORM)]
        if len(matched) == len(others):
            raise InputError(
                f"aqn.targets: {target!r} matches no RMSNorm of this {arch.model_type} model; needed: "
                f"{', '.join(ROLES)}, or a pattern of whole names such as "
                + next(name for name in names if name.endswith(NORM))
            )
        if others:
            raise InputError(f"aqn.targets: {target!r} matches {others[0]}, which is not the weight of an RMSNorm")
        return dict.fromkeys(matched, "all")
    if target == "attention":
        return {name: "all" for name in names if name.endswith(".input_layernorm.weight")}
    before_mlp = {
        f"model.layers.{i}.post_attention_layernorm.weight": is_moe for i, is_moe in enumerate(arch.moe_layers)
    }
    if target == "mlp":
        found = {
            norm: "shared" if is_moe else "all"
            for norm, is_moe in before_mlp.items()
            if arch.shared_expert_ffn_size or not is_moe
        }
    else:
        found = {norm: target for norm, is_moe in before_mlp.items() if is_moe}
    if not found:
        lacks = "dense layer and no shared expert" if target == "mlp" else "MoE layer"
        raise InputError(f"aqn.targets: {target} touches no norm: this {arch.model_type} model has no {lacks}")
    return found


def _effect(arch: Architecture, norm: str, readers: set[str], router: str) -> NormNoise:
    """What the noise of ``norm`` changes if only ``readers`` may see it (see _norms_of)."""
    found = re.fullmatch(r"(model\.layers\.(\d+)\.)post_attention_layernorm\.weight", norm)
    if not found or not arch.moe_layers[int(found[2])]:
        return NormNoise()
    gate = (f"{found[1]}mlp.gate.weight",)
    shared = tuple(
        f"{found[1]}mlp.{name}.weight"
        for name in ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate")
        if arch.shared_expert_ffn_size
    )
    if readers <= {"router", "shared"}:
        return NormNoise(noisy=False, scaled=gate * ("router" in readers) + shared * ("shared" in readers))
    return NormNoise(restored=gate * (router == "clean") + shared * (not readers & {"shared", "all"}))
