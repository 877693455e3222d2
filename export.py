"""Writes a run's adapters for other programs, as a merged Hugging Face model or as a PEFT adapter.

    python export.py RUN --merged DIR | --adapter DIR [--step N]   export the checkpoint after N steps, or the newest
    python export.py RUN|ADAPTER --probes DIR [--base MODEL]       write probes that show if an adapter is applied

The command runs in one process on the CPU and handles one tensor at a time, without Megatron, transformers or peft.
Only --probes loads a model, with transformers, or with Megatron under torchrun. A merged model is written to a
temporary folder, read back and checked (names, shapes, finite values). Then the folder is renamed to DIR.
tests/runs/test_one_policy.py shows that transformers and peft compute the trainer's log-probabilities from these files.
E is the number of experts, and R the LoRA rank.
"""

import argparse
import contextlib
import functools
import json
import os
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
import parallel_setup
from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from hardware import device as devices
from hardware import quantisation as quantised
from inputs import hf_config
from inputs.config import changed_keys, command, load_recorded, path_option, text_option, to_dict
from inputs.files import first_names, read_bytes, read_object, refuse_used, whole_folder
from knobs import Config, Merging, ModelConfig
from runlog.run_record import changed_inputs, input_files, of_last_start, refuse_changed_inputs
from weights import checkpoint, huggingface, peft_adapters, probes
from weights.adapter_weights import Adapted, adapted_modules, pairs_of, read_factors
from weights.peft_adapters import Form, Pairs

COPIED = """generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    vocab.json merges.txt tokenizer.model chat_template.jinja chat_template.json LICENSE""".split()

READ_BY: dict[Form, str] = {  # the programs that apply an adapter of each form, from docs/adapters.md
    "stack": "Its routed experts are applied by PEFT 0.20.0 and 0.21.2 with transformers 5.19.0 and 5.24.0. PEFT with "
    "transformers 4.57.6 leaves them out, without a warning if the model has a shared expert or dense layers; `--form "
    "leaf` writes the form for it.",
    "leaf": "Its routed experts are applied by PEFT 0.17.1, 0.18.1 and 0.21.2 with transformers 4.57.6. PEFT with "
    "transformers 5 may leave them, or dense layers, out without a warning; `--form stack` writes the form for it.",
}

RUN_CONFIG = "run_config.yaml"  # the run's config.yaml in the folder of a merged model; data.* describes the prompts


# ------------------------------------------------------------------------------------------------ reading the run


def read_policy(
    run_dir: Path, step: int | None, accept_changed_inputs: bool
) -> tuple[Config, checkpoint.Checkpoint, list[str], Architecture, list[Adapted], dict[str, Tensor]]:
    """Return a run's configuration, checkpoint, accepted changes of inputs, architecture, adapted modules, and factors.

    For ``step`` see read_run. Raises InputError if the model or the data have changed and ``accept_changed_inputs`` is
    false, or if the factors do not fit the model.
    """
    cfg, found = read_run(run_dir, step)
    changed = changed_inputs(run_dir, input_files(cfg), Path(cfg.model.path))
    refuse_changed_inputs(changed, accept=accept_changed_inputs, how="--accept-changed-inputs")
    arch = hf_config.read(cfg.model.path)
    modules = list(adapted_modules(arch, cfg.lora))
    return cfg, found, changed, arch, modules, read_factors(found, modules)


def read_run(run_dir: Path, step: int | None) -> tuple[Config, checkpoint.Checkpoint]:
    """Return the run's configuration, and its checkpoint after ``step`` steps.

    If ``step`` is None, return the newest checkpoint with correct checksums. Raises InputError if the folder is not
    a run or has no such checkpoint. It is also an error if lora, model.dtype or model.quantisation in config.yaml has
    changed since the checkpoint.
    """
    if not (run_dir / "config.yaml").is_file():
        raise InputError(f"{run_dir}: no config.yaml; give the folder of a run (or for --probes of a PEFT adapter)")
    path = of_last_start(run_dir, "config.yaml")  # a resume may name another folder of the same model
    cfg, folder = load_recorded(path), run_dir / "checkpoints"
    if step is None:
        found = checkpoint.latest(run_dir, say=_note, only="adapter")
        if found is None:
            raise InputError(f"{folder}: no checkpoint has correct checksums; give a run with a finished checkpoint")
    else:
        wanted = folder / f"step-{step:06d}"
        if not wanted.is_dir():
            there = first_names(other.name for other in folder.glob("step-*"))
            raise InputError(f"--step {step}: {folder} has no {wanted.name}; choose from: {there}")
        found = checkpoint.load(wanted, only="adapter")
    lines = changed_keys(found.config, to_dict(cfg))
    if changed := [line for line in lines if line.startswith(("lora.", "model.dtype", "model.quant"))]:
        raise InputError(f"{path}: changed since {found.path.name} was saved: {'; '.join(changed)}")
    return cfg, found


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
    """Yield every tensor of the merged model with its name, the tensors that LoRA adapts first.

    An adapted tensor is W + (alpha / R) B A, computed in fp32 and cast once to ``dtype``. It is bit-identical to the
    tensor that a trainer with one rank pushes. The base is first rounded to ``dtype``, and its experts to
    ``quantisation``, because the adapters were trained on the rounded weights.
    """
    frozen = functools.partial(quantised.frozen, base, dtype=dtype, quantisation=quantisation)
    done: set[str] = set()
    for adapted in modules:
        module = adapted.module
        for part in lora_megatron.merged_parts((module.copies, module.in_size, module.out_size)):
            names = adapted.names(part)
            merged = merged_part(adapted, part, list(map(frozen, names)), factors, alpha, arch)
            yield from zip(names, merged, strict=True)
            done.update(names)
    for name in tensor_shapes(arch):
        if name not in done:
            yield name, frozen(name)


