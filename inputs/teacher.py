"""Where the adapter of loss.teacher is: in a run, in one of its checkpoints, or in a PEFT folder."""

from pathlib import Path

# The files that decide what the teacher is: those of a checkpoint, and those of PEFT.
FILES = ("state.json", "adapter.safetensors", "adapter_config.json", "adapter_model.safetensors")


def folder(named: str) -> Path:
    """Return the checkpoint or the PEFT folder. A run stands for its newest checkpoint."""
    steps = [path for path in Path(named, "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    return max(steps, key=lambda path: int(path.name[5:]), default=Path(named))


def is_peft(folder: Path) -> bool:
    """Return whether ``folder`` holds an adapter of PEFT."""
    return (folder / "adapter_config.json").is_file()


def files(named: str) -> dict[str, Path]:
    """Return those of FILES that are there, by name."""
    where = folder(named)
    return {name: where / name for name in FILES if (where / name).is_file()}
