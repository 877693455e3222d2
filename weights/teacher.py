"""The teacher of on-policy distillation: an adapter of the policy's base model, in the shapes of the policy's factors.

R is the rank of a module of the policy. If the teacher's rank is smaller, zeros fill the teacher's factors up to R. The
teacher's B is multiplied by the ratio of the teacher's scale to the policy's. So the model needs no second adapter.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from facts.architectures import Architecture
from facts.exits import InputError
from inputs import teacher
from inputs.config import recorded_config
from inputs.files import first_three, read_object
from knobs import Config, ModelConfig
from runlog.run_record import of_last_start
from weights import checkpoint, peft_adapters
from weights.adapter_weights import Adapted, adapted_modules, pairs_of, read_factors
from weights.peft_adapters import Pair, Pairs

SAME = ("config.json", "tokenizer.json")  # files that must be equal for teacher and policy, in addition to the weights


def read(cfg: Config, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole factor of loss.teacher with its name in a checkpoint of the policy, module by module.

    Raises InputError if there is no adapter, or if it does not fit the model. Also raises InputError if the adapter has
    more targets or a larger rank than the policy, or if its base had another dtype or quantisation. refuse_other_files
    compares the checksums.
    """
    folder, own = teacher.folder(cfg.loss.teacher), list(adapted_modules(arch, cfg.lora))
    if not teacher.files(cfg.loss.teacher):
        raise InputError(f"loss.teacher: {folder} has no adapter; give a run, a checkpoint or a PEFT folder")
    pairs = peft_adapters.read(folder, arch) if teacher.is_peft(folder) else _pairs_of(folder, cfg.model, arch)
    ours = {name.removesuffix(".weight") for adapted in own for name in adapted.names(slice(None))}
    if more := pairs.keys() - ours:
        raise InputError(f"loss.teacher: {folder} adapts {first_three(sorted(more))}; add their layers to lora.targets")
    for adapted in own:
        shapes = adapted.factor_shapes()
        a, b = map(torch.zeros, shapes.values())
        # (R, in) and (out, R) of each expert, or of the one matrix
        by_copy = zip(a.mT, b.mT, strict=True) if adapted.is_expert else [(a, b)]
        for copy, (a_of_it, b_of_it) in enumerate(by_copy):
            given = [pairs.get(name.removesuffix(".weight")) for name in adapted.names(slice(copy, copy + 1))]
            rank = _fill_(a_of_it, b_of_it, given, adapted, cfg.lora.alpha / adapted.rank)
            if rank > adapted.rank:
                key = "lora.expert_rank" if adapted.is_expert and cfg.lora.expert_rank else "lora.rank"
                raise InputError(f"loss.teacher: {folder}: {adapted.name} has rank {rank}; set {key} to that or more")
        yield from zip(shapes, (a, b), strict=True)


def _fill_(a: Tensor, b: Tensor, pairs: list[Pair | None], adapted: Adapted, scale: float) -> int:
    """Fill A (R, in) and B (out, R) of fused matrices with their ``pairs``, and return the rank that the pairs need.

    ``pairs`` has None for a matrix without a pair, and ``scale`` is the scale of the policy. Matrices that share one A
    also share the columns of B; otherwise their ranks add up. If the rank exceeds R, nothing is filled.
    """
    there = [pair for pair in pairs if pair]
    shared = all(torch.equal(pair.a, there[0].a) for pair in there)
    rank = sum(len(pair.a) for pair in there[: 1 if shared else None])
    if rank > len(a):
        return rank
    column = 0
    by_matrix = b.split([rows for rows, *_ in adapted.module.blocks.values()])
    for block, pair in zip(by_matrix, pairs, strict=True):
        if pair:
            columns = slice(column, column + len(pair.a))
            a[columns] = pair.a
            block[:, columns] = pair.b * (pair.scale / scale)
            column = 0 if shared else columns.stop
    return rank


def _pairs_of(folder: Path, own: ModelConfig, arch: Architecture) -> Pairs:
    """Return the pairs of a checkpoint. Raises InputError unless its base has the dtype and quantisation of ``own``."""
    saved = checkpoint.load(folder, verified=True, only="adapter")
    theirs = recorded_config(saved.config, folder / "state.json")
    if (theirs.model.dtype, theirs.model.quantisation) != (own.dtype, own.quantisation):
        raise InputError(
            f"loss.teacher: {folder} was trained with model.dtype {theirs.model.dtype}, model.quantisation "
            f"{theirs.model.quantisation}; this run has {own.dtype}, {own.quantisation}; give one with the same"
        )
    modules = list(adapted_modules(arch, theirs.lora))
    return pairs_of(modules, read_factors(saved, modules), theirs.lora.alpha)


# ------------------------------------------------------------------------------------------------ its files


def refuse_other_files(named: str, inputs: dict[str, dict[str, str]]) -> None:
    """Raise InputError if a file of the teacher is damaged, or if its run recorded another model or tokenizer.

    ``named`` is loss.teacher. ``inputs`` has the checksums of this run's input files. They do not include a tiny model
    that has not been made yet.
    """
    folder, own = teacher.folder(named), inputs["model"]
    saved = {} if teacher.is_peft(folder) else read_object(folder / "checksums.json")
    for name, checksum in inputs["teacher"].items():
        if saved.get(name, checksum) != checksum:
            raise InputError(f"loss.teacher: {folder / name}: corrupted: its sha256 differs from the saved one")
    theirs = recorded_base(folder) if own else {}
    for name in sorted(theirs.keys() | own.keys() if theirs else ()):
        if (name in SAME or name.endswith(".safetensors")) and theirs.get(name) != own.get(name):
            raise InputError(f"loss.teacher: {folder} was trained with another {name}; give one of the same base model")


def describe(named: str) -> str:
    """Return a line that names the teacher. If its base model cannot be compared, the line says so."""
    folder = teacher.folder(named)
    unknown = "" if recorded_base(folder) else "; it does not record its base model, so this is not compared"
    return f"teacher: {folder}{unknown}"


def recorded_base(folder: Path) -> dict[str, str]:
    """Return the checksums that the teacher's run recorded for the files of its base model.

    The result is {} for a PEFT folder, or if there is no record.
    """
    record = of_last_start(folder.parent.parent, "inputs.json")
    has_one = record.is_file() and not teacher.is_peft(folder)
    return read_object(record, ("model",))["model"] if has_one else {}
