"""Bad input through the command that the user types: one clear line on stderr and exit code 2.

Each row of the table makes one change to a run that works; the first tests show that it works. `--check` refuses
everything that it can see. The other rows (run=True) are refused in a world of one process. Some rows also run as a
process of their own.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import training
import world
from breaking import (
    HELD_OUT,
    QUESTIONS,
    Break,
    Place,
    cut,
    each_adapter,
    each_moment,
    each_state,
    exit_code,
    file,
    flip_a_bit,
    model,
    of_newest,
    other_factors,
    questions,
    resumed,
    state_with,
    taught,
    taught_by_peft,
    typed,
    variables,
    with_b,
    without_b,
    write_config,
)
from pytest import CaptureFixture, MonkeyPatch
from tiers import ci

import data_gsm8k
from plan import doctor
from runlog import run_record
from weights import tiny_model

pytestmark = [  # warnings of torch and Megatron about GPUs and each other; the command silences them
    pytest.mark.filterwarnings(r"ignore:::megatron\."),
    pytest.mark.filterwarnings(r"ignore:::torch\."),
]
ROOT = Path(__file__).resolve().parents[3]
NEW = typed("model.path=FOLDER/new", "tiny_model.seed=0")  # a tiny model that is to be made
OWN = '{"question": "30 + 1?", "answer": 31}\n{"question": "3 * 3?", "answer": "9"}\n'  # of data.source file


# ------------------------------------------------------------------------------------------------ the table


def row(name: str, expected: str, *changes: str | Break, run: bool = False):
    """``expected``: parts of the message in their order, joined by " ... "; ``changes``: arguments typed, or Breaks."""
    return pytest.param(expected, changes, run, id=name.replace(" ", "-"))


# fmt: off
CONFIG = [
    row("unknown key", "rollout.groupsize: unknown key; did you mean group_size?",
        lambda place: place.config.write_text(place.config.read_text().replace("group_size", "groupsize"))),
    row("no file", "run.yaml: cannot be read (No such file", lambda place: place.config.unlink()),
]
ENVIRONMENT = [
    row("threads", "environment's OMP_NUM_THREADS: must be ... 1 to 1024, not ''",
        variables(OMP_NUM_THREADS=""), run=True),
    row("rank beyond", "rank 2: error: ... environment's RANK: must be ... from 0 to 1, not '2'",
        variables(RANK="2", WORLD_SIZE="2"), run=True),
    row("address", "the environment's MASTER_ADDR: 'no.such.host.invalid'",
        variables(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_PORT="29000", MASTER_ADDR="no.such.host.invalid"),
        run=True),
    row("interface", "torch.distributed: the ranks did not find each other: ... nope",
        variables(GLOO_SOCKET_IFNAME="nope"), run=True),
]
LAYOUT = [
    row("key heads", "tensor: 4 does not divide the 2 key/value heads; the nearest that do: 2",
        "parallel.tensor=4", "--ranks=4"),
    row("vocabulary", "parallel.tensor: 2 does not divide the 319 tokens of the vocabulary; the nearest that do: 1",
        NEW, "tiny_model.vocab_size=319", "parallel.tensor=2", "--ranks=2"),
    row("ranks of a run", "--ranks: 2 cannot be used; give ... --check (torchrun starts ranks)", "--ranks=2", run=True),
    row("half a torchrun", "environment's WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: not set, but others ... "
        "set all of RANK, WORLD_SIZE,", variables(RANK="0"), run=True),
]
MODEL = [
    row("no model", "model.path: Qwen/Qwen3 has no config.json; give the folder of a Hugging Face model",
        "tiny_model=null", "model.path=Qwen/Qwen3"),
    row("config.json cut", "model/config.json: not valid JSON", model(cut("config.json"))),
    row("no tokenizer", "no tokenizer found; add tokenizer.json", model(file("tokenizer.json", None))),
    row("a template that opens no turn", "a prompt ends with '<|im_end|>\\n' after the question",
        model(lambda m: (m / "tokenizer_config.json").write_text((m / "tokenizer_config.json").read_text().replace(
            "add_generation_prompt", "no_such_flag")))),
    row("an adapter beside the weights", "adapter_config.json: is a LoRA adapter next to the weights",
        model(file("adapter_config.json", "{}"))),
    row("stop token", "use token 320, beyond its ", model(file("generation_config.json", '{"eos_token_id": 320}'))),
    row("tiny path of another", "model exists and has no readable tiny_model.json, ... give another path",
        "model.path=FOLDER/model", lambda place: file("tiny_model.json", None)(place.copy("model"))),
    row("no such model", "override model.path: HuggingFaceTB/SmolLM2-135M does not exist; give the folder of a model",
        "model.path=HuggingFaceTB/SmolLM2-135M", run=True),
]
DATA = [
    row("no held-out file", "test.jsonl: cannot be read (No such file", questions(test=None), run=True),
    row("data empty", "train.jsonl: has no rows; add at least one question", questions("\n")),
    row("data ending", "train.csv: found the ending '.csv'; use one of .jsonl, .json, .parquet",
        questions(ending="csv")),
    row("held-out and trained on", "data: 1 held-out questions of data.test_path are also training questions",
        questions(test=HELD_OUT + QUESTIONS.splitlines()[0].replace("What is", " What \u00a0 is") + "\n")),
    row("turns written as text", "train.jsonl, row 1: question: found ",
        questions(json.dumps({"question": str([{"role": "user", "content": "1?"}]), "answer": "#### 1"}) + "\n")),
    row("a special token in a question", "train.jsonl, row 2: user turn: contains '<|im_end|>', a special token",
        questions(QUESTIONS.replace("What is 4", "What <|im_end|> is 4"))),
    row("images beside the questions", "test.jsonl, row 1: images: found ['a.png']",
        questions(test=HELD_OUT.replace('"answer"', '"images": ["a.png"], "answer"'))),
    row("no number as gold answer", "reward.method: strict: gold: must be one number, not 'Four'; for other answers, "
        "set reward.method to math or use a reward.function",
        questions('{"question": "3 + 1?", "answer": "Four"}\n'), "data.source=file", "rollout.prompts_per_step=1",
        "optim.prompts_per_update=1"),
    row("gold answers in another form", "1 of 2 gold held-out ... the first with 0: '#### x' ... use a reward that "
        "fits the data's answers ... or set reward.check_gold=false",
        questions(OWN, OWN.replace("3", "4").replace('"9"', '"x"')), "data.source=file", "reward.method=verl_strict"),
    row("too many generated", "data.num_train: found 999999, but operands 1 to 49 give only", "data.num_train=999999"),
    # Everything else is checked before a tiny model is made, because that takes minutes.
    row("no model, no data file", "train.jsonl: cannot be read", questions(train=None), NEW),
    row("no model, bad reward", "reward.method: base_acc ... data.instruction must ask for",
        "reward.method=base_acc", NEW),
    row("no model, bad layout", "parallel.expert: 3 does not divide the 4 experts",
        "parallel.expert=3", "--ranks=3", NEW),
]
RESUME = [
    row("resume nothing", "train.resume: a/b has no usable checkpoint; give auto, never,", "train.resume=a/b"),
    row("changed key, run", "step-000002: saved with other values: optim.lr: 1e-05 -> 0.1; restore them",
        resumed(lambda r: None), "optim.lr=0.1", run=True),
    row("checkpoints corrupted", "run has no usable checkpoint", each_adapter(flip_a_bit), run=True),
    row("adapter of another", "is missing", each_adapter(other_factors(lambda t: t.popitem())), run=True),
    row("adapter sizes", "checkpoint: model.layers.0. ... has shape [ ... the model needs [",
        each_adapter(other_factors(lambda t: t.update({max(t): torch.ones(3, 5)}))), run=True),
    row("a text as step", "state.json: step is '2', which no run saves",
        each_state(lambda state: state.update(step="2")), run=True),
    row("other optimizer steps", "step-000002/state.json: step 2 and optimizer_steps 7 do not fit: a run has at most "
        "train.steps 2 steps of 2 // 2 optimizer steps, here 2 in all",
        each_state(lambda s: s["state"].update(optimizer_steps=7))),
    row("an unknown tensor", "checkpoint: optimizer: more.exp is unknown; only exp_avg and exp_avg_sq belong there",
        each_moment(lambda t: t.update({"more.exp": torch.ones(1)})), run=True),
    row("a negative square", "exp_avg_sq has a number that is not finite, or a negative square",
        each_moment(lambda t: [v.fill_(-1) for k, v in t.items() if k.endswith("sq")]), run=True),
    row("evaluation without accuracy", "eval.jsonl: an evaluation has no accuracies",
        resumed(file("eval.jsonl", '{"step": 0}\n')), run=True),
    row("live process", "run: another process is writing this run; end it, or", resumed(run_record.lock_run), run=True),
    row("metrics cut", "metrics.jsonl: 1 whole lines up to step 2, not", resumed(cut("metrics.jsonl")), run=True),
    row("out_dir a file", "train.out_dir: ... run.yaml is not a writable folder",
        typed("train.out_dir=FOLDER/run.yaml")),
    row("full disk",
        "run/log.txt: cannot be written: No space left on device; choose a writable folder with enough space",
        resumed(lambda r: ((r / "log.txt").unlink(), (r / "log.txt").symlink_to("/dev/full"))), run=True),
]
TEACHER = [  # the working run teaches, in a copy that each row changes
    row("teacher of another rank", "loss.teacher: ... step-000002: model.layers.0. ... has rank 32; set lora.rank to "
        "that or more", taught(), "lora.rank=16"),
    row("teacher corrupted", "loss.teacher: ... step-000002/adapter.safetensors: corrupted: its sha256 differs",
        taught(of_newest("adapter.safetensors", flip_a_bit))),
    row("teacher corrupted, run", "loss.teacher: ... step-000002/state.json: corrupted: its sha256 differs",
        taught(of_newest("state.json", lambda path: path.write_text(path.read_text() + "\n"))), run=True),
    row("teacher nowhere", "loss.teacher: a/b has no adapter; give a run, a checkpoint or a PEFT folder",
        "loss.teacher=a/b"),
    row("teacher with more targets", "step-000002 adapts model.layers.0. ... add their layers to lora.targets",
        taught(), "lora.targets=[linear_qkv]"),
    row("teacher of another dtype", "with model.dtype fp32, model.quantisation none; this run has bf16, none",
        taught(), "model.dtype=bf16"),
    row("teacher of another quantisation", "with model.dtype fp32, model.quantisation int4; this run has fp32, none",
        taught(of_newest("state.json", state_with(lambda s: s["config"]["model"].update(quantisation="int4"))))),
    row("teacher on other weights", "loss.teacher: ... was trained with another model.safetensors; give one of the",
        taught(), model(lambda folder: flip_a_bit(folder / "model.safetensors"))),
    row("teacher with another tokenizer", "was trained with another tokenizer.json; give one of the same base model",
        taught(),
        model(lambda m: (m / "tokenizer.json").write_text((m / "tokenizer.json").read_text() + "\n")), run=True),
    row("teacher cut", "step-000002/adapter.safetensors: not a readable safetensors file",
        taught(of_newest("adapter.safetensors", lambda path: cut(path.name)(path.parent)))),
    row("teacher without a factor", "step-000002/adapter.safetensors: model.layers.0. ... is missing",
        taught(of_newest("adapter.safetensors", other_factors(lambda t: t.popitem())))),
    row("teacher without a file", "step-000002/adapter.safetensors: model.layers.0. ... is missing",
        taught(of_newest("adapter.safetensors", Path.unlink))),
    row("teacher of another version", "step-000002/state.json: lora.rang: unknown key; did you mean rank?",
        taught(of_newest("state.json", state_with(lambda s: s["config"]["lora"].update(rang=4))))),
    row("teacher of PEFT cut", "peft/adapter_model.safetensors: not a readable safetensors file",
        taught_by_peft(cut("adapter_model.safetensors"))),
    row("teacher of PEFT untrained", "peft/adapter_model.safetensors: every B is 0", taught_by_peft(without_b)),
]
# fmt: on
# What readers find is in their own tests. Here are refusals that only a whole command meets, and that the command makes
# one line of what a reader finds.
TABLE = [
    one if place < 2 else pytest.param(*one.values, id=one.id, marks=pytest.mark.ci)
    for part in (CONFIG, ENVIRONMENT, LAYOUT, MODEL, DATA, RESUME, TEACHER)
    for place, one in enumerate(part)
]
PROCESSES = [param for param in TABLE if param.id in ("resume-nothing", "unknown-key")]


# ------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, its model and its finished run."""
    world._import_megatron()
    folder = tmp_path_factory.mktemp("good")
    write_config(folder / "run.yaml", folder / "model", folder / "out")
    assert exit_code([str(folder / "run.yaml")]) == 0
    (made,) = (folder / "out").iterdir()
    made.rename(folder / "run")
    data_gsm8k.load_tokenizer(folder / "model")  # otherwise the process of every row would import the package again
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path, good, monkeypatch)
    write_config(place.config, good / "model", tmp_path / "out")
    yield place
    for opened in place.held:
        if hasattr(opened, "close"):
            opened.close()


