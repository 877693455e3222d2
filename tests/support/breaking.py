"""A run that works, ways to break one part of it, and the command in a process; test_bad_input.py uses them.

A `Break` changes a `Place`: the row's own copy of a working run, and the arguments after the configuration's name.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import world
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file
from torch import Tensor

import export
import train_grpo
from runlog.run_record import sha256_file

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
    """The folder of one row. ``good`` holds a working run: run.yaml, model/, and run/, the finished run."""

    folder: Path
    good: Path
    monkeypatch: MonkeyPatch
    arguments: list[str] = field(default_factory=list)
    held: list = field(default_factory=list)  # open files, to be closed at the end

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    def copy(self, name: str) -> Path:
        """A copy, for this row, of the folder ``name`` of ``good``."""
        return Path(shutil.copytree(self.good / name, self.folder / name))


Break = Callable[[Place], object]


def write_config(path: Path, model: Path, out_dir: Path) -> None:
    path.write_text(CONFIG.replace("MODEL", str(model)).replace("OUT", str(out_dir)))


def exit_code(arguments: list[str]) -> int:
    """Exit code of train_grpo.main in a forked process, which shares stdout and stderr with this one.

    It does not run in this process, because the threads of torch would block every process that a later test forks.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        world.exit_with(lambda: train_grpo.main(arguments), failed=99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def typed(*arguments: str) -> Break:
    """Add arguments to the command line. FOLDER in them stands for the folder of the test."""
    return lambda place: place.arguments.extend(text.replace("FOLDER", str(place.folder)) for text in arguments)


def variables(**values: str) -> Break:
    """Environment variables are set."""
    return lambda place: [place.monkeypatch.setenv(name, value) for name, value in values.items()]


# ------------------------------------------------------------------------------------------------ the model


def model(make: Callable[[Path], object]) -> Break:
    """The run uses an existing model, whose folder is changed."""

    def change(place: Place) -> None:
        typed("tiny_model=null", "model.path=FOLDER/model")(place)
        make(place.copy("model"))

    return change


def file(name: str, content: str | bytes | None) -> Callable[[Path], object]:
    """In a folder: a file gets this content; None: it is removed."""

    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def cut(name: str) -> Callable[[Path], object]:
    """In a folder: a file loses its end."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 100)


def failing_read(path: Path) -> None:
    """A file takes the place of ``path`` that can be opened and whose first byte cannot be read (EIO)."""
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")


# ------------------------------------------------------------------------------------------------ data, the resumed run


def questions(train: str | None = QUESTIONS, test: str | None = HELD_OUT, ending: str = "jsonl") -> Break:
    """Use GSM8K files with this content; with None the file is missing."""

    def change(place: Place) -> None:
        typed("data.source=gsm8k")(place)
        for split, content in (("train", train), ("test", test)):
            typed(f"data.{split}_path=FOLDER/{split}.{ending}")(place)
            if content is not None:
                (place.folder / f"{split}.{ending}").write_text(content)

    return change


def resumed(make: Callable[[Path], object]) -> Break:
    """The run to resume is changed."""

    def change(place: Place) -> None:
        typed("train.resume=FOLDER/run")(place)
        place.held.append(make(place.copy("run")))

    return change


def each_adapter(make: Callable[[Path], object]) -> Break:
    """The adapter file of each checkpoint of the run to resume is changed."""
    return resumed(lambda run: [make(path) for path in sorted(run.glob("checkpoints/*/adapter.safetensors"))])


def each_moment(make: Callable[[dict[str, Tensor]], object]) -> Break:
    """The moments in each checkpoint of the run to resume are changed, and their checksum is corrected."""
    rewrite = other_factors(make)
    return resumed(lambda run: [rewrite(path) for path in sorted(run.glob("checkpoints/*/optimizer.safetensors"))])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_factors(make: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """In a checkpoint: the adapter of another model, with a right checksum."""

    def rewrite(path: Path) -> None:
        named = load_file(path)
        make(named)
        save_file(named, path)
        _seal(path)

    return rewrite


def state_with(make: Callable[[dict], object]) -> Callable[[Path], object]:
    """In a checkpoint: another state.json, with a right checksum."""

    def rewrite(path: Path) -> None:
        state = json.loads(path.read_text())
        make(state)
        path.write_text(json.dumps(state))
        _seal(path)

    return rewrite


def each_state(make: Callable[[dict], object]) -> Break:
    """state.json of each checkpoint of the run to resume is changed, and its checksum is corrected."""
    rewrite = state_with(make)
    return resumed(lambda run: [rewrite(path) for path in sorted(run.glob("checkpoints/*/state.json"))])


# ------------------------------------------------------------------------------------------------ the teacher


def taught(make: Callable[[Path], object] = lambda run: None) -> Break:
    """The run has a teacher, another run, which is changed."""

    def change(place: Place) -> None:
        typed("loss.teacher=FOLDER/run")(place)
        make(place.copy("run"))

    return change


def of_newest(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """In a run: a file of its last checkpoint is changed."""
    return lambda run: make(run / "checkpoints" / "step-000002" / name)


def taught_by_peft(make: Callable[[Path], object]) -> Break:
    """The teacher is the adapter of a run as PEFT writes it, which is changed."""

    def change(place: Place) -> None:
        typed("loss.teacher=FOLDER/peft")(place)
        export.export(place.good / "run", place.folder / "peft", form="leaf", step=None, accept_changed_inputs=False)
        make(place.folder / "peft")

    return change


def with_b(folder: Path) -> None:
    """An adapter of PEFT gets an update. The working run has none, because all its rewards are equal."""
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor + 0.01 * ("lora_B" in name) for name, tensor in load_file(path).items()}, path)


def without_b(folder: Path) -> None:
    """An adapter of PEFT loses its update."""
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor * ("lora_A" in name) for name, tensor in load_file(path).items()}, path)


def _seal(path: Path) -> None:
    checksums = path.with_name("checksums.json")
    checksums.write_text(json.dumps(json.loads(checksums.read_text()) | {path.name: sha256_file(path)}))