def merged_part(
    adapted: Adapted,
    part: slice,
    weights: list[Tensor],
    factors: dict[str, Tensor],
    alpha: float,
    arch: Architecture,
) -> list[Tensor]:
    """Return the merged ``weights`` of adapted.names(part), computed with the same matrix products as in the trainer.

    ``part`` is one of the slices of lora_megatron.merged_parts. A product of the transposed factors, or of a different
    set of rows, may round differently.
    """
    module, scale = adapted.module, alpha / adapted.rank
    a, b = factors[f"{adapted.name}.A"], factors[f"{adapted.name}.B"]
    weight = torch.cat(weights).view(-1, module.out_size, module.in_size)
    if adapted.is_expert:
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
) -> None:
    """Write the merged model to ``folder``, with the tensor names of the base model.

    Raises InputError if a merged weight is not finite.
    """
    source, dtype = Path(model.path), devices.DTYPES[model.dtype]
    base = huggingface.read_model(source, arch)
    huggingface.save_model(merged_tensors(base, arch, modules, factors, alpha, dtype, model.quantisation), folder)
    about = read_object(source / "config.json")
    for key in {"dtype", "torch_dtype"} & about.keys():
        about[key] = str(dtype).removeprefix("torch.")  # transformers loads the weights in this type by default
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    copy_tokenizer(source, folder)
    for name, weight in huggingface.read_model(folder, arch).items():
        if not weight.isfinite().all():
            raise InputError(f"{source}: {name}, after merging, has values that are not finite in {dtype}")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy to ``folder`` those files of COPIED that the model in ``source`` has."""
    for name in COPIED:
        if (source / name).is_file():
            (folder / name).write_bytes(read_bytes(source / name))


# ------------------------------------------------------------------------------------------------ PEFT adapter


def write_adapter(folder: Path, base_model: str, arch: Architecture, pairs: Pairs, alpha: float, form: Form) -> None:
    """Write an adapter for peft.PeftModel.from_pretrained to ``folder``, with a README on the programs that apply it.

    The files contain the absolute path of the base model, because the adapter can be used from any folder. The
    tokenizer and its chat template are copied to the same folder, because servers expect them there.
    """
    peft_adapters.write(folder, os.path.abspath(base_model), arch, pairs, alpha, form)
    of_vllm = "vLLM 0.30.0 ignores a rank_pattern and an alpha_pattern, without a warning."
    (folder / "README.md").write_text(f"A PEFT adapter for {base_model}. {READ_BY[form]} {of_vllm}\n")
    copy_tokenizer(Path(base_model), folder)


# ------------------------------------------------------------------------------------------------ probes


def write_probes(source: Path, out_dir: Path, base: str | None, of_run: dict) -> str:
    """Write the probes of weights/probes.py and the adapter of ``source`` to ``out_dir``, and return a line to print.

    ``source`` is a run, or a PEFT adapter for ``base`` (None means the model that the adapter names). ``of_run`` has
    the arguments ``step`` and ``accept_changed_inputs`` of read_policy. The expected values come from transformers in
    float64. Under torchrun, all ranks call this together, and the values come from the run's trainer in its layout.
    """
    refuse_used(out_dir)
    cfg, under_torchrun, first = None, "RANK" in os.environ, parallel_setup.launched_rank() == 0
    settings = source / peft_adapters.SETTINGS
    if settings.is_file():
        if under_torchrun:
            raise InputError("--probes: found a PEFT adapter under torchrun; give a run, whose trainer can compute")
        if of_run["step"] is not None:
            raise InputError(f"--step: {source} is a PEFT adapter, which has no steps; leave it out")
        named = peft_adapters.read_settings(source).base_model_name_or_path or "not named"
        base = os.path.abspath(base or named)
        if not Path(base, "config.json").is_file():
            raise InputError(f"{settings}: its base model is {named}, but {base} has no config.json; give --base MODEL")
        arch = hf_config.read(base)
        pairs = peft_adapters.read(source, arch)
    else:
        if base is not None:
            raise InputError(f"--base: {source} is a run, whose configuration names its base; leave it out")
        cfg, _, _, arch, modules, factors = read_policy(source, **of_run)
        base, pairs = os.path.abspath(cfg.model.path), pairs_of(modules, factors, cfg.lora.alpha)
    if cfg and under_torchrun:
        rank = max(2 * probes.RANK, *(len(pair.a) for pair in pairs.values()))  # twice the rank, for probes.OWN_A
        reference: contextlib.AbstractContextManager[probes.Value] = probes.Trainer.opened(cfg, arch, rank)
    else:
        reference = contextlib.nullcontext(probes.Float64(base, arch))
    with reference as value:
        kinds, expected = probes.make(base, arch, value, pairs, print if first else lambda _: None)
    if first:
        with whole_folder(out_dir, SafetensorError) as folder:
            probes.write(folder, kinds, expected, arch)
            given = folder / probes.PROBES / probes.GIVEN
            if cfg is None:
                shutil.copytree(source, given.with_suffix(".copied"))
            else:
                for form in READ_BY:
                    peft_adapters.write(given.with_suffix(f".{form}"), base, arch, pairs, cfg.lora.alpha, form)
    return f"wrote {out_dir}: probes for {base}"


# ------------------------------------------------------------------------------------------------ the command


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def export(run_dir: Path, out_dir: Path, *, form: Form | None, step: int | None, accept_changed_inputs: bool) -> str:
    """Write the run's adapter in ``form``, or its merged model if ``form`` is None, and return a line to print.

    Raises InputError if ``out_dir`` is not empty, or if the run has no checkpoint with correct checksums. It is also an
    error if the base model does not fit. If ``accept_changed_inputs`` is false, the model and the data must not have
    changed since the run. Accepted changes are listed in ``out_dir``/changed_inputs.json.
    """
    refuse_used(out_dir)
    cfg, found, changed, arch, modules, factors = read_policy(run_dir, step, accept_changed_inputs)
    with whole_folder(out_dir, SafetensorError) as folder:
        if form is not None:
            if cfg.merging >= Merging.PASSES:
                _note(
                    "this run trained merged weights rounded to bf16; --merged exports them, an adapter is not rounded"
                )
            pairs = pairs_of(modules, factors, cfg.lora.alpha)
            write_adapter(folder, cfg.model.path, arch, pairs, cfg.lora.alpha, form)
            if cfg.model.quantisation != "none":
                _note(f"the adapter needs a base with {cfg.model.quantisation} experts; --merged exports both together")
        else:
            write_merged(folder, cfg.model, arch, modules, factors, cfg.lora.alpha)
            (folder / RUN_CONFIG).write_bytes(read_bytes(of_last_start(run_dir, "config.yaml")))
            if cfg.model.dtype == "bf16" and cfg.merging < Merging.PASSES:
                _note(
                    "this run trained with separate factors; bf16 rounds the merged weights, --adapter rounds nothing"
                )
        if changed:
            (folder / "changed_inputs.json").write_text(json.dumps(changed, indent=1) + "\n")
            _note(f"accepted: {changed[0]} ({len(changed)} in all, listed in {out_dir / 'changed_inputs.json'})")
    return f"wrote {out_dir}: {'PEFT adapter' if form else 'merged model'} after step {found.step}"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, print a line about its result or error, and return the exit code, which is 2 on InputError."""
    parser = argparse.ArgumentParser(description="Write a run's trained model for other programs.")
    parser.add_argument(
        "run", metavar="RUN", type=path_option, help="folder of a run, or with --probes of a PEFT adapter"
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--merged", metavar="DIR", type=path_option, help="write a Hugging Face model with LoRA merged into it"
    )
    kind.add_argument("--adapter", metavar="DIR", type=path_option, help="write a PEFT adapter for the base model")
    kind.add_argument(
        "--probes", metavar="DIR", type=path_option, help="write adapters and log-probs for preflight.py --adapter"
    )
    parser.add_argument(
        "--form", choices=READ_BY, help="with --adapter: stack for transformers 5 (default), leaf for 4"
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        type=text_option,
        help="with --probes: base of a PEFT adapter (default: the model it names)",
    )
    parser.add_argument("--step", metavar="N", type=int, help="number of steps of the checkpoint (default: newest)")
    parser.add_argument(
        "--accept-changed-inputs", action="store_true", help="export even if model or data have changed since"
    )
    args = parser.parse_args(arguments)
    if args.form and not args.adapter:
        raise InputError(f"--form: {args.form} has no effect without --adapter; leave it out")
    if args.base and not args.probes:
        raise InputError(f"--base: {args.base} has no effect without --probes; leave it out")
    of_run = {"step": args.step, "accept_changed_inputs": args.accept_changed_inputs}
    if args.probes:
        said = write_probes(args.run, args.probes, args.base, of_run)
    else:
        form: Form | None = (args.form or "stack") if args.adapter else None
        said = export(args.run, args.merged or args.adapter, form=form, **of_run)
    if parallel_setup.launched_rank() == 0:
        print(said)
    return 0


if __name__ == "__main__":
    parallel_setup.run_command(main, sys.argv[1:])  # torchrun may have started --probes
