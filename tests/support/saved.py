"""A configuration that needs no model, and small checkpoints that reveal a mixture of two steps."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inputs.config import to_dict
from knobs import Config, DataConfig, ModelConfig, TrainConfig
from runlog.log import RunLog
from weights import checkpoint


def config_in(folder: Path, **train: object) -> Config:
    settings = {"steps": 200, "checkpoint_every": 2, "out_dir": str(folder / "out"), **train}
    return Config(
        name="tiny", model=ModelConfig(path="none"), data=DataConfig(source="arithmetic"), train=TrainConfig(**settings)
    )


def opened(cfg: Config, world_size: int = 1, rank: int = 0, resume: Path | None = None) -> RunLog:
    log = RunLog(cfg, rank)
    log.open(world_size, resume)
    return log


def tensors_of(step: int, size: int = 64) -> dict[str, dict[str, Tensor]]:
    """All values are the number of the step, so a mixture of two checkpoints is noticed."""
    return {
        "adapter": {"layers.0.lora_A": torch.full((size,), float(step)), "b": torch.full((2, 3), step).bfloat16()},
        "optimizer": {"layers.0.lora_A.exp_avg": torch.full((size,), float(step)), "count": torch.tensor(step)},
    }


def is_whole(found: checkpoint.Checkpoint) -> bool:
    values = {float(value) for named in found.tensors.values() for t in named.values() for value in t.unique()}
    return values == {float(found.step)} and found.state == {"cursor": found.step}


def saved(run_dir: Path, cfg: Config, *steps: int) -> list[Path]:
    run_dir.mkdir(exist_ok=True)
    return [save(run_dir, step, tensors_of(step), {"cursor": step}, cfg) for step in steps]


def save(run_dir: Path, step: int, tensors: dict, state: dict, cfg: Config) -> Path:
    """A checkpoint as a run of ``cfg`` writes it."""
    return checkpoint.save(run_dir, step, tensors, state, to_dict(cfg), cfg.train.keep_last)


def resumable(cfg: Config, say: Callable[[str], None] = print) -> checkpoint.Checkpoint | None:
    """What a start of ``cfg`` finds under train.resume=auto."""
    return checkpoint.find_resumable(checkpoint.runs_of(cfg.name, Path(cfg.train.out_dir)), to_dict(cfg), say)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
