"""Two runs that start at once make one tiny model, whoever is first."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from unittest import mock

import torch
import training

from inputs import hf_config
from knobs import Config
from model import megatron_model
from weights import huggingface


def make(layout: str, cfg: Config, sender) -> None:
    """In a process of its own: what making the model ended with on rank 0."""
    try:
        training.in_world(layout, training.make_tiny_model, cfg)
        sender.send("made or found")
    except RuntimeError as error:  # of the first rank that failed, with its traceback
        sender.send(str(error))


def start(layout: str, cfg: Config):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("fork").Process(target=make, args=(layout, cfg, sender)).start()
    return receiver


def config(folder: Path, seed: int) -> Config:
    sizes = {f"tiny_model__{key}": value for key, value in training.SIZES.items()}
    sizes |= {"tiny_model__architecture": "qwen3_moe", "tiny_model__warm_start_steps": 10, "tiny_model__seed": seed}
    return training.config(folder / "models" / "tiny", folder, **sizes)


def test_two_starts_at_once_make_one_model(tmp_path: Path, capfd) -> None:
    """One makes it, the others wait and use it; one that wants another seed under this path is refused."""
    training.import_before_the_fork()
    same = config(tmp_path, seed=0)
    receivers = [start(layout, same) for layout in ("EP2", "TP1", "EP2")]
    assert [receiver.recv() for receiver in receivers] == ["made or found"] * 3
    said = capfd.readouterr().out
    assert said.count(f"making {same.model.path}: 10 supervised steps") == 1
    assert said.count(f"waiting: another process is making {same.model.path}") == 2
    huggingface.read_model(same.model.path, hf_config.read(same.model.path))

    # A finished model needs no lock, nor a place to write one.
    (Path(same.model.path).parent / ".making-tiny.lock").unlink()
    assert start("EP2", same).recv() == "made or found"
    assert [path.name for path in Path(same.model.path).parent.iterdir()] == ["tiny"]

    other = tmp_path / "other"
    receivers = [start("TP1", config(other, seed)) for seed in (1, 2)]
    answers = sorted(receiver.recv() for receiver in receivers)
    assert answers[0] == "made or found" and "was made with another tiny_model.seed (" in answers[1]
    assert sorted(path.name for path in (other / "models").iterdir()) == [".making-tiny.lock", "tiny"]


def warm_started(cfg: Config) -> tuple[list[torch.Tensor], list[str]]:
    """The weights of this rank's replica after the warm start, and what the watcher of stalls heard."""
    built: list[torch.nn.Module] = []
    heard: list[str] = []
    build = megatron_model.build
    with mock.patch.object(
        megatron_model, "build", lambda *args, **more: built.append(build(*args, **more)) or built[0]
    ):
        training.make_tiny_model(cfg, heard.append)
    return [parameter.detach() for parameter in built[0].parameters()], heard


def test_the_warm_start_gives_all_ranks_the_same_weights_and_the_watcher_every_step(tmp_path: Path) -> None:
    """Each rank has its own examples, so a gradient that is not summed over the ranks would drive them apart."""
    (first, heard), (second, _) = training.in_world("DP2", warm_started, config(tmp_path, seed=4))
    assert first and all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert heard == [f"step {step} of the warm start" for step in range(10)]
