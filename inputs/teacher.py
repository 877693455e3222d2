"""Finds the adapter of loss.teacher: in a run, in one of its checkpoints, or in a PEFT folder."""

from pathlib import Path

# The files of a checkpoint and of a PEFT folder that determine the teacher.
FILES = ("state.json", "adapter.safetensors", "adapter_config.json", "adapter_model.safetensors")


def folder(named: str) -> Path:
    """Return the folder ``named``, or its newest checkpoint if it is the folder of a run."""
    steps = [path for path in Path(named, "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    return max(steps, key=lambda path: int(path.name[5:]), default=Path(named))


def is_peft(folder: Path) -> bool:
    """Return whether ``folder`` contains a PEFT adapter."""
    return (folder / "adapter_config.json").is_file()


def files(named: str) -> dict[str, Path]:
    """Return the paths of those FILES that the teacher ``named`` has, by name."""
    where = folder(named)
    return {name: where / name for name in FILES if (where / name).is_file()}
