"""Converts Hugging Face safetensors to the Megatron shards of this rank and back, as a stream, with LoRA merged or not.

A Megatron weight consists of one or more Hugging Face tensors ("blocks": q, k, v or gate, up). Each block is split over
the tensor ranks, and each rank joins its shares of the blocks. A `WeightShard`, also called a slot, describes one
weight of a rank, or a stack of experts' weights. `slots` lists them, and everything below follows from this list.
Nothing is ever unpickled.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from facts.architectures import Architecture, Module, modules, tensor_shapes
from facts.exits import InputError
from hardware.quantisation import Packed, quantise
from inputs.files import first_three, read_object, read_tensors
from knobs import ModelConfig
from lora_megatron import Adapter, attached, merged_parts
from model import megatron_model
from model.megatron_model import GroupedLinear
from parallel_setup import Parallel, gather

ADAPTER_ENDINGS = (".safetensors", ".bin", ".json")
DTYPES = ("float32", "bfloat16", "float16")  # dtypes of model files
MESSAGE = 2**24  # maximum number of elements in one all-gather: small experts are gathered together to save latency


@dataclass(frozen=True)
class WeightShard:
    """One Megatron weight of this rank and the Hugging Face tensors that it consists of."""

    stored: Tensor | Packed  # the shard of this rank; for routed experts a stack
    names: tuple[str, ...]  # names of the blocks, in the order in which they are joined; in a stack, expert by expert
    shard_dim: int | None = None  # dimension of the Hugging Face tensors that tensor ranks split; None: not split
    qkv_groups: int = 0  # > 0: the rows of q, k and v are interleaved by key/value group, which is Megatron's order
    experts: slice | None = None  # local numbers of routed experts
    adapter: Adapter | None = None  # the LoRA module, once attached
    kind: str = ""  # kind of the module; empty for embedding, final norm and head

    @property
    def is_expert(self) -> bool:
        return self.experts is not None

    @property
    def weight(self) -> Tensor:
        """The shard, or for int4 experts the weights that the codes represent. A stack of e experts is (e, in, out)."""
        return self.stored if isinstance(self.stored, Tensor) else self.stored.dequantised().mT

    def rows(self, every: int) -> Tensor:
        """Return every n-th row of `weight`, with n = ``every``. For int4 experts, only these rows are dequantised."""
        if isinstance(self.stored, Tensor):
            return self.stored[..., ::every, :]
        return self.stored.inputs(every).mT

    def held(self) -> dict[str, Tensor]:
        """Return the tensors that store the shard: the shard itself, or the codes and scales of int4 experts.

        The keys are suffixes for the name of the weight; for the shard itself, the suffix is "".
        """
        if isinstance(self.stored, Tensor):
            return {"": self.stored}
        return {" (codes)": self.stored.codes, " (scales)": self.stored.scales}

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """For each matrix, the names of its blocks. A stack has one matrix for each expert."""
        size = len(self.names) // (1 if self.experts is None else self.experts.stop - self.experts.start)
        return [self.names[first : first + size] for first in range(0, len(self.names), size)]


# ------------------------------------------------------------------------------------------------ the map


def own_experts(arch: Architecture, parallel: Parallel) -> range:
    """Return the numbers of this rank's experts, which are the same in every layer."""
    local = arch.num_experts // parallel.expert
    return range(parallel.expert_rank * local, (parallel.expert_rank + 1) * local)


def slots(model: torch.nn.Module, arch: Architecture, parallel: Parallel) -> Iterator[WeightShard]:
    """Yield every weight of this rank in the order of the layers.

    All ranks have the same number and order of weights.
    """
    experts = own_experts(arch, parallel)
    yield WeightShard(model.embedding.word_embeddings.weight, ("model.embed_tokens.weight",), 0)
    for i, layer in enumerate(model.decoder.layers):
        adapters = {name.removesuffix(".lora"): adapter for name, adapter in attached(layer).items()}
        held = _base_weights(layer)
        for module in modules(arch, arch.moe_layers[i]):
            adapter = adapters.get(module.megatron.removesuffix(".weight"))
            groups = arch.num_kv_heads // parallel.tensor if module.target == "linear_qkv" else 0
            for kind in ("weight", "bias")[: 1 + module.bias]:
                stored = held.pop(module.megatron.replace(".weight", f".{kind}"))
                names = tuple(f"model.layers.{i}.{block}.{kind}" for block in module.blocks)
                if module.kind == "experts":
                    yield from _expert_slots(stored, names, module, experts, adapter)
                    continue
                owner = adapter if kind == "weight" else None
                yield WeightShard(stored, names, module.split, groups, adapter=owner, kind=module.kind)
        assert not held, held.keys()
    yield WeightShard(model.decoder.final_layernorm.weight, ("model.norm.weight",))
    if not arch.tied_head:
        yield WeightShard(model.output_layer.weight, ("lm_head.weight",), 0)


