"""PEFT's adapters, as pairs of factors by the base model's matrices: written and read in the forms that PEFT has.

full    a pair a matrix, an expert's too, all named in target_modules
leaf    the same, with last names in target_modules (q_proj): what PEFT writes with transformers 4 and servers read
stack   the routed experts of a layer as two 3-D parameters (target_parameters): what PEFT needs with transformers 5

E experts, R rank of a pair.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from inputs.files import read_object, read_tensors
from weights import huggingface

Form = Literal["full", "leaf", "stack"]
PREFIX, FILE, SETTINGS = "base_model.model.", "adapter_model.safetensors", "adapter_config.json"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")
STACK = re.compile(r"\.mlp\.experts(\.base_layer)?$")
# What an adapter may also change, and here does not: key -> the values that change nothing.
PLAIN: dict[str, tuple] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
}


class Pair(NamedTuple):
    """The update of a matrix (out, in) is scale x B A."""

    a: Tensor  # (R, in)
    b: Tensor  # (out, R)
    scale: float


Pairs = dict[str, Pair]  # by the matrix of the base model, without .weight: model.layers.0.self_attn.q_proj


# ------------------------------------------------------------------------------------------------ writing


def write(folder: Path, base_model: str, arch: Architecture, pairs: Pairs, alpha: float, form: Form) -> None:
    """Write the adapter to ``folder``, which may be new. Every pair's scale must be alpha / R."""
    assert all(math.isclose(pair.scale, alpha / len(pair.a)) for pair in pairs.values())
    save(folder, tensors(arch, pairs, form), config(base_model, arch, pairs, alpha, form))


