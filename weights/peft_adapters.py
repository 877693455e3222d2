"""Reads and writes PEFT adapters in all forms that PEFT has. In memory, each adapted matrix has a `Pair` of factors.

full    a pair for each matrix, including each expert's; target_modules contains their full names
leaf    the same, but target_modules contains only last names (q_proj); PEFT with transformers 4 writes this form
stack   the routed experts of a layer are two 3-D parameters (target_parameters); needed for PEFT with transformers 5

Inference servers read the form leaf. E is the number of experts, and R the rank of a pair of factors.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from inputs.files import read_object, read_tensors, validated
from weights import huggingface

Form = Literal["full", "leaf", "stack"]
PREFIX, FILE, SETTINGS = "base_model.model.", "adapter_model.safetensors", "adapter_config.json"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")
FACTOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight")
STACK = re.compile(r"\.mlp\.experts(\.base_layer)?$")
# Keys for other changes to a model, which are not supported here -> the values with which nothing changes.
PLAIN: dict[str, tuple] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None, [], {}),
}


class Pair(NamedTuple):
    """The factors of a matrix (out, in), whose update is scale x B A."""

    a: Tensor  # (R, in)
    b: Tensor  # (out, R)
    scale: float


Pairs = dict[str, Pair]  # keys: matrices of the base model without .weight, such as model.layers.0.self_attn.q_proj


# ------------------------------------------------------------------------------------------------ writing


def write(folder: Path, base_model: str, arch: Architecture, pairs: Pairs, alpha: float, form: Form) -> None:
    """Write the adapter to ``folder``, which is created if needed. The scale of every pair must be alpha / R."""
    assert all(math.isclose(pair.scale, alpha / len(pair.a)) for pair in pairs.values())
    save(folder, tensors(arch, pairs, form), config(base_model, arch, pairs, alpha, form))


def save(folder: Path, named: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write the two files that peft.PeftModel.from_pretrained loads."""
    folder.mkdir(parents=True, exist_ok=True)
    huggingface.save_file(named, folder / FILE)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def tensors(arch: Architecture, pairs: Pairs, form: Form) -> dict[str, Tensor]:
    """Return the factors with the names and shapes that PEFT gives them.

    In a stack, the factors of all experts form one 2-D pair, and gate and up must share one A. lora_A is (E R, in), in
    which R varies fastest. lora_B is (out, R E), in which E varies fastest.
    """
    found, stacks = {}, _stacks(pairs if form == "stack" else {})
    both = {fused for _, fused in stacks} == {"gate_up_proj", "down_proj"}
    for (block, fused), own in stacks.items():
        # PEFT wraps the experts once for each parameter: the wrapper of down_proj contains that of gate_up_proj.
        inner = ".base_layer" if both and fused == "gate_up_proj" else ""
        a, b = _joined(own, _leaves(fused), arch.num_experts)
        prefix = f"{PREFIX}{block}{inner}"
        found[f"{prefix}.lora_A.weight"] = torch.cat(a).contiguous()
        found[f"{prefix}.lora_B.weight"] = torch.stack(b).permute(1, 2, 0).flatten(1).contiguous()
    for name, pair in pairs.items():
        if not (stacks and EXPERT.fullmatch(name)):
            # clone: safetensors refuses tensors that share memory.
            found[f"{PREFIX}{name}.lora_A.weight"] = pair.a.contiguous().clone()
            found[f"{PREFIX}{name}.lora_B.weight"] = pair.b.contiguous().clone()
    return found


def _leaves(fused: str) -> tuple[str, ...]:
    """Return the names of the matrices of an expert in the 3-D parameter ``fused``: gate and up, or down."""
    return ("gate", "up") if fused == "gate_up_proj" else ("down",)