def _base_weights(layer: torch.nn.Module) -> dict[str, Tensor | Packed]:
    """Return a layer's frozen weights by the names that they have in a model without LoRA."""
    held: dict[str, Tensor | Packed] = {
        f"{name.replace('.base', '')}.weight": module.packed
        for name, module in layer.named_modules()
        if isinstance(module, GroupedLinear) and module.quantisation != "none"
    }
    weights = ((name, x) for name, x in layer.named_parameters() if not name.endswith((".A", ".B")))
    return held | {name.replace(".base.", "."): x for name, x in weights}


def _expert_slots(
    stored: Tensor | Packed, names: tuple[str, ...], module: Module, experts: range, adapter: Adapter | None
) -> Iterator[WeightShard]:
    """Yield a slot for each stack of a layer's routed experts that LoRA merges in one product.

    Each {} in ``names`` is replaced with the number of an expert.
    """
    for part in merged_parts(stored.shape):
        own = tuple(name.format(number) for number in experts[part] for name in names)
        yield WeightShard(stored[part], own, module.split, experts=part, adapter=adapter, kind=module.kind)


def interleave_qkv(rows: Tensor, groups: int, arch: Architecture) -> Tensor:
    """Convert [all q; all k; all v] to Megatron's order: for each key/value group [its q heads; k; v].

    (rows, ...) -> same shape
    """
    q_size, d = arch.num_heads // arch.num_kv_heads * arch.head_dim, arch.head_dim
    blocks = rows.split([groups * q_size, groups * d, groups * d])
    return torch.cat([block.view(groups, -1, *rows.shape[1:]) for block in blocks], dim=1).view(rows.shape)


def separate_qkv(rows: Tensor, groups: int, arch: Architecture) -> Tensor:
    """Convert Megatron's order back to [all q; all k; all v]. This undoes interleave_qkv."""
    q_size, d = arch.num_heads // arch.num_kv_heads * arch.head_dim, arch.head_dim
    by_group = rows.view(groups, q_size + 2 * d, *rows.shape[1:]).split([q_size, d, d], dim=1)
    return torch.cat([block.reshape(-1, *rows.shape[1:]) for block in by_group])


# ------------------------------------------------------------------------------------------------ loading


def read_model(model_dir: str | Path, arch: Architecture) -> dict[str, Tensor]:
    """Return the tensors of ``model_dir`` by name, with separate tensors for each routed expert (`by_expert`).

    The files are memory-mapped, so only tensors that are used are read from the disk. Raises InputError unless the
    names and shapes are exactly those of the architecture, and every dtype is in DTYPES.
    """
    stored: dict[str, Tensor] = {}
    for path in _weight_files(Path(model_dir)):
        of_this_file = read_tensors(path)
        if twice := of_this_file.keys() & stored.keys():
            raise InputError(f"{path}: {min(twice)} is also in another file of this directory; keep one of them")
        stored |= of_this_file
    stored = by_expert(stored)
    if problems := _misfits(stored, tensor_shapes(arch)):
        raise InputError(f"{model_dir}: weights do not fit config.json: {'; '.join(problems[:3])}")
    return stored