def command(place: Place, changes: tuple[str | Break, ...], run: bool) -> list[str]:
    """The arguments after `python train_grpo.py`, after all changes were made."""
    for change in changes:
        (typed(change) if isinstance(change, str) else change)(place)
    return [str(place.config), *place.arguments, *([] if run else ["--check"])]


def assert_one_line(stderr: str, expected: str) -> None:
    assert re.match(r"(rank \d+: )?error: ", stderr) and stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    assert len(stderr) < 500 and "Traceback" not in stderr, stderr
    rest = stderr
    for part in expected.split(" ... "):
        assert part in rest, f"{part!r} is not in {rest!r} of {stderr!r}"
        rest = rest.partition(part)[2]


@pytest.mark.parametrize("run", [True, False], ids=["run", "check"])
@pytest.mark.parametrize(
    "broken",
    [
        NEW,
        resumed(lambda r: None),
        taught_by_peft(with_b),
        ci(typed()),
        ci(model(lambda m: None)),
        ci(questions()),
    ],
)
def test_an_unbroken_run_prints_nothing_on_stderr(broken, run, place: Place, capfd: CaptureFixture) -> None:
    assert exit_code(command(place, (broken,), run)) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["a tiny model that is not there", "file", "resumed"])
def test_a_check_shows_the_first_prompt_a_right_answer_and_what_a_start_would_do(
    kind: str, place: Place, capfd: CaptureFixture
) -> None:
    """The prompt is that of the chat template, with its special tokens. Nothing is left behind."""
    change = {"a tiny model that is not there": NEW, "file": questions(), "resumed": resumed(lambda r: None)}[kind]
    arguments = command(place, (change,), run=False)
    before = sorted(place.folder.rglob("*"))
    assert exit_code(arguments) == 0 and sorted(place.folder.rglob("*")) == before
    said = capfd.readouterr().out
    assert "layout: 1 ranks = tensor 1 x data 1 = expert 1 x expert_data 1" in said
    assert ("a start creates a tiny model: architecture=" in said) == (change is NEW)
    step = {"resumed": 2}.get(kind, 0)
    prompt, answer = re.search(
        rf"the first prompt of step {step + 1}, as the model sees it .*?:\n(.*)\na correct answer, .*:\n(.*)\na start ",
        said,
        re.S,
    ).groups()
    assert re.fullmatch(r"    <\|im_start\|>user\n    \S.*<\|im_end\|>\n    <\|im_start\|>assistant\n", prompt, re.S)
    result = re.fullmatch(r"    #### (\d+)", answer.splitlines()[-1])[1]
    assert set(re.findall(r"\d+", answer)) <= {*re.findall(r"\d+", prompt), result}
    run = place.folder / "run"
    start = (
        f"continues {run} after step 2 of 2" if kind == "resumed" else f"begins a new run in {place.folder / 'out'}/"
    )
    assert said.splitlines()[-1].startswith(f"a start {start}") and said.endswith("; the input is usable\n")


