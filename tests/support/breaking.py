"""A run that works, the ways to break one thing about it, and the command in a process: for tests/test_bad_input.py.

A `Break` changes a `Place`: the row's own copy of what works, and what the user types after the configuration's name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import world
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file
from torch import Tensor

import train_grpo
from run_record import sha256_file

CONFIG = """\
name: good
device: cpu
model: {path: MODEL, dtype: fp32}
tiny_model:
  {architecture: qwen3_moe, vocab_size: 320, hidden_size: 16, num_layers: 1, num_heads: 4, num_kv_heads: 2, head_dim: 4,
   num_experts: 4, expert_width: 16, warm_start_steps: 0}
data: {source: arithmetic, max_prompt_tokens: 96, num_train: 8, num_test: 4}
rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 4}
optim: {prompts_per_update: 2}
eval: {samples: 0}
train: {steps: 2, out_dir: OUT, checkpoint_every: 1}
"""
QUESTIONS, HELD_OUT = (
    "".join(f'{{"question": "What is {n} + 1?", "answer": "{n} + 1\\n#### {n + 1}"}}\n' for n in numbers)
    for numbers in ((3, 4), (5, 6))
)


@dataclass
class Place:
    """A row's own folder; ``good`` holds what works: run.yaml, model/, and run/, the finished run."""

    folder: Path
    good: Path
    monkeypatch: MonkeyPatch
    arguments: list[str] = field(default_factory=list)
    held: list = field(default_factory=list)  # open files, to be closed in the end

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    def copy(self, name: str) -> Path:
        """``good``'s folder of that name as this row's own."""
        return Path(shutil.copytree(self.good / name, self.folder / name))


Break = Callable[[Place], object]


def write_config(path: Path, model: Path, out_dir: Path) -> None:
    path.write_text(CONFIG.replace("MODEL", str(model)).replace("OUT", str(out_dir)))


def exit_code(arguments: list[str]) -> int:
    """train_grpo.main in a forked process, which writes where this one writes.

    Not in this one: torch's threads, once started, would block every process that a later test forks.
    """
    with warnings.catch_warnings():  # Python 3.12 warns of every fork of a process that has threads
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(300)
        world.exit_with(lambda: train_grpo.main(arguments), failed=99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def typed(*arguments: str) -> Break:
    """Arguments in which FOLDER stands for the row's own folder."""
    return lambda place: place.arguments.extend(text.replace("FOLDER", str(place.folder)) for text in arguments)


def variables(**values: str) -> Break:
    """Environment variables."""
    return lambda place: [place.monkeypatch.setenv(name, value) for name, value in values.items()]


# ------------------------------------------------------------------------------------------------ the configuration


def text(old: str, new: str) -> Break:
    """The configuration with one change."""

    def change(place: Place) -> None:
        before = place.config.read_text()
        assert before.count(old) == 1
        place.config.write_text(before.replace(old, new))

    return change


def instead(make: Callable[[Path], object]) -> Break:
    """Something else in place of the configuration's file."""

    def change(place: Place) -> None:
        place.config.unlink()
        make(place.config)

    return change


# ------------------------------------------------------------------------------------------------ the model


def model(make: Callable[[Path], object]) -> Break:
    """A model that was there before, its folder changed."""

    def change(place: Place) -> None:
        typed("tiny_model=null", "model.path=FOLDER/model")(place)
        make(place.copy("model"))

    return change


def tiny(make: Callable[[Path], object]) -> Break:
    """The folder of the tiny model that the configuration describes, changed."""

    def change(place: Place) -> None:
        typed("model.path=FOLDER/model")(place)
        make(place.copy("model"))

    return change


def file(name: str, content: str | bytes | None) -> Callable[[Path], object]:
    """In a folder: a file with this content, or without that file."""

    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def cut(name: str) -> Callable[[Path], object]:
    """In a folder: a file that lacks its end."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 100)


def folder_instead(name: str) -> Callable[[Path], object]:
    """In a folder: a folder with the name of a file."""
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def pipe_instead(name: str) -> Callable[[Path], object]:
    """In a folder: a pipe, which nobody writes to, with the name of a file."""
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


def option(**changes: object) -> Break:
    """A model with other lines in its config.json; None leaves one out."""

    def make(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in settings.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return model(make)


def tensors(make: Callable[[dict[str, Tensor]], object]) -> Break:
    """A model with other weights."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        named = load_file(path)
        make(named)
        save_file(named, path)

    return model(rewrite)


def header(make: Callable[[dict], object]) -> Break:
    """A model whose safetensors file says something else about its tensors."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        about = json.loads(content[8:end])
        make(about)
        text = json.dumps(about).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return model(rewrite)


def vocabulary(size: int) -> Break:
    """A model that knows fewer tokens than its tokenizer."""

    def make(place: Place) -> None:
        tensors(lambda t: t.update({name: t[name][:size].clone() for name in t if t[name].shape[0] == 320}))(place)
        path = place.folder / "model" / "config.json"
        path.write_text(path.read_text().replace('"vocab_size": 320', f'"vocab_size": {size}'))

    return make


def index(weight_map: object) -> Break:
    """A model whose weights are listed in an index."""
    return model(file("model.safetensors.index.json", json.dumps({"weight_map": weight_map})))


# ------------------------------------------------------------------------------------------------ data, the run so far


def questions(train: str | None = QUESTIONS, test: str | None = HELD_OUT, ending: str = "jsonl") -> Break:
    """GSM8K files with this content; None: no such file."""

    def change(place: Place) -> None:
        typed("data.source=gsm8k")(place)
        for split, content in (("train", train), ("test", test)):
            typed(f"data.{split}_path=FOLDER/{split}.{ending}")(place)
            if content is not None:
                (place.folder / f"{split}.{ending}").write_text(content)

    return change


def resumed(make: Callable[[Path], object]) -> Break:
    """The run to go on with, changed."""

    def change(place: Place) -> None:
        typed("train.resume=FOLDER/run")(place)
        place.held.append(make(place.copy("run")))

    return change


def each_adapter(make: Callable[[Path], object]) -> Break:
    """The run to go on with, the adapter file of each of its checkpoints changed."""
    return resumed(lambda run: [make(path) for path in sorted(run.glob("checkpoints/*/adapter.safetensors"))])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_factors(make: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """In a checkpoint: an adapter whose checksum is right, but which belongs to another model."""

    def rewrite(path: Path) -> None:
        named = load_file(path)
        make(named)
        save_file(named, path)
        _seal(path)

    return rewrite


def each_state(make: Callable[[dict], object]) -> Break:
    """The run to go on with, state.json of each of its checkpoints changed, their checksums right."""

    def rewrite(path: Path) -> None:
        state = json.loads(path.read_text())
        make(state)
        path.write_text(json.dumps(state))
        _seal(path)

    return resumed(lambda run: [rewrite(path) for path in sorted(run.glob("checkpoints/*/state.json"))])


def _seal(path: Path) -> None:
    checksums = path.with_name("checksums.json")
    checksums.write_text(json.dumps(json.loads(checksums.read_text()) | {path.name: sha256_file(path)}))
