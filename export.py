"""Writes a run's adapters for other programs: a merged Hugging Face model, or a PEFT adapter.

    python export.py RUN --merged DIR | --adapter DIR [--step N]       N steps done; without it the newest checkpoint
    python export.py RUN|DIR --ask "QUESTION"                          the answer of a run or of its merged model

It is one process on the CPU, which handles one tensor at a time, without Megatron, transformers or peft. The files are
read back and checked (names, shapes, finite values) before DIR gets its name. tests/runs/test_one_policy.py shows that
transformers and peft compute the trainer's log-probabilities from them. E experts, R the rank of a pair.
"""

import argparse
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# PYTHONSAFEPATH and `python -P` leave the folder of this file out.
sys.path.insert(0, __file__.rpartition("/")[0])

import torch
from safetensors import SafetensorError
from torch import Tensor

import lora_megatron
from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from hardware import device as devices
from hardware import quantisation as quantised
from inputs import hf_config
from inputs.config import changed_keys, command, load_recorded, to_dict
from inputs.files import first_names, read_bytes, read_object, read_tensors, refuse_used, whole_folder
from knobs import Config, LoraConfig, ModelConfig
from runlog.run_record import changed_inputs, input_files, refuse_changed_inputs
from weights import checkpoint, huggingface
from weights.adapter_weights import Adapted, adapted_modules

COPIED = """generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    vocab.json merges.txt tokenizer.model chat_template.jinja chat_template.json LICENSE""".split()

RUN_CONFIG = "run_config.yaml"  # in a merged model: config.yaml of its run, which says how to ask it


# ------------------------------------------------------------------------------------------------ reading the run


def read_policy(
    run_dir: Path, step: int | None, accept_changed_inputs: bool
) -> tuple[Config, checkpoint.Checkpoint, list[str], Architecture, list[Adapted], dict[str, Tensor]]:
    """Of a run: configuration, checkpoint, accepted changes of its inputs, architecture, adapted modules, factors.

    InputError for a base model that does not fit or has changed."""
    cfg, found = read_run(run_dir, step)
    changed = changed_inputs(run_dir, input_files(cfg), Path(cfg.model.path))
    refuse_changed_inputs(changed, accept=accept_changed_inputs, how="--accept-changed-inputs")
    arch = hf_config.read(cfg.model.path)
    huggingface.read_model(cfg.model.path, arch)
    modules = list(adapted_modules(arch, cfg.lora))
    return cfg, found, changed, arch, modules, check_factors(found, modules)


def read_run(run_dir: Path, step: int | None) -> tuple[Config, checkpoint.Checkpoint]:
    """The run's configuration, and its checkpoint of ``step`` finished steps (None: the newest with right checksums).

    InputError if the folder is no run or has no such checkpoint, or if config.yaml has changed since the checkpoint.
    """
    if not (run_dir / "config.yaml").is_file():
        raise InputError(f"{run_dir}: no config.yaml; needed: a run folder that train_grpo.py made")
    cfg = load_recorded(run_dir / "config.yaml")
    folder = run_dir / "checkpoints"
    if step is None:
        found = checkpoint.latest(run_dir, say=_note, only="adapter")
        if found is None:
            raise InputError(f"{folder}: no checkpoint whose checksums hold; needed: one that train_grpo.py finished")
    else:
        path = folder / f"step-{step:06d}"
        if not path.is_dir():
            there = first_names(other.name for other in folder.glob("step-*"))
            raise InputError(f"--step {step}: no {path.name} in {folder}; there: {there}")
        found = checkpoint.load(path, only="adapter")
    lines = changed_keys(found.config, to_dict(cfg))
    if changed := [line for line in lines if line.startswith(("lora.", "model.dtype", "model.quant"))]:
        raise InputError(f"{run_dir / 'config.yaml'}: changed since {found.path.name}: {'; '.join(changed)}")
    return cfg, found