def save(folder: Path, named: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write the two files that peft.PeftModel.from_pretrained loads."""
    folder.mkdir(parents=True, exist_ok=True)
    huggingface.save_file(named, folder / FILE)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def tensors(arch: Architecture, pairs: Pairs, form: Form) -> dict[str, Tensor]:
    """The factors with the names and shapes of PEFT.

    In a stack, the factors of all experts are one 2-D pair: lora_A (E R, in) with R fastest, lora_B (out, R E) with E
    fastest. Gate and up share one A there.
    """
    found, stacks = {}, _stacks(pairs if form == "stack" else {})
    both = {fused for _, fused in stacks} == {"gate_up_proj", "down_proj"}
    for (block, fused), own in stacks.items():
        # PEFT wraps the experts once for each parameter: the wrapper of down_proj contains that of gate_up_proj.
        inner = ".base_layer" if both and fused == "gate_up_proj" else ""
        leaves = ("gate", "up") if fused == "gate_up_proj" else ("down",)
        some = next(iter(own.values()))
        a, b = [], []
        for expert in range(arch.num_experts):
            there = [own.get((expert, leaf)) for leaf in leaves]
            first = next(filter(None, there), None)
            assert all(pair is None or torch.equal(pair.a, first.a) for pair in there), "gate and up need one A"
            a.append(torch.zeros_like(some.a) if first is None else first.a)
            b.append(torch.cat([torch.zeros_like(some.b) if pair is None else pair.b for pair in there]))
        prefix = f"{PREFIX}{block}{inner}"
        found[f"{prefix}.lora_A.weight"] = torch.cat(a).contiguous()
        found[f"{prefix}.lora_B.weight"] = torch.stack(b).permute(1, 2, 0).flatten(1).contiguous()
    for name, pair in pairs.items():
        if not (stacks and EXPERT.fullmatch(name)):
            # clone: safetensors refuses tensors that share memory.
            found[f"{PREFIX}{name}.lora_A.weight"] = pair.a.contiguous().clone()
            found[f"{PREFIX}{name}.lora_B.weight"] = pair.b.contiguous().clone()
    return found


def _stacks(pairs: Pairs) -> dict[tuple[str, str], dict[tuple[int, str], Pair]]:
    """(model.layers.0.mlp.experts, gate_up_proj or down_proj) -> (expert, gate or up or down) -> its pair"""
    found: dict[tuple[str, str], dict[tuple[int, str], Pair]] = {}
    for name, pair in pairs.items():
        if match := EXPERT.fullmatch(name):
            block, expert, leaf = match.groups()
            fused = "down_proj" if leaf == "down" else "gate_up_proj"
            found.setdefault((block, fused), {})[int(expert), leaf] = pair
    return found


def config(base_model: str, arch: Architecture, pairs: Pairs, alpha: float, form: Form) -> dict[str, Any]:
    """PEFT's adapter_config.json. lora_dropout is 0, as in training.

    In a stack, all layers of the MLP are targeted as parameters: in Qwen MoE models PEFT with transformers 5 takes a
    target module called gate_proj, up_proj, down_proj or gate for the routed experts and the router of older
    checkpoints.
    """
    experts = {name: pair for name, pair in pairs.items() if EXPERT.fullmatch(name)}
    others = {name: pair for name, pair in pairs.items() if name not in experts}
    modules, parameters = _without_layer(list(others), arch), []
    if form == "stack":
        parameters = [f"{name}.weight" for name in modules if "mlp." in name]
        modules = [name for name in modules if "mlp." not in name]
    (rank,) = {len(pair.a) for pair in others.values()} or {0}
    (expert_rank,) = {len(pair.a) for pair in experts.values()} or {rank}
    # One pattern for everything but routed experts: PEFT warns of each pattern that matches no module.
    pattern = {}
    if rank and rank != expert_rank:
        pattern["|".join(map(re.escape, modules + parameters))] = rank
    if form == "stack":
        parameters += _without_layer([f"{block}.{fused}" for block, fused in _stacks(experts)], arch)
    elif form == "leaf":
        modules = sorted({name.rpartition(".")[2] for name in pairs})
    else:
        modules = list(pairs)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": expert_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # the scale is lora_alpha / R
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": modules,
        "target_parameters": parameters,
        "rank_pattern": pattern,
        "alpha_pattern": {},
        "inference_mode": True,
    }


def _without_layer(names: list[str], arch: Architecture) -> list[str]:
    """The names, but one without `model.layers.N.` for a matrix that is adapted in every layer that has it."""
    short = {name: name.split(".", 3)[3] for name in names}
    stacked = {name[: match.start(2) - 1] for name in tensor_shapes(arch) if (match := EXPERT.match(name))}
    every = [name.removesuffix(".weight") for name in tensor_shapes(arch) if name.startswith("model.layers.")]
    every += [f"{block}.{fused}" for block in stacked for fused in ("gate_up_proj", "down_proj")]
    there, adapted = (Counter(name.split(".", 3)[3] for name in of) for of in (every, names))
    return list(dict.fromkeys(short[n] if adapted[short[n]] == there[short[n]] else n for n in names))


# ------------------------------------------------------------------------------------------------ reading


def read(folder: Path, arch: Architecture) -> Pairs:
    """The pairs of a PEFT adapter for a base model of ``arch``, of any form.

    InputError for what is no LoRA, changes more than matrices of the layers, or does not fit.
    """
    settings = read_object(folder / SETTINGS, ("r", "lora_alpha"))
    for key, plain in {"peft_type": ("LORA",), **PLAIN}.items():
        if settings.get(key, plain[0]) not in plain:
            raise InputError(f"{folder / SETTINGS}: {key} is {settings[key]!r}; needed: {plain[0]!r}")
    stored, expected = read_tensors(folder / FILE), tensor_shapes(arch)
    pairs: Pairs = {}
    for name in sorted(stored):
        module, ending = name.removeprefix(PREFIX), ".lora_A.weight"
        if not module.endswith((ending, ".lora_B.weight")) or module == name:
            raise InputError(f"{folder / FILE}: {name} is no LoRA factor; needed: {PREFIX}MODULE{ending} or .lora_B")
        if not module.endswith(ending):
            continue
        module = module.removesuffix(ending)
        if (other := name.replace("lora_A", "lora_B")) not in stored:
            raise InputError(f"{folder / FILE}: {name} is there without {other}")
        a, b = stored[name].float(), stored[other].float()
        copies = arch.num_experts if STACK.search(module) else 1
        if (a.dim(), b.dim()) != (2, 2) or len(a) != b.shape[1] or len(a) % copies:
            raise InputError(
                f"{folder / FILE}: {name} is {tuple(a.shape)}, and {other} {tuple(b.shape)}; needed: a pair"
            )
        pairs |= _read_pair(module, a, b, settings, arch)
    for name, pair in pairs.items():
        shape, needed = (len(pair.b), pair.a.shape[1]), expected.get(f"{name}.weight")
        if shape != needed:
            raise InputError(
                f"{folder / FILE}: {name} is adapted as {shape}; the base model has {needed or 'no such matrix'}"
            )
    if not any(pair.b.any() for pair in pairs.values()):
        raise InputError(f"{folder / FILE}: every B is 0, or there is none; needed: an adapter that has been trained")
    return pairs


def _read_pair(module: str, a: Tensor, b: Tensor, settings: dict[str, Any], arch: Architecture) -> Pairs:
    """The pair of a module, or those of all experts of a layer."""
    block, is_stack = module.removesuffix(".base_layer"), STACK.search(module)
    is_down = is_stack and (len(b), a.shape[1]) == (arch.hidden_size, arch.expert_ffn_size)
    if is_stack:
        module = f"{block}.{'down_proj' if is_down else 'gate_up_proj'}"
    keys = (key for key in settings.get("alpha_pattern") or {} if re.match(rf"(.*\.)?({key})$", module))
    alpha, rank = settings["lora_alpha"], len(a) // (arch.num_experts if is_stack else 1)
    alpha = settings["alpha_pattern"][key] if (key := next(keys, None)) else alpha
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    if not is_stack:
        return {module: Pair(a, b, scale)}
    by_expert = zip(a.chunk(arch.num_experts), b.unflatten(1, (rank, -1)).unbind(2), strict=True)
    leaves = ("down",) if is_down else ("gate", "up")
    return {
        f"{block}.{expert}.{leaf}_proj": Pair(a_of_it, rows, scale)
        for expert, (a_of_it, b_of_it) in enumerate(by_expert)
        for leaf, rows in zip(leaves, b_of_it.chunk(len(leaves)), strict=True)
    }
