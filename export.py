"""A run's trained adapters as files that other programs load: a merged Hugging Face model, or a PEFT adapter.

    python export.py RUN --merged DIR | --adapter DIR [--step N]       N steps done; without it the newest checkpoint

One process on the CPU, tensor by tensor, without Megatron, transformers or peft. E experts, R a pair's own rank.
What was written is read back (names, shapes, finite values) before DIR appears, whole, under its name. That
transformers and peft compute the trainer's log-probabilities from it is a test: tests/test_export.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import hf_config
import weights_hf
from adapter_weights import Adapted, adapted_modules
from config import changed_keys, load_config
from hf_config import Architecture
from input_files import BAD_INPUT, InputError, finish_folder, fresh_folder, read_object, refused
from knobs import Config
from run_record import fsync_path, refuse_changed_inputs

COPIED = """generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    vocab.json merges.txt tokenizer.model chat_template.jinja chat_template.json LICENSE""".split()


# ------------------------------------------------------------------------------------------------ reading the run


def read_run(
    run_dir: Path, step: int | None, accept_changed_inputs: bool
) -> tuple[Config, checkpoint.Checkpoint, list[str]]:
    """The run's configuration, its checkpoint of ``step`` finished steps (None: the newest whose checksums hold), and
    a line for each file of its model and data that has changed since, if those are accepted.

    Raises InputError for a folder that is no run, has no such checkpoint, or was configured anew or changed since.
    """
    if not (run_dir / "config.yaml").is_file():
        raise InputError(f"{run_dir}: no config.yaml; needed: a run folder that train_grpo.py made")
    cfg = load_config(run_dir / "config.yaml")
    folder = run_dir / "checkpoints"
    if step is None:
        found = checkpoint.latest(run_dir, say=_note, only="adapter")
        if found is None:
            raise InputError(f"{folder}: no checkpoint whose checksums hold; needed: one that train_grpo.py finished")
    else:
        path = folder / f"step-{step:06d}"
        if not path.is_dir():
            there = ", ".join(sorted(other.name for other in folder.glob("step-*"))) or "none"
            raise InputError(f"--step {step}: no {path.name} in {folder}; there: {there}")
        found = checkpoint.load(path, only="adapter")
    changed = [line for line in changed_keys(found.config, cfg) if line.startswith(("lora.", "model.dtype"))]
    if changed:
        raise InputError(f"{run_dir / 'config.yaml'}: changed since {found.path.name}: {'; '.join(changed)}")
    changed = refuse_changed_inputs(run_dir, cfg, accept_changed_inputs, "--accept-changed-inputs")
    return cfg, found, changed


def check_factors(found: checkpoint.Checkpoint, modules: Iterable[Adapted]) -> dict[str, Tensor]:
    """The checkpoint's factors, fp32; InputError unless names, shapes and values are those of ``modules``."""
    where = found.path / "adapter.safetensors"
    factors = found.tensors.get("adapter", {})
    expected = {name: shape for module in modules for name, shape in module.factor_shapes().items()}
    for label, names in (
        ("is missing", expected.keys() - factors.keys()),
        ("is not what lora.targets trains in this base model", factors.keys() - expected.keys()),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise InputError(f"{where}: {min(names)}{more} {label}")
    if odd := [name for name, factor in factors.items() if not factor.is_floating_point()]:
        raise InputError(f"{where}: {odd[0]} holds {factors[odd[0]].dtype}; needed: floating-point numbers")
    found_factors = {name: factor.float() for name, factor in factors.items()}
    for name, shape in expected.items():
        factor = found_factors[name]
        if tuple(factor.shape) != shape:
            raise InputError(f"{where}: {name} has shape {list(factor.shape)}, the run needs {list(shape)}")
        if not factor.isfinite().all():
            raise InputError(f"{where}: {name} holds values that are not finite")
    return found_factors


# ------------------------------------------------------------------------------------------------ merged model


@torch.no_grad()
def merged_tensors(
    base: dict[str, Tensor],
    arch: Architecture,
    modules: Iterable[Adapted],
    factors: dict[str, Tensor],
    alpha: float,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the base model by name, W + (alpha / R) B A in fp32 where trained, cast once; one at a time.

    The base is rounded to ``dtype`` first, because that is the weight the adapters were trained on.
    """
    pairs = {name: (alpha / module.rank, a, b) for module in modules for name, a, b in module.pairs(factors)}
    for name in weights_hf.tensor_shapes(arch):
        weight = base[name].to(dtype)
        if name in pairs:
            scale, a, b = pairs[name]
            weight = (weight.float() + scale * (b @ a)).to(dtype)
        yield name, weight


def write_merged(
    out_dir: Path,
    cfg: Config,
    arch: Architecture,
    modules: list[Adapted],
    factors: dict[str, Tensor],
    changed: Sequence[str] = (),
) -> tuple[int, int]:
    """The merged model as a Hugging Face directory with the base model's tensor names.  -> (tensors, bytes)"""
    model_dir = Path(cfg.model.path)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.model.dtype]
    shapes = weights_hf.tensor_shapes(arch)
    num_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    with _appears_whole(out_dir, num_bytes, changed) as aside:
        base = weights_hf.read_model(model_dir, arch)
        weights_hf.save_model(merged_tensors(base, arch, modules, factors, cfg.lora.alpha, dtype), aside)
        about = read_object(model_dir / "config.json")
        for key in {"dtype", "torch_dtype"} & about.keys():
            about[key] = str(dtype).removeprefix("torch.")  # what transformers loads the weights as by default
        (aside / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        for name in COPIED:
            if (model_dir / name).is_file():
                shutil.copyfile(model_dir / name, aside / name)
        for name, weight in weights_hf.read_model(aside, arch).items():
            if weight.dtype != dtype or not weight.isfinite().all():
                raise InputError(f"{model_dir}: {name}, merged, is not a finite {dtype} tensor")
    return len(shapes), num_bytes


# ------------------------------------------------------------------------------------------------ PEFT adapter


def adapter_tensors(modules: Iterable[Adapted], factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The factors as PEFT names and lays them out.

    PEFT adapts q, k, v, gate and up one by one, so each gets the A that ours share and its own rows of B.
    transformers holds routed experts as two 3-D parameters, and PEFT both experts' factors as one 2-D pair:
    lora_A (E R, in) with R fastest, lora_B (out, R E) with E fastest.
    """
    modules = list(modules)
    both = {module.fused for module in modules if module.num_experts} == {"gate_up_proj", "down_proj"}
    tensors = {}
    for module in modules:
        if module.num_experts:
            # PEFT wraps the experts once a parameter: down_proj's wrapper is around gate_up_proj's.
            inner = ".base_layer" if both and module.fused == "gate_up_proj" else ""
            prefix = f"base_model.model.{module.parent}{inner}"
            a = factors[f"{module.name}.A"].transpose(1, 2).flatten(0, 1)  # (E, in, R) -> (E R, in)
            b = factors[f"{module.name}.B"].permute(2, 1, 0).flatten(1)  # (E, R, out) -> (out, R E)
            tensors |= {f"{prefix}.lora_A.weight": a.contiguous(), f"{prefix}.lora_B.weight": b.contiguous()}
            continue
        for name, a, b in module.pairs(factors):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            # Copies: safetensors refuses tensors that share memory.
            tensors |= {f"{prefix}.lora_A.weight": a.clone(), f"{prefix}.lora_B.weight": b.clone()}
    return tensors


def adapter_config(cfg: Config, modules: Iterable[Adapted]) -> dict:
    """PEFT's adapter_config.json for these modules.

    Everything in the MLP is targeted as a parameter: for Qwen MoE models PEFT takes any target module called
    gate_proj, up_proj, down_proj or gate for the routed experts and the router of older checkpoints.
    PEFT computes no dropout for parameters, and an exported adapter is for inference: lora_dropout is 0.
    """
    attention, dense, experts, ranks = [], [], [], set()
    for module in modules:
        where = re.sub(r"^model\.layers\.\d+\.", "", module.parent)
        ranks.add(module.rank)
        if module.num_experts:
            experts.append(f"{where}.{module.fused}")
        elif where == "self_attn":
            attention += [f"{where}.{part}" for part in module.rows]
        else:
            dense += [f"{where}.{part}.weight" for part in module.rows]
    attention, dense, experts = (list(dict.fromkeys(names)) for names in (attention, dense, experts))
    rank, pattern = cfg.lora.rank, {}
    if experts:
        rank = cfg.lora.expert_rank or rank
    if len(ranks) > 1:
        # One pattern for all that is not a routed expert: PEFT warns of a pattern that matches no module.
        pattern = {"|".join(re.escape(name) for name in attention + dense): cfg.lora.rank}
        if not attention:
            _note("PEFT will warn that rank_pattern matched no module; it does apply it, to parameters")
    alpha = cfg.lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.model.path,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # the scale is lora_alpha / a pair's own rank
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": attention,
        "target_parameters": dense + experts,
        "rank_pattern": pattern,
        "alpha_pattern": {},
        "inference_mode": True,
    }


def write_adapter(
    out_dir: Path, cfg: Config, modules: list[Adapted], factors: dict[str, Tensor], changed: Sequence[str] = ()
) -> tuple[int, int]:
    """adapter_config.json and adapter_model.safetensors for peft.PeftModel.from_pretrained.  -> (tensors, bytes)"""
    from safetensors.torch import load_file, save_file

    tensors = adapter_tensors(modules, factors)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with _appears_whole(out_dir, num_bytes, changed) as aside:
        path = aside / "adapter_model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        (aside / "adapter_config.json").write_text(json.dumps(adapter_config(cfg, modules), indent=2) + "\n")
        written = load_file(path)
        wrong = written.keys() ^ tensors.keys()
        wrong |= {name for name in written.keys() & tensors.keys() if not torch.equal(written[name], tensors[name])}
        if wrong:
            raise InputError(f"{out_dir}: {min(wrong)} is not in the file as it was written; is the disk sound?")
    return len(tensors), num_bytes


# ------------------------------------------------------------------------------------------------ the command


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _refuse_used(out_dir: Path) -> None:
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise InputError(f"{out_dir}: already there and not an empty directory; needed: a new one")


@contextlib.contextmanager
def _appears_whole(out_dir: Path, num_bytes: int, changed: Sequence[str]) -> Iterator[Path]:
    """A directory beside ``out_dir`` to write to; it takes the name when all is written, and goes when not.

    ``changed``: what is accepted although it is not the run's, listed in changed_inputs.json.
    """
    from safetensors import SafetensorError

    target = Path(os.path.realpath(out_dir))
    aside, made = target.with_name(f".tmp-{target.name}"), False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh_folder(aside)
        made = True
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes:
            raise InputError(f"{out_dir}: {num_bytes / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free on the disk")
        if changed:
            (aside / "changed_inputs.json").write_text(json.dumps(changed, indent=1) + "\n")
        yield aside
        for path in aside.iterdir():
            fsync_path(path)
        finish_folder(aside, target)
        fsync_path(target.parent)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{out_dir}: not written: {reason}") from error
    finally:
        if made:
            shutil.rmtree(aside, ignore_errors=True)


def export(
    run_dir: Path, out_dir: Path, *, as_adapter: bool, step: int | None = None, accept_changed_inputs: bool = False
) -> str:
    """Write the run's model or adapter to ``out_dir``; the line that says what was written.

    Raises InputError for an ``out_dir`` in use, a run without a good checkpoint, or a base model that does not fit or
    is not the run's; accepted changes are listed in ``out_dir``/changed_inputs.json.
    """
    _refuse_used(out_dir)
    cfg, found, changed = read_run(run_dir, step, accept_changed_inputs)
    arch = hf_config.read(cfg.model.path)
    weights_hf.read_model(cfg.model.path, arch)
    modules = list(adapted_modules(arch, cfg.lora))
    factors = check_factors(found, modules)
    if as_adapter:
        num_tensors, num_bytes = write_adapter(out_dir, cfg, modules, factors, changed)
    else:
        num_tensors, num_bytes = write_merged(out_dir, cfg, arch, modules, factors, changed)
    if changed:
        _note(f"accepted: {changed[0]} ({len(changed)} in all, listed in {out_dir / 'changed_inputs.json'})")
    what = "PEFT adapter" if as_adapter else "merged model"
    return f"wrote {out_dir}: {what} after step {found.step} ({num_tensors} tensors, {num_bytes / 2**20:.1f} MiB)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was written, or one error line; returns the exit code, 2 on an InputError."""
    parser = argparse.ArgumentParser(description="Write a run's trained model for other programs.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder: config.yaml and checkpoints/")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--merged", metavar="DIR", type=Path, help="Hugging Face model, LoRA merged into the weights")
    kind.add_argument("--adapter", metavar="DIR", type=Path, help="PEFT adapter for the base model")
    parser.add_argument("--step", metavar="N", type=int, help="finished steps of the checkpoint; default: the newest")
    parser.add_argument(
        "--accept-changed-inputs", action="store_true", help="export although model or data are not the run's any more"
    )
    args = parser.parse_args(arguments)
    options = {"as_adapter": args.adapter is not None, "accept_changed_inputs": args.accept_changed_inputs}
    try:
        print(export(args.run, args.merged or args.adapter, step=args.step, **options))
    except BAD_INPUT as error:
        return refused(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