def check_factors(found: checkpoint.Checkpoint, modules: Iterable[Adapted]) -> dict[str, Tensor]:
    """The checkpoint's factors in fp32; InputError unless names, shapes and values are those of ``modules``."""
    factors = dict(found.tensors.get("adapter", {}))
    expected = {name: shape for module in modules for name, shape in module.factor_shapes().items()}
    for name in sorted(expected.keys() | factors.keys()):
        if name not in factors:
            fault = "is missing"
        elif name not in expected:
            fault = "is not what lora.targets trains in this base model"
        elif not factors[name].is_floating_point():
            fault = f"holds {factors[name].dtype}; needed: floating-point numbers"
        elif tuple(factors[name].shape) != expected[name]:
            fault = f"has shape {list(factors[name].shape)}, the run needs {list(expected[name])}"
        elif not factors[name].isfinite().all():
            fault = "holds values that are not finite"
        else:
            continue
        raise InputError(f"{found.path / 'adapter.safetensors'}: {name} {fault}")
    return {name: factor.float() for name, factor in factors.items()}


# ------------------------------------------------------------------------------------------------ merged model


@torch.no_grad()
def merged_tensors(
    base: dict[str, Tensor],
    arch: Architecture,
    modules: Iterable[Adapted],
    factors: dict[str, Tensor],
    alpha: float,
    dtype: torch.dtype,
    quantisation: str = "none",
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the base model by name: W + (alpha / R) B A in fp32 where trained, cast once; these come first.

    It is what a trainer of one rank pushes, bit for bit. The base is rounded to ``dtype`` first, and experts to their
    ``quantisation``, because the adapters were trained on the rounded weights.
    """
    frozen = functools.partial(quantised.frozen, base, dtype=dtype, quantisation=quantisation)
    done: set[str] = set()
    for adapted in modules:
        for part in adapted.parts():
            names = adapted.names(part)
            merged = merged_part(adapted, part, list(map(frozen, names)), factors, alpha, arch)
            yield from zip(names, merged, strict=True)
            done.update(names)
    for name in tensor_shapes(arch):
        if name not in done:
            yield name, frozen(name)


def merged_part(
    adapted: Adapted,
    part: slice | None,
    weights: list[Tensor],
    factors: dict[str, Tensor],
    alpha: float,
    arch: Architecture,
) -> list[Tensor]:
    """The ``weights`` of adapted.names(part), merged: multiplied as the trainer does.

    A product of the transposed factors, or of other rows together, may round differently.
    """
    module, scale = adapted.module, alpha / adapted.rank
    a, b = factors[f"{adapted.name}.A"], factors[f"{adapted.name}.B"]
    weight = torch.cat(weights).view(-1, module.out_size, module.in_size)
    if part is not None:
        merged = lora_megatron.merge(weight.mT, a[part], b[part], scale).mT
    elif module.target == "linear_qkv":
        weight, b = (huggingface.interleave_qkv(rows, arch.num_kv_heads, arch) for rows in (weight[0], b))
        merged = huggingface.separate_qkv(lora_megatron.merge(weight, b, a, scale), arch.num_kv_heads, arch)[None]
    else:
        merged = lora_megatron.merge(weight[0], b, a, scale)[None]
    sizes = [rows for rows, *_ in module.blocks.values()]
    return [rows for matrix in merged for rows in matrix.split(sizes)]


def write_merged(
    folder: Path,
    model: ModelConfig,
    arch: Architecture,
    modules: list[Adapted],
    factors: dict[str, Tensor],
    alpha: float,
) -> tuple[int, int]:
    """Write the merged model with the tensor names of the base model to ``folder``.  -> (tensors, bytes)"""
    source, dtype, shapes = Path(model.path), devices.DTYPES[model.dtype], tensor_shapes(arch)
    num_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    _check_room(folder, num_bytes)
    base = huggingface.read_model(source, arch)
    tensors = merged_tensors(base, arch, modules, factors, alpha, dtype, model.quantisation)
    huggingface.save_model(tensors, folder)
    about = read_object(source / "config.json")
    for key in {"dtype", "torch_dtype"} & about.keys():
        about[key] = str(dtype).removeprefix("torch.")  # transformers loads the weights in this type by default
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    copy_tokenizer(source, folder)
    for name, weight in huggingface.read_model(folder, arch).items():
        if weight.dtype != dtype or not weight.isfinite().all():
            raise InputError(f"{source}: {name}, merged, is not a finite {dtype} tensor")
    return len(shapes), num_bytes


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of COPIED that the model in ``source`` has."""
    for name in COPIED:
        if (source / name).is_file():
            (folder / name).write_bytes(read_bytes(source / name))


# ------------------------------------------------------------------------------------------------ PEFT adapter


def adapter_tensors(modules: Sequence[Adapted], factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The factors with the names and shapes of PEFT.

    PEFT adapts q, k, v, gate and up separately, so each gets a copy of our shared A and its own rows of B.
    transformers holds the routed experts of a layer as two 3-D parameters, and PEFT the factors of all experts as one
    2-D pair for each: lora_A (E R, in) with R fastest, lora_B (out, R E) with E fastest.
    """
    both = {adapted.module.target for adapted in modules if adapted.is_expert} == {"linear_fc1", "linear_fc2"}
    tensors = {}
    for adapted in modules:
        if adapted.is_expert:
            # PEFT wraps the experts once for each parameter: the wrapper of down_proj contains that of gate_up_proj.
            inner = ".base_layer" if both and adapted.module.target == "linear_fc1" else ""
            prefix = f"base_model.model.{adapted.name.rpartition('.')[0]}{inner}"
            a = factors[f"{adapted.name}.A"].transpose(1, 2).flatten(0, 1)  # (E, in, R) -> (E R, in)
            b = factors[f"{adapted.name}.B"].permute(2, 1, 0).flatten(1)  # (E, R, out) -> (out, R E)
            tensors |= {f"{prefix}.lora_A.weight": a.contiguous(), f"{prefix}.lora_B.weight": b.contiguous()}
        else:
            for name, a, b in adapted.pairs(factors):
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                # clone: safetensors refuses tensors that share memory.
                tensors |= {f"{prefix}.lora_A.weight": a.clone(), f"{prefix}.lora_B.weight": b.clone()}
    return tensors


def adapter_config(base_model: str, lora: LoraConfig, modules: Sequence[Adapted]) -> dict:
    """PEFT's adapter_config.json for these modules.

    All layers of the MLP are targeted as parameters: in Qwen MoE models PEFT takes a target module called gate_proj,
    up_proj, down_proj or gate for the routed experts and the router of older checkpoints. lora_dropout is 0,
    as in training.
    """
    attention, dense, experts = {}, {}, {}  # dicts keep the order of their keys and hold each name once
    for _, module, rank in modules:
        if module.kind == "experts":
            experts[module.fused] = rank
        elif module.kind == "attention":
            attention |= dict.fromkeys(module.blocks, rank)
        else:
            dense |= {f"{block}.weight": rank for block in module.blocks}
    others = attention | dense
    ranks = {*others.values(), *experts.values()}
    # One pattern for everything but routed experts: PEFT warns of each pattern that matches no module.
    pattern = {"|".join(map(re.escape, others)): lora.rank} if len(ranks) > 1 else {}
    if pattern and not attention:
        _note("PEFT will warn that rank_pattern matched no module; it does apply it, to parameters")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": next(iter(experts.values()), lora.rank),
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # the scale is lora_alpha / R
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(attention),
        "target_parameters": [*dense, *experts],
        "rank_pattern": pattern,
        "alpha_pattern": {},
        "inference_mode": True,
    }


def write_adapter(
    folder: Path, base_model: str, lora: LoraConfig, modules: Sequence[Adapted], factors: dict[str, Tensor]
) -> tuple[int, int]:
    """Write the files that peft.PeftModel.from_pretrained loads to ``folder``.  -> (tensors, bytes)

    They name the folder of the base model from the root, because the adapter is used from anywhere. The tokenizer and
    its chat template lie beside them, as servers expect.
    """
    tensors = adapter_tensors(modules, factors)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _check_room(folder, num_bytes)
    path = folder / "adapter_model.safetensors"
    huggingface.save_file(tensors, path)
    about = adapter_config(os.path.abspath(base_model), lora, modules)
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    copy_tokenizer(Path(base_model), folder)
    written = read_tensors(path)
    if written.keys() != tensors.keys() or not all(torch.equal(written[name], tensors[name]) for name in tensors):
        raise InputError(f"{path}: the file differs from what was written; is the disk sound?")
    return len(tensors), num_bytes


# ------------------------------------------------------------------------------------------------ the command


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise InputError(f"{folder}: {num_bytes / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free on the disk")


def export(run_dir: Path, out_dir: Path, *, as_adapter: bool, step: int | None, accept_changed_inputs: bool) -> str:
    """Write the run's model or adapter to ``out_dir``, and return the line that says what was written.

    InputError for an ``out_dir`` in use, a run without a good checkpoint, or a base model that does not fit or has
    changed since the run; accepted changes are listed in ``out_dir``/changed_inputs.json.
    """
    refuse_used(out_dir)
    cfg, found, changed, arch, modules, factors = read_policy(run_dir, step, accept_changed_inputs)
    with whole_folder(out_dir, SafetensorError) as folder:
        if as_adapter:
            if cfg.trains_merged:
                _note(
                    "this run trained merged weights, rounded to bf16: --merged exports them, an adapter is not rounded"
                )
            num_tensors, num_bytes = write_adapter(folder, cfg.model.path, cfg.lora, modules, factors)
            if cfg.model.quantisation != "none":
                _note(f"the adapter belongs to a base with experts in {cfg.model.quantisation}; --merged has both")
        else:
            num_tensors, num_bytes = write_merged(folder, cfg.model, arch, modules, factors, cfg.lora.alpha)
            (folder / RUN_CONFIG).write_bytes(read_bytes(run_dir / "config.yaml"))
            if cfg.model.dtype == "bf16" and not cfg.trains_merged:
                _note(
                    "this run trained base weights and factors apart; bf16 rounds the merged ones, --adapter does not"
                )
        if changed:
            (folder / "changed_inputs.json").write_text(json.dumps(changed, indent=1) + "\n")
            _note(f"accepted: {changed[0]} ({len(changed)} in all, listed in {out_dir / 'changed_inputs.json'})")
    return (
        f"wrote {out_dir}: {'PEFT adapter' if as_adapter else 'merged model'} after step {found.step} "
        f"({num_tensors} tensors, {num_bytes / 2**20:.1f} MiB)"
    )


def ask(run_dir: Path, question: str, *, step: int | None, accept_changed_inputs: bool) -> str:
    """What evaluate.ask says about the policy of a run, or about the merged model that an export has written."""
    import evaluate  # here, because it imports Megatron, which an export does not need

    if (run_dir / RUN_CONFIG).is_file():
        if step is not None:
            raise InputError(f"--step {step}: {run_dir} is a merged model; needed: a run folder, or no --step")
        cfg = load_recorded(run_dir / RUN_CONFIG)
        cfg = cfg.changed(model={"path": str(run_dir)})
        return evaluate.ask(cfg, question, huggingface.read_model(run_dir, hf_config.read(run_dir)).items())
    cfg, _, _, arch, modules, factors = read_policy(run_dir, step, accept_changed_inputs)
    model, base = cfg.model, huggingface.read_model(cfg.model.path, arch)
    settings = (cfg.lora.alpha, devices.DTYPES[model.dtype], model.quantisation)
    return evaluate.ask(cfg, question, merged_tensors(base, arch, modules, factors, *settings))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was written, or one error line.  -> exit code, 2 on an InputError"""
    parser = argparse.ArgumentParser(description="Write a run's trained model for other programs.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder; for --ask also a merged model")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--merged", metavar="DIR", type=Path, help="Hugging Face model, LoRA merged into the weights")
    kind.add_argument("--adapter", metavar="DIR", type=Path, help="PEFT adapter for the base model")
    kind.add_argument("--ask", metavar="QUESTION", help="write nothing: print the greedy answer to a question")
    parser.add_argument("--step", metavar="N", type=int, help="finished steps of the checkpoint; default: the newest")
    parser.add_argument(
        "--accept-changed-inputs", action="store_true", help="export although model or data have changed since the run"
    )
    args = parser.parse_args(arguments)
    of_run = {"step": args.step, "accept_changed_inputs": args.accept_changed_inputs}
    print(
        ask(args.run, args.ask, **of_run)
        if args.ask is not None
        else export(args.run, args.merged or args.adapter, as_adapter=args.adapter is not None, **of_run)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