def _joined(
    own: dict[tuple[int, str], Pair], leaves: tuple[str, ...], num_experts: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return one A and one B for each expert. B joins the rows of all ``leaves``. Missing factors become zeros."""
    some = next(iter(own.values()))
    a, b = [], []
    for expert in range(num_experts):
        there = [own.get((expert, leaf)) for leaf in leaves]
        first = next(filter(None, there), None)
        assert all(pair is None or torch.equal(pair.a, first.a) for pair in there), "gate and up need one A"
        a.append(torch.zeros_like(some.a) if first is None else first.a)
        b.append(torch.cat([torch.zeros_like(some.b) if pair is None else pair.b for pair in there]))
    return a, b


def _stacks(pairs: Pairs) -> dict[tuple[str, str], dict[tuple[int, str], Pair]]:
    """Group the pairs of the routed experts by the 3-D parameter that contains their matrices.

    The result maps (model.layers.0.mlp.experts, gate_up_proj or down_proj) to {(expert, gate or up or down): pair}.
    """
    found: dict[tuple[str, str], dict[tuple[int, str], Pair]] = {}
    for name, pair in pairs.items():
        if match := EXPERT.fullmatch(name):
            block, expert, leaf = match.groups()
            fused = "down_proj" if leaf == "down" else "gate_up_proj"
            found.setdefault((block, fused), {})[int(expert), leaf] = pair
    return found


def config(base_model: str, arch: Architecture, pairs: Pairs, alpha: float, form: Form) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json. lora_dropout is 0, as in training.

    With the form stack, all matrices of the MLP are targeted as parameters, because PEFT with transformers 5 would
    misread some target modules. In Qwen MoE models, it mistakes gate_proj, up_proj, down_proj and gate for the routed
    experts and the router of older checkpoints.
    """
    expert_rank, pattern = _ranks(pairs, arch, form)
    modules, parameters = _targets(pairs, arch, form)
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


def _ranks(pairs: Pairs, arch: Architecture, form: Form) -> tuple[int, dict[str, int]]:
    """Return the values of r and rank_pattern in adapter_config.json.

    If routed experts are adapted, r is their rank, and the pattern gives the rank of all other matrices. There is only
    one pattern, because PEFT warns about each pattern that matches no module.
    """
    (rank,) = {len(pair.a) for name, pair in pairs.items() if not EXPERT.fullmatch(name)} or {0}
    (expert_rank,) = {len(pair.a) for name, pair in pairs.items() if EXPERT.fullmatch(name)} or {rank}
    if rank in (0, expert_rank):
        return expert_rank, {}
    modules, parameters = _beside_experts(pairs, arch, form)
    return expert_rank, {"|".join(map(re.escape, modules + parameters)): rank}


def _targets(pairs: Pairs, arch: Architecture, form: Form) -> tuple[list[str], list[str]]:
    """Return the values of target_modules and target_parameters in adapter_config.json."""
    if form == "leaf":
        return sorted({name.rpartition(".")[2] for name in pairs}), []
    if form == "full":
        return list(pairs), []
    modules, parameters = _beside_experts(pairs, arch, form)
    return modules, parameters + _without_layer([f"{block}.{fused}" for block, fused in _stacks(pairs)], arch)


def _beside_experts(pairs: Pairs, arch: Architecture, form: Form) -> tuple[list[str], list[str]]:
    """Return the target modules and target parameters outside the routed experts, with names from `_without_layer`."""
    names = _without_layer([name for name in pairs if not EXPERT.fullmatch(name)], arch)
    if form != "stack":
        return names, []
    return [name for name in names if "mlp." not in name], [f"{name}.weight" for name in names if "mlp." in name]


def _without_layer(names: list[str], arch: Architecture) -> list[str]:
    """Return the names, each only once, and shortened if possible.

    If a matrix is adapted in every layer that has it, `model.layers.N.` is removed from its names.
    """
    short = {name: name.split(".", 3)[3] for name in names}
    stacked = {name[: match.start(2) - 1] for name in tensor_shapes(arch) if (match := EXPERT.match(name))}
    every = [name.removesuffix(".weight") for name in tensor_shapes(arch) if name.startswith("model.layers.")]
    every += [f"{block}.{fused}" for block in stacked for fused in ("gate_up_proj", "down_proj")]
    there, adapted = (Counter(name.split(".", 3)[3] for name in of) for of in (every, names))
    return list(dict.fromkeys(short[n] if adapted[short[n]] == there[short[n]] else n for n in names))


# ------------------------------------------------------------------------------------------------ reading


def _pattern(text: str) -> re.Pattern:
    """Compile the pattern that PEFT compares with a module's name. Raises ValueError if this is not possible."""
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression ({error})") from None


Pattern = Annotated[re.Pattern, BeforeValidator(_pattern)]
Rank = Annotated[int, Field(ge=1, le=2**16)]
Alpha = Annotated[float, Field(gt=0, le=2**24)]


class Settings(BaseModel):
    """The keys of adapter_config.json with which programs find and scale the factors. PLAIN has the other keys."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: dict[Pattern, Rank] | None = None
    alpha_pattern: dict[Pattern, Alpha] | None = None
    target_modules: str | list[str] | None = None
    target_parameters: list[str] | None = None
    base_model_name_or_path: str | None = None
    lora_dropout: float = 0.0
    inference_mode: bool = False

    @property
    def largest_rank(self) -> int:
        return max(self.r, *(self.rank_pattern or {}).values(), 0)


def read_settings(folder: Path) -> Settings:
    """Return the settings in the adapter_config.json of ``folder``.

    Raises InputError if the adapter is not LoRA, makes changes that are not supported (PLAIN), or has invalid values.
    """
    path = folder / SETTINGS
    content = read_object(path)
    for key, plain in {"peft_type": ("LORA",), **PLAIN}.items():
        if content.get(key, plain[0]) not in plain:
            raise InputError(f"{path}: {key} is {content[key]!r}; give an adapter in which it is {plain[0]!r}")
    return validated(Settings, content, path)


def read(folder: Path, arch: Architecture) -> Pairs:
    """Return the pairs of a PEFT adapter for a base model of ``arch``, in any form.

    Raises InputError if the adapter is not LoRA, changes more than matrices of the layers, or contradicts itself. It is
    also refused if it does not fit ``arch``, or has not been trained (every B is 0).
    """
    settings, path, expected = read_settings(folder), folder / FILE, tensor_shapes(arch)
    pairs: Pairs = {}
    for module, (a, b) in _factors(path).items():
        for name, pair in _read_pair(f"{path}: {module}", module, a, b, settings, arch).items():
            shape, needed = (len(pair.b), pair.a.shape[1]), expected.get(f"{name}.weight")
            if shape != needed:
                raise InputError(
                    f"{path}: {name} is adapted as {shape}; the base model has {needed or 'no such matrix'}"
                )
            if name in pairs:
                raise InputError(f"{path}: {name} is adapted twice; keep one pair for each matrix")
            pairs[name] = pair
    if not any(pair.b.any() for pair in pairs.values()):
        raise InputError(f"{path}: every B is 0, or there is none; give an adapter that has been trained")
    return pairs


def _factors(path: Path) -> dict[str, list[Tensor]]:
    """Return [A, B] of every module in fp32. Raises InputError unless each module has both, with finite values."""
    found: dict[str, list[Tensor]] = {}
    for name, factor in sorted(read_tensors(path).items()):
        match = FACTOR.fullmatch(name)
        if not match:
            raise InputError(f"{path}: {name} is no LoRA factor; name it {PREFIX}MODULE.lora_A.weight or .lora_B")
        if not (factor.is_floating_point() and factor.float().isfinite().all()):
            raise InputError(f"{path}: {name} has {factor.dtype} values that are not all finite real numbers")
        found.setdefault(match[1], []).append(factor.float())
    if alone := [module for module, factors in found.items() if len(factors) == 1]:
        raise InputError(f"{path}: {alone[0]} has only one of lora_A and lora_B; give both factors")
    return found


def _read_pair(where: str, module: str, a: Tensor, b: Tensor, settings: Settings, arch: Architecture) -> Pairs:
    """Return the pair of a module, or the pairs of all experts if ``module`` is a stack.

    Raises InputError unless the factors ``a`` and ``b`` fit the settings. ``where`` names the file and the module in
    the message.
    """
    block, is_stack = module.removesuffix(".base_layer"), STACK.search(module)
    copies = arch.num_experts if is_stack else 1
    if (a.dim(), b.dim()) != (2, 2) or len(a) != b.shape[1] or len(a) % copies:
        raise InputError(f"{where}: lora_A is {tuple(a.shape)} and lora_B {tuple(b.shape)}; give two that form a pair")
    is_down = (len(b), a.shape[1]) == (arch.hidden_size, arch.expert_ffn_size)
    fused = "down_proj" if is_down else "gate_up_proj"
    name, rank = f"{block}.{fused}" if is_stack else module, len(a) // copies
    if rank != (needed := _of_pattern(settings.rank_pattern, name, settings.r)):
        raise InputError(f"{where}: its factors have rank {rank}, but {SETTINGS} says {needed}")
    alpha = _of_pattern(settings.alpha_pattern, name, settings.lora_alpha)
    scale = alpha / (rank**0.5 if settings.use_rslora else rank)
    if not is_stack:
        return {module: Pair(a, b, scale)}
    by_expert = zip(a.chunk(copies), b.unflatten(1, (rank, -1)).unbind(2), strict=True)
    leaves = _leaves(fused)
    return {
        f"{block}.{expert}.{leaf}_proj": Pair(a_of_it, rows, scale)
        for expert, (a_of_it, b_of_it) in enumerate(by_expert)
        for leaf, rows in zip(leaves, b_of_it.tensor_split(len(leaves)), strict=True)
    }


def _of_pattern(patterns: dict[re.Pattern, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches ``module`` or its weight, or ``default`` if none does."""
    for pattern, value in (patterns or {}).items():
        if pattern.match(module) or pattern.match(f"{module}.weight"):
            return value
    return default