def _misfits(stored: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> list[str]:
    """Return a message for all missing names, one for all surplus names, and one for each wrong shape or dtype."""
    unmatched = {
        "missing": [name for name in expected if name not in stored],
        "not part of this architecture": [name for name in stored if name not in expected],
    }
    problems = [f"{label}: {first_three(names)}" for label, names in unmatched.items() if names]
    for name in (name for name in expected if name in stored):
        shape, dtype = stored[name].shape, str(stored[name].dtype).removeprefix("torch.")
        if shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, but config.json needs {list(expected[name])}")
        elif dtype not in DTYPES:
            problems.append(f"{name} has dtype {dtype}; supported: {', '.join(DTYPES)}")
    return problems


def by_expert(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name, with separate tensors for each routed expert.

    transformers 5 stores all experts of a layer in two tensors, gate_up_proj (E, 2 w, h) and down_proj (E, h, w). In
    gate_up_proj, the rows of an expert's gate are before those of its up. E is the number of experts, w their width,
    and h the hidden size. Raises InputError if an expert's matrix is stored in both ways.
    """
    single, split = {}, {}
    for name, tensor in stored.items():
        layer, _, fused = name.partition(".mlp.experts.")
        if fused not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            single[name] = tensor
            continue
        blocks = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
        for expert, matrix in enumerate(tensor):
            for block, rows in zip(blocks, matrix.tensor_split(len(blocks)), strict=True):
                split[f"{layer}.mlp.experts.{expert}.{block}.weight"] = rows
    if twice := single.keys() & split.keys():
        raise InputError(f"model.path: {min(twice)} is stored alone and in the tensor of all experts; keep one of them")
    return single | split


def _weight_files(model_dir: Path) -> list[Path]:
    """Return the paths of the weight files.

    Raises InputError if a file is missing, or if an adapter or other weights are in the same folder.
    """
    if adapters := sorted(path.name for path in model_dir.glob("adapter_*") if path.suffix in ADAPTER_ENDINGS):
        raise InputError(f"{model_dir}: {adapters[0]}: is a LoRA adapter next to the weights; merge it or remove it")
    index = model_dir / "model.safetensors.index.json"
    there = {path.name for path in model_dir.glob("*.safetensors")}
    if not there:
        raise InputError(f"model.path: no *.safetensors in {model_dir}; convert the weights (*.bin is never opened)")
    if index.exists():
        try:
            named = set(read_object(index, ("weight_map",))["weight_map"].values())
        except (TypeError, AttributeError) as error:
            raise InputError(f"{index}: not a valid weight index ({error})") from None
        if missing := named - there:
            raise InputError(f"{index}: names {min(map(str, missing))}, which is not in {model_dir}")
        if others := sorted(there - named):
            raise InputError(
                f"{model_dir}: {first_three(others)}: not in {index.name}, so these are other weights; keep one set"
            )
    return [model_dir / name for name in sorted(there)]


def unread_weights(model_dir: Path) -> list[str]:
    """Return the names of weight files in other formats, which are never opened."""
    return sorted(path.name for path in model_dir.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))


def load_model(cfg: ModelConfig, arch: Architecture, parallel: Parallel) -> torch.nn.Module:
    """Build this rank's shards of Megatron's model, and fill them with `load`, which may raise InputError."""
    model = megatron_model.build_for(cfg, arch, parallel)
    load(model, arch, parallel, cfg.path)
    return model


@torch.no_grad()
def load(model: torch.nn.Module, arch: Architecture, parallel: Parallel, model_dir: str | Path) -> None:
    """Fill the shards of this rank from the safetensors of ``model_dir``. Only the slices for this rank are read.

    Raises InputError if a tensor is missing, surplus, unreadable or non-finite, or has a wrong shape or dtype. The
    message names the tensor.
    """
    from tqdm import tqdm

    tensors = read_model(model_dir, arch)
    todo = list(slots(model, arch, parallel))
    matrices = [(slot, index, names) for slot in todo for index, names in enumerate(slot.blocks)]
    silent = None if parallel.rank == 0 else True
    for slot, index, names in tqdm(matrices, desc="loading weights", disable=silent, leave=False):
        stored = slot.stored[index] if slot.is_expert else slot.stored
        blocks = [tensors[name] for name in names]
        if slot.shard_dim is not None:
            blocks = [block.chunk(parallel.tensor, slot.shard_dim)[parallel.tensor_rank] for block in blocks]  # views
        value = (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).to(stored.dtype)
        if not (value.sum().isfinite() or value.isfinite().all()):  # a sum takes a tenth of the time
            dtype = str(value.dtype).removeprefix("torch.")
            raise InputError(f"{model_dir}: {' or '.join(names)} has values that are not finite in {dtype}")
        if isinstance(stored, Packed):
            packed = quantise(value.to(stored.codes.device))
            stored.copy_(packed.checked(f"{model_dir}: {' or '.join(names)}"))
            continue
        if slot.qkv_groups:
            value = interleave_qkv(value, slot.qkv_groups, arch)
        stored.copy_(value.t() if slot.is_expert else value)


# ------------------------------------------------------------------------------------------------ export


@torch.no_grad()
def export(
    model: torch.nn.Module,
    arch: Architecture,
    parallel: Parallel,
    *,
    only: Collection[str] | None = None,
    merge: bool = True,
    experts: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole tensor of the model under its Hugging Face name, layer by layer, with LoRA merged if ``merge``.

    A merged weight is W + (alpha / R) B A, computed in fp32 from the untouched base and cast once to the model's dtype.
    Every rank must consume the whole stream, because the ranks gather the tensors together. Every rank gets the same
    tensors. From every rank, as many experts as MESSAGE allows are gathered at a time, but at least one.
    With ``only``, the stream has the tensors with these names, and, if ``merge`` is true, those that LoRA changes.
    Tensors that an engine fuses with any of these are included. Without ``experts``, the routed experts are left out.
    Do not write into a tensor, because it may share memory with the model.
    """
    todo = list(slots(model, arch, parallel))
    if only is not None:
        todo = changing(todo, only, merge, experts)
    for slot in todo:
        value = merged(slot) if merge else slot.weight.to(parallel.device)  # frozen experts may be on the host
        if slot.experts is None:
            yield from _whole(slot, value, slot.names, arch, parallel)
            continue
        at_once = max(1, MESSAGE // (parallel.expert * value[0].numel()))
        index, first = slot.experts.start, slot.blocks[0]
        for message in value.split(at_once):
            by_rank = gather(message, parallel.expert, parallel.expert_group)
            for local in range(len(message)):
                for rank, peer in enumerate(by_rank):
                    number = rank * (arch.num_experts // parallel.expert) + index
                    names = tuple(re.sub(r"experts\.\d+", f"experts.{number}", name) for name in first)
                    yield from _whole(slot, peer[local].t(), names, arch, parallel)
                index += 1


def changing(
    todo: list[WeightShard], only: Collection[str], adapted: bool = True, experts: bool = True
) -> list[WeightShard]:
    """Return the slots with a tensor in ``only``, and also, if ``adapted`` is true, all slots that have LoRA.

    Slots that an engine fuses with any of these are included. Without ``experts``, the routed experts are left out.
    """
    todo = [slot for slot in todo if experts or not slot.is_expert]
    wanted = {
        fused_group(slot.names[0])
        for slot in todo
        if (adapted and slot.adapter) or any(name in only for name in slot.names)
    }
    return [slot for slot in todo if fused_group(slot.names[0]) in wanted]


def merged(slot: WeightShard) -> Tensor:
    """Return this rank's shard of W + (alpha / R) B A, or of W if the slot has no LoRA.

    The sum is computed in fp32 from the untouched base, and cast once.
    """
    if slot.adapter is None:
        return slot.weight
    return slot.adapter.merged(slot.weight, slot.experts)


def fused_group(name: str) -> str:
    """Return the name of the engine's fused module that contains the Hugging Face tensor ``name``.

    The tensors of a fused module can only change together. Engines fuse q, k, v and their biases, gate and up, and all
    three matrices of all experts of a layer.
    """
    name = re.sub(r"\.self_attn\.[qkv]_proj\.(weight|bias)$", ".self_attn.qkv_proj", name)
    name = re.sub(r"\.mlp\.experts\..+$", ".mlp.experts", name)
    return re.sub(r"\.(gate|up)_proj\.weight$", ".gate_up_proj", name)


def _whole(
    slot: WeightShard, value: Tensor, names: tuple[str, ...], arch: Architecture, parallel: Parallel
) -> Iterator[tuple[str, Tensor]]:
    """Gather ``value``, this rank's joined shares of blocks, and yield the whole blocks with their ``names``.

    All tensor ranks call this together.
    """
    if slot.qkv_groups:
        value = separate_qkv(value, slot.qkv_groups, arch)
    by_rank = gather(value, parallel.tensor if slot.shard_dim is not None else 1, parallel.tensor_group)
    if len(names) == 1:
        yield names[0], by_rank[0] if len(by_rank) == 1 else torch.cat(list(by_rank), slot.shard_dim)
        return
    sizes = [value.shape[0] // 2] * 2  # gate, up
    if slot.qkv_groups:
        kv = slot.qkv_groups * arch.head_dim
        sizes = [len(value) - 2 * kv, kv, kv]
    for name, blocks in zip(names, zip(*(shard.split(sizes) for shard in by_rank), strict=True), strict=True):
        yield name, torch.cat(blocks) if len(blocks) > 1 else blocks[0]


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the read and write permissions of its folder.

    safetensors itself lets only the owner read the file.
    """
    import safetensors.torch

    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)


def save_model(tensors: Iterator[tuple[str, Tensor]], out_dir: Path, shard_bytes: int = 4 * 2**30) -> None:
    """Write a stream of named tensors as safetensors files of at most ``shard_bytes`` each.

    If there are several files, an index is written as well.
    """
    batch: dict[str, Tensor] = {}
    paths, weight_map, total = [], {}, 0

    def flush() -> None:
        path = out_dir / f"model-{len(paths) + 1:05d}.safetensors"
        save_file(batch, path)
        paths.append(path)
        weight_map.update(dict.fromkeys(batch, path.name))
        batch.clear()

    for name, tensor in tensors:
        if batch and sum(held.nbytes for held in batch.values()) + tensor.nbytes > shard_bytes:
            flush()
        batch[name] = tensor.cpu().contiguous().clone()  # on the host, until the file is full
        total += tensor.nbytes
    flush()
    index = out_dir / "model.safetensors.index.json"
    if len(paths) == 1:
        index.unlink(missing_ok=True)  # a reader would follow an older index
        paths[0].rename(out_dir / "model.safetensors")
    else:
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n")