@pytest.mark.parametrize(
    ("name", "architecture", "ranks"),
    [
        ("qwen3", "qwen3_moe", 16),
        ci("qwen15_moe", "qwen2_moe", 16),
        ci("olmoe", "olmoe", 8),
        ci("math", "qwen3_moe", 16),
    ],
)
def test_a_check_away_from_the_device_judges_the_rest_and_says_so(
    name: str, architecture: str, ranks: int, tmp_path: Path, capfd: CaptureFixture
) -> None:
    """The configurations of NPUs, with a small model in place of theirs. A start is refused."""
    sizes = {"vocab_size": 320, "hidden_size": 1024}  # the least that an NPU's kernels of experts take
    if architecture != "qwen3_moe":
        sizes["head_dim"] = 1024 // training.SIZES["num_heads"]
    model_dir = training.make_model(tmp_path / "model", architecture, **sizes)
    settings = json.loads((model_dir / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (model_dir / "config.json").write_text(json.dumps(settings))
    for part, first in (("train", 0), ("test", 200)):
        rows = [{"question": f"What is {n} + 2?", "answer": f"#### {n + 2}"} for n in range(first, first + 200)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = [f"data.{part}_path={tmp_path}/{part}.jsonl" for part in ("train", "test")]
    values += ["data.source=gsm8k", "eval.sets={}", f"model.path={model_dir}", f"train.out_dir={tmp_path}/out"]
    arguments = [f"{ROOT}/configs/{name}.yaml", *values]
    away = "device: npu: torch_npu is not installed; install requirements/npu.txt"
    assert exit_code([*arguments, "--check", "--ranks", str(ranks)]) == 0
    line, start = capfd.readouterr().out.splitlines()[-2:]
    assert line == f"not checked: the device and the engine on it ({away})"
    assert start.startswith("a start begins a new run") and start.endswith("the input is usable")
    assert exit_code(arguments) == 2 and f"error: {away}\n" in capfd.readouterr().err
    arguments.append("model.path=absent")
    assert exit_code([*arguments, "--check", "--ranks", str(ranks)]) == 2
    assert "error: model.path: absent has no config.json; give the folder of a Hugging Face" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "todo"),
    [
        (["train_grpo.py"], ""),
        (["train_grpo.py", "--check"], ", or give --check --ranks 4"),
        (["preflight.py", "--groups"], ""),
    ],
)
def test_a_layout_of_several_ranks_without_torchrun_says_how_to_start_them(command, todo: str) -> None:
    """Tensor 2 and expert 4 need 4 ranks, the least common multiple."""
    layout = [f"{ROOT}/configs/tiny_cpu.yaml", "parallel.tensor=2", "parallel.expert=4"]
    done = subprocess.run([sys.executable, *command, *layout], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"; start it with torchrun --nproc_per_node=4{todo}"), done.stderr


@pytest.mark.parametrize(("expected", "changes", "run"), TABLE)
def test_bad_input_gives_one_line_and_code_2(expected, changes, run, place: Place, capfd: CaptureFixture) -> None:
    assert exit_code(command(place, changes, run)) == 2
    assert_one_line(capfd.readouterr().err, expected)


def test_questions_that_look_alike_are_named_once_and_kept(place: Place, capfd: CaptureFixture) -> None:
    """Training questions against held-out ones, and those of one file. They may differ, as 3² and 32 do."""
    row = '{{"question": "What is {}?", "answer": "#### 1"}}\n'
    train = "".join(map(row.format, ("3\u00b2", "32", "5\u2075", "7", "x")))
    held_out = "".join(map(row.format, ("55", "X")))
    arguments = command(place, (questions(train, held_out), "reward.check_gold=false"), run=False)
    assert exit_code(arguments) == 0
    warned = [line for line in capfd.readouterr().out.splitlines() if "differ from another one only" in line]
    assert [line.partition(" questions")[0][9:] for line in warned] == ["train: 1", "train and held out: 2"]
    assert "'What is 3\u00b2?' and 'What is 32?'" in warned[0] and "'What is 5\u2075?' and 'What is 55?'" in warned[1]


@pytest.mark.parametrize(("expected", "changes", "run"), PROCESSES)
def test_the_process_ends_with_that_line_and_code(expected, changes, run, place: Place) -> None:
    typed_line = [sys.executable, "train_grpo.py", *command(place, changes, run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(typed_line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 2
    assert_one_line(done.stderr, expected)


@pytest.mark.ci
@pytest.mark.parametrize("module, name", [(doctor, "quick"), (tiny_model, "write_random_model")])
def test_the_watcher_ends_a_start_that_stalls(module, name, place: Place, capfd: CaptureFixture) -> None:
    place.monkeypatch.setattr(module, name, lambda *arguments: time.sleep(100))
    changes = (NEW, "train.stall_seconds=2")
    assert exit_code(command(place, changes, run=True)) == 4
    assert "rank 0: made no progress for" in capfd.readouterr().err
