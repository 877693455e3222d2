"""Bad input of every kind, through the command that the user types: one clear line on stderr and exit code 2.

Each row of the table is one change away from a run that works, which is itself the first test. What `--check` can see
is refused by `--check`; the rest in a world of one process. Three rows run as a process of their own.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytest import CaptureFixture, MonkeyPatch
from safetensors.torch import load_file, save_file

import parallel_setup
import runlog
import train_grpo
from run_record import sha256_file

pytestmark = [  # other people's notes about GPUs and about each other; train_grpo.py silences them as a command
    pytest.mark.filterwarnings(r"ignore:::megatron\."),
    pytest.mark.filterwarnings(r"ignore:::torch\."),
    pytest.mark.filterwarnings("ignore:unclosed file .*run.lock:ResourceWarning"),  # the end of the process closes it
]
ROOT = Path(__file__).resolve().parent.parent
GOOD = """\
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
ROWS = "".join(f'{{"question": "What is {n} + 1?", "answer": "{n} + 1\\n#### {n + 1}"}}\n' for n in (3, 4))
NORM = "model.norm.weight"


# ------------------------------------------------------------------------------------------------ how to break things


@dataclass
class Place:
    """A row's own folder; what it breaks is a copy of what works in ``good``."""

    folder: Path
    good: Path
    monkeypatch: MonkeyPatch
    arguments: list[str] = field(default_factory=list)  # what the user types after the configuration's name
    held: list = field(default_factory=list)  # open files

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    def copy(self, name: str) -> Path:
        """The good model ("model") or the finished run ("run") as this row's own."""
        return Path(shutil.copytree(self.good / name, self.folder / name))


Break = Callable[[Place], object]


def text(old: str, new: str) -> Break:
    """The configuration with one change."""

    def change(place: Place) -> None:
        assert old in place.config.read_text()
        place.config.write_text(place.config.read_text().replace(old, new))

    return change


def instead(make: Callable[[Path], object]) -> Break:
    """The configuration file replaced by something else."""

    def change(place: Place) -> None:
        place.config.unlink()
        make(place.config)

    return change


def model(make: Callable[[Path], object]) -> Break:
    """A ready model whose folder has been changed."""

    def change(place: Place) -> None:
        place.arguments = ["tiny_model=null", f"model.path={place.folder / 'model'}"]
        make(place.copy("model"))

    return change


def option(**changes: object) -> Break:
    """A ready model with other lines in its config.json; None leaves one out."""

    def make(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in settings.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return model(make)


def tensors(make: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    """A ready model with other weights."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        named = load_file(path)
        make(named)
        save_file(named, path, metadata={"format": "pt"})

    return model(rewrite)


def smaller_vocabulary(size: int) -> Break:
    """A ready model with a tokenizer of more tokens than it knows."""

    def cut_rows(folder: Path) -> None:
        path = folder / "model.safetensors"
        named = load_file(path)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            named[name] = named[name][:size].clone()
        save_file(named, path)
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"vocab_size": 320', f'"vocab_size": {size}'))

    return model(cut_rows)


def index(weight_map: object) -> Break:
    return model(lambda m: (m / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map})))


def tiny(make: Callable[[Path], object]) -> Break:
    """A changed folder where the tiny model of the configuration should be."""

    def change(place: Place) -> None:
        place.arguments = [f"model.path={place.folder / 'model'}"]
        make(place.copy("model"))

    return change


def questions(train: str | None = ROWS, test: str | None = ROWS, ending: str = "jsonl") -> Break:
    """GSM8K files with this content; None: no such file."""

    def change(place: Place) -> None:
        place.arguments = ["data.source=gsm8k"]
        for split, content in (("train", train), ("test", test)):
            path = place.folder / f"{split}.{ending}"
            place.arguments.append(f"data.{split}_path={path}")
            if content is not None:
                path.write_text(content)

    return change


def resumed(make: Callable[[Path], object]) -> Break:
    """The run to go on with, changed."""

    def change(place: Place) -> None:
        place.arguments = [f"train.resume={place.folder / 'run'}"]
        place.held.append(make(place.copy("run")))

    return change


def each_adapter(make: Callable[[Path], object]) -> Break:
    """The run to go on with, the adapter file of each of its checkpoints changed."""
    return resumed(lambda run: [make(path) for path in sorted(run.glob("checkpoints/*/adapter.safetensors"))])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def without_a_factor(path: Path, shorter: bool = False) -> None:
    """An adapter that its checksum vouches for, but of another model."""
    named = load_file(path)
    name = sorted(named)[-1]
    value = named.pop(name)
    save_file(named | ({name: value[..., 1:].contiguous()} if shorter else {}), path)
    checksums = path.with_name("checksums.json")
    checksums.write_text(json.dumps(json.loads(checksums.read_text()) | {path.name: sha256_file(path)}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def blocked(name: str) -> Break:
    """A file where the folder of that name should be, so that nothing can be written there: true for root as well."""
    return lambda place: (place.folder / name).write_text("")


def environment(**variables: str) -> Break:
    return lambda place: [place.monkeypatch.setenv(name, value) for name, value in variables.items()]


# ------------------------------------------------------------------------------------------------ the table


def row(name: str, expected: str, *arguments: str, broken: Break | None = None, run: bool = False):
    """``expected``: parts of the message in their order, joined by " ... "; ``run``: without --check."""
    return pytest.param(expected, arguments, broken, run, id=name.replace(" ", "-"))


CONFIG = [
    row("no file", "run.yaml: cannot read it: No such file", broken=instead(lambda p: None)),
    row("a folder as file", "run.yaml: cannot read it: Is a directory", broken=instead(Path.mkdir)),
    row("an empty file", "run.yaml: expected a mapping of sections, found nothing", broken=instead(Path.touch)),
    row("a list as file", "expected a mapping of sections, found [1]", broken=instead(lambda p: p.write_text("[1]"))),
    row("bytes as file", "run.yaml: not UTF-8 text at byte 0", broken=instead(lambda p: p.write_bytes(b"\xff\0"))),
    row("YAML syntax", "run.yaml line 3: not valid YAML: expected", broken=text("device: cpu", "device: [cpu")),
    row("a tab", "run.yaml line 2: not valid YAML", broken=text("device: cpu", "\tdevice: cpu")),
    row("python object", "not valid YAML: could not determine a constructor", broken=text("good", "!!python/name:os.x")),
    row("a key twice", "run.yaml line 3: not valid YAML: key 'device' given", broken=text("model:", "device: cpu\nmodel:")),
    row("unknown key", "rollout.groupsize: unknown key; did you mean group_size?", broken=text("group_size", "groupsize")),
    row("unknown section", "optimizer: unknown key; did you mean optim?", broken=text("optim:", "optimizer:")),
    row("key of another section", "model.steps: unknown key; did you mean train.steps?", "model.steps=1"),
    row("a required key is missing", "train.steps: missing; needed: a step is", broken=text("steps: 2, ", "")),
    row("a section that is a number", "eval: expected a mapping of keys, found 3", broken=text("{samples: 0}", "3")),
    row("text for a number", "train.steps: expected a whole number, found 'many'", "train.steps=many"),
    row("true for a number", "train.steps: expected a whole number, found true", "train.steps=true"),
    row("a number for true", "train.tensorboard: expected true or false, found 1", "train.tensorboard=1"),
    row("a fraction", "train.steps: expected a whole number, found 1.5", "train.steps=1.5"),
    row("a number for text", "name: expected text", "name=1"),
    row("a path as name", "name: expected text like", "name=a/b"),
    row("nan", "optim.lr: expected a number, found '.nan'", "optim.lr=.nan"),
    row("nan as a word", "optim.lr: expected a number, found 'nan'", "optim.lr=nan"),
    row("infinite", "optim.lr: expected a finite number, found inf", "optim.lr=1e999"),
    row("negative", "optim.lr: expected more than 0.0, found -0.1", "optim.lr=-0.1"),
    row("zero", "parallel.tensor: expected 1 or more, found 0", "parallel.tensor=0"),
    row("a group of one", "rollout.group_size: expected 2 or more, found 1", "rollout.group_size=1"),
    row("text for a list", "lora.targets: expected a list: [a, b], found 'linear_qkv'", "lora.targets=linear_qkv"),
    row("no target", "lora.targets: expected at least 1 members, found []", "lora.targets=[]"),
    row("unknown target", "lora.targets[1]: expected 'linear_qkv', 'linear_proj'", "lora.targets=[linear_qkv,q_proj]"),
    row("unknown choice", "reward.method: expected 'strict', ... found 'exact'", "reward.method=exact"),
    row("idle key", "run.yaml: loss.importance_clip: not read", broken=text("optim:", "loss: {importance_clip: 2}\noptim:")),
    row("idle override", "override loss.dual_clip: not read, loss.kind is not", "loss.kind=gspo", "loss.dual_clip=3"),
    row("an override without value", "override 'train.steps': expected section.key=value", "train.steps"),
    row("an override of a section", "override train: this is a section; expected train.key=value", "train=3"),
    row("an override with a comment", "override name: YAML would drop what follows ' #'", "name=a #b"),
    row("an override of two lines", "override train.st eps: unknown key; did you mean steps?", "train.st\neps=3"),
    row("a wrong split", "optim.prompts_per_update: 3 does not divide ... 2; nearest: 2", "optim.prompts_per_update=3"),
    row("rows too long", "optim.tokens_per_micro_batch: 64 cannot hold one row", "optim.tokens_per_micro_batch=64"),
    row("too few questions", "rollout.prompts_per_step: 4 exceeds data.num_train 2", "rollout.prompts_per_step=4", "data.num_train=2"),
    row("penalty without weight", "loss.kl_coef: 0 pays for loss.kl low_var_kl", "loss.kl_coef=0"),
    row("gsm8k without files", "data.train_path: missing; data.source gsm8k needs", "data.source=gsm8k"),
]
LAYOUT = [
    row("tensor and key heads", "parallel.tensor: 4 does not divide 2 key/value heads; nearest: 2", "parallel.tensor=4", "--ranks=4"),
    row("tensor and heads", "parallel.tensor: 3 does not divide 2 key/value heads", "parallel.tensor=3", "--ranks=3"),
    row("tensor and vocabulary", "parallel.tensor: 2 does not divide 319 tokens of the vocabulary", "parallel.tensor=2", "--ranks=2", broken=option(vocab_size=319)),
    row("expert and experts", "parallel.expert: 3 does not divide 4 experts; nearest: 1", "parallel.expert=3", "--ranks=3"),
    row("expert tensor and columns", "parallel.expert_tensor: 3 does not divide 16 columns of an expert", "parallel.expert_tensor=3", "--ranks=3"),
    row("tensor and ranks", "parallel.tensor: 2 does not divide 3 ranks; nearest: 1", "parallel.tensor=2", "--ranks=3"),
    row("expert and ranks", "parallel.expert: 4 does not divide 2 ranks", "parallel.expert=4", "--ranks=2"),
    row("layout of more ranks than there are", "parallel.expert: 2 does not divide 1 ranks", "parallel.expert=2", run=True),
    row("no ranks", "--ranks: 0; needed: 1 or more", "--ranks=0"),
    row("pipeline", "parallel.pipeline: 2 is not supported yet; only 1 is", "parallel.pipeline=2"),
    row("context", "parallel.context: 2 is not supported yet; only 1 is", "parallel.context=2"),
    row("npu", "device: npu is not supported yet, only cpu", "device=npu"),
    row("cuda", "device: cuda is not supported yet, only cpu", "device=cuda", run=True),
    row("vllm", "rollout.engine: vllm comes with ... use torch", "rollout.engine=vllm"),
    row("ranks that nobody started", "torch.distributed: the ranks did not find each other", broken=environment(RANK="0"), run=True),
    row("more tokens than positions", "max_prompt_tokens: 96 + rollout.max_new_tokens 4 = 100 exceeds the model's 64 positions", broken=option(max_position_embeddings=64)),
]
MODEL = [
    row("no model", "model.path: no config.json in Qwen/Qwen3; needed: a Hugging Face model", "tiny_model=null", "model.path=Qwen/Qwen3"),
    row("a file as model", "model.path: ... run.yaml ... needed: a Hugging Face model directory", broken=lambda p: setattr(p, "arguments", ["tiny_model=null", f"model.path={p.config}"])),
    row("config.json cut", "model/config.json: not valid JSON", broken=model(lambda m: cut(m / "config.json"))),
    row("config.json a list", "model/config.json: expected a JSON object, found list", broken=model(lambda m: (m / "config.json").write_text("[]"))),
    row("config.json a folder", "model/config.json: ", broken=model(lambda m: ((m / "config.json").unlink(), (m / "config.json").mkdir()))),
    row("unsupported architecture", "config.json: model_type 'llama' is not supported; supported: qwen3_moe, qwen2_moe", broken=option(model_type="llama")),
    row("unsupported class", "architectures = ['Other'] is not supported", broken=option(architectures=["Other"])),
    row("architectures a number", "config.json: architectures = 5 is not supported", broken=option(architectures=5)),
    row("sliding window", "use_sliding_window = true is not supported; only false is", broken=option(use_sliding_window=True)),
    row("layer types", "layer_types = 'sliding_attention' is not supported", broken=option(layer_types=["sliding_attention"])),
    row("rope scaling", "rope scaling = 'yarn' is not supported; only 'default' is", broken=option(rope_scaling={"type": "yarn", "factor": 4.0})),
    row("rope scaling as text", "config.json: rope_scaling: expected a dict, found 'yarn'", broken=option(rope_scaling="yarn")),
    row("another activation", "hidden_act = 'gelu' is not supported; only 'silu' is", broken=option(hidden_act="gelu")),
    row("quantized", "quantization_config = {'bits': 4} is not supported", broken=option(quantization_config={"bits": 4})),
    row("a size is missing", "config.json: num_experts is missing", broken=option(num_experts=None)),
    row("a size is no number", "hidden_size: expected a positive int, found '16'", broken=option(hidden_size="16")),
    row("head dim no number", "config.json: head_dim: expected a positive int, found '4'", broken=option(head_dim="4")),
    row("odd head dim", "config.json: head_dim: found 3; needed: an even number", broken=option(head_dim=3)),
    row("rope theta nan", "config.json: rope_theta: expected a positive number", broken=option(rope_theta=float("nan"))),
    row("sparse step 0", "config.json: decoder_sparse_step: expected a positive int, found 0", broken=option(decoder_sparse_step=0)),
    row("dense layers a number", "config.json: mlp_only_layers: expected a list, found 5", broken=option(mlp_only_layers=5)),
    row("eps negative", "config.json: rms_norm_eps: expected a positive float, found -1.0", broken=option(rms_norm_eps=-1.0)),
    row("tied a word", "config.json: tie_word_embeddings: expected a bool, found 'no'", broken=option(tie_word_embeddings="no")),
    row("norm topk a word", "config.json: norm_topk_prob: expected a bool, found 'no'", broken=option(norm_topk_prob="no")),
    row("no weights", "model.path: no *.safetensors in ... found none", broken=model(lambda m: (m / "model.safetensors").unlink())),
    row("only pickled weights", "found pytorch_model.bin, and pickled files are never opened", broken=model(lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"))),
    row("weights cut", "model.safetensors: not a readable safetensors file", broken=model(lambda m: cut(m / "model.safetensors"))),
    row("weights garbage", "model.safetensors: not a readable safetensors file", broken=model(lambda m: (m / "model.safetensors").write_bytes(b"x" * 999)), run=True),
    row("weights empty", "model.safetensors: not a readable safetensors file", broken=model(lambda m: (m / "model.safetensors").write_bytes(b"")), run=True),
    row("weights a folder", "model.safetensors: not a readable safetensors file", broken=model(lambda m: ((m / "model.safetensors").unlink(), (m / "model.safetensors").mkdir()))),
    row("a tensor is missing", f"weights do not fit config.json: missing: {NORM}", broken=tensors(lambda t: t.pop(NORM)), run=True),
    row("a tensor too many", "not part of this architecture: other.weight", broken=tensors(lambda t: t.update({"other.weight": torch.ones(1)}))),
    row("a wrong shape", f"{NORM} has shape [17], config.json needs [16]", broken=tensors(lambda t: t.update({NORM: torch.ones(17)}))),
    row("a wrong dtype", f"{NORM} has dtype I64; supported: F32, BF16, F16", broken=tensors(lambda t: t.update({NORM: torch.ones(16).long()}))),
    row("another model's sizes", "weights do not fit config.json: missing: ", broken=option(num_hidden_layers=2)),
    row("weights nan", f"{NORM} holds values that are not finite", broken=tensors(lambda t: t[NORM].fill_(torch.nan)), run=True),
    row("a weight infinite", "embed_tokens.weight holds values that are not finite", broken=tensors(lambda t: t["model.embed_tokens.weight"][3].fill_(torch.inf)), run=True),
    row("index of an absent file", "index.json: names a.safetensors, which is not in", broken=index({NORM: "a.safetensors"})),
    row("index of numbers", "index.json: not a valid weight index", broken=index({NORM: 5})),
    row("index a list", "index.json: not a valid weight index", broken=index([])),
    row("a tensor twice", f"is also in another file of this directory", broken=model(lambda m: shutil.copy(m / "model.safetensors", m / "z.safetensors"))),
    row("no tokenizer", "no tokenizer found; needed: tokenizer.json", broken=model(lambda m: (m / "tokenizer.json").unlink())),
    row("tokenizer garbage", "the tokenizer cannot be loaded", broken=model(lambda m: (m / "tokenizer.json").write_text("{}"))),
    row("tokenizer of another model", "use token ... beyond its vocabulary of 270; needed: the model's own", broken=smaller_vocabulary(270)),
    row("chat template broken", "model: the chat template fails (Expected an expression ... needed: one that", broken=model(lambda m: (m / "chat_template.jinja").write_text("{% if %}"))),
    row("generation config broken", "generation_config.json: cannot be read", broken=model(lambda m: (m / "generation_config.json").write_text("{"))),
    row("stop token text", "generation_config.json: eos_token_id: found 'end'", broken=model(lambda m: (m / "generation_config.json").write_text('{"eos_token_id": "end"}'))),
    row("stop token outside", "use token 320, beyond its vocabulary of 320; needed: the model's own", broken=model(lambda m: (m / "generation_config.json").write_text('{"eos_token_id": 320}'))),
    row("tiny path holds another folder", "model exists and has no readable tiny_model.json ... needed: another path", broken=tiny(lambda m: (m / "tiny_model.json").unlink())),
    row("tiny record a list", "has no readable tiny_model.json", broken=tiny(lambda m: (m / "tiny_model.json").write_text("[]"))),
    row("tiny path is a file", "exists and has no readable tiny_model.json", broken=lambda p: setattr(p, "arguments", [f"model.path={p.config}"])),
    row("tiny of other settings", "was made with another tiny_model (seed); needed: another model.path, or delete", "tiny_model.seed=1"),
    row("tiny of other operands", "was made with another operands ([1, 49])", "data.operand_high=40"),
    row("tiny path in a file", "run.yaml/model cannot be made: Not a directory; needed: a place to write", broken=lambda p: setattr(p, "arguments", [f"model.path={p.config}/model"]), run=True),
    row("tiny heads", "tiny_model.num_kv_heads: 3 does not divide num_heads 4; nearest: 2, 4", "tiny_model.num_kv_heads=3"),
    row("tiny experts", "tiny_model.experts_per_token: 5 exceeds num_experts 4", "tiny_model.experts_per_token=5"),
    row("tiny too few tokens", "tiny_model.vocab_size: expected 259 or more, found 100", "tiny_model.vocab_size=100"),
]
DATA = [
    row("no data file", "train.jsonl: cannot be read (No such file", broken=questions(train=None)),
    row("no held-out file", "test.jsonl: cannot be read (No such file", broken=questions(test=None)),
    row("data a folder", "cannot be read (Is a directory)", "data.train_path=/", "data.test_path=/", "data.source=gsm8k"),
    row("data empty", "train.jsonl: no rows found; needed: at least one question", broken=questions("\n")),
    row("data ending", "train.csv: found the ending '.csv'; needed: .jsonl or .parquet", broken=questions(ending="csv")),
    row("data parquet broken", "train.parquet: not a readable parquet file", broken=questions(ending="parquet")),
    row("row without answer mark", "train.jsonl, row 3: answer: found '5'; needed: a worked answer", broken=questions(ROWS + '{"question": "2 + 3?", "answer": "5"}\n')),
    row("row broken", "test.jsonl, row 3: not one JSON object a line", broken=questions(test=ROWS + '{"question": "2 +')),
    row("column missing", "row 1: found the columns answer; needed: an object with columns question", broken=questions('{"answer": "#### 1"}\n')),
    row("column missing later", "train.jsonl, row 3: answer: missing; found question", broken=questions(ROWS + '{"question": "2 + 3?"}\n')),
    row("prompts too long", "train.jsonl: 2 of 2 prompts are longer than data.max_prompt_tokens = 2; the longest", "data.max_prompt_tokens=2", broken=questions()),
    row("all prompts dropped", "2 of 2 prompts are longer than data.max_prompt_tokens = 2", "data.max_prompt_tokens=2", "data.overlong_prompts=drop", broken=questions()),
    row("fewer questions than prompts", "rollout.prompts_per_step: 4 exceeds the 2 training questions", "rollout.prompts_per_step=4", broken=questions()),
    row("fewer held-out than asked", "eval.num_questions: 3 exceeds the 2 held-out questions", "eval.num_questions=3", broken=questions()),
    row("a reward that gold fails", "reward.method: base_acc gives 8 of 8 gold training answers less than 1.0 ... needed: a method", "reward.method=base_acc"),
    row("too many generated", "data.num_train: found 99999999; operands 1 to 49 give", "data.num_train=99999999"),
    row("operands turned round", "data.operand_low: 50 exceeds data.operand_high 49", "data.operand_low=50"),
    row("no template place", "data.prompt_template: 'Q:' does not contain {question}", "data.prompt_template='Q:'"),
]
UNMADE = [  # the tiny model is made only after everything else has been found right
    row("unmade and no data file", "train.jsonl: cannot be read", broken=lambda p: (questions(train=None)(p), p.arguments.append(f"model.path={p.folder / 'new'}"))),
    row("unmade and too many generated", "data.num_train: found 99999999", "data.num_train=99999999", "model.path=/new/model"),
    row("unmade and bad reward", "reward.method: base_acc gives", "reward.method=base_acc", "model.path=/new/model"),
    row("unmade and layout", "parallel.expert: 3 does not divide 4 experts", "parallel.expert=3", "--ranks=3", "model.path=/new/model"),
]
RESUME = [
    row("resume from nowhere", "train.resume: nowhere holds no usable checkpoint; needed: auto, never, or a run's folder", "train.resume=nowhere"),
    row("resume from a file", "train.resume: ", broken=lambda p: setattr(p, "arguments", [f"train.resume={p.config}"]), run=True),
    row("resume without checkpoints", "run holds no usable checkpoint", broken=resumed(lambda r: shutil.rmtree(r / "checkpoints")), run=True),
    row("resume with a changed key", "step-000002: changed since: optim.lr: 1e-05 -> 0.1; needed: the old", "optim.lr=0.1", broken=resumed(lambda r: None), run=True),
    row("resume with a changed key, check", "step-000002: changed since: optim.lr: 1e-05 -> 0.1; needed: the old", "optim.lr=0.1", broken=resumed(lambda r: None)),
    row("every checkpoint corrupted", "run holds no usable checkpoint", broken=each_adapter(flip_a_bit), run=True),
    row("every checkpoint torn", "run holds no usable checkpoint", broken=each_adapter(Path.unlink)),
    row("adapter of another model", "is on one side only", broken=each_adapter(without_a_factor), run=True),
    row("adapter of other sizes", "checkpoint: ... has shape [ ... the model needs [", broken=each_adapter(lambda p: without_a_factor(p, shorter=True)), run=True),
    row("a live process holds the run", "run: a live process writes this run; end it, or", broken=resumed(runlog.lock_run), run=True),
    row("metrics cut", "metrics.jsonl: 1 whole lines before step 2, needed: one a step", broken=resumed(lambda r: cut(r / "metrics.jsonl")), run=True),
    row("metrics absent", "metrics.jsonl: 0 whole lines before step 2", broken=resumed(lambda r: (r / "metrics.jsonl").unlink()), run=True),
    row("out_dir is a file", "out: ", broken=blocked("out"), run=True),
    row("out_dir in a file", "out/deep: Not a directory", broken=lambda p: (blocked("out")(p), p.arguments.append(f"train.out_dir={p.folder / 'out' / 'deep'}")), run=True),
    row("no tensorboard", "train.tensorboard: ... needed: pip install tensorboard, or false", "train.tensorboard=true", broken=lambda p: p.monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None), run=True),
    pytest.param("log.txt: No space left on device", (), resumed(lambda r: ((r / "log.txt").unlink(), (r / "log.txt").symlink_to("/dev/full"))), True, id="full-disk", marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")),
]
TABLE = CONFIG + LAYOUT + MODEL + DATA + UNMADE + RESUME


# ------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, the model that it made and the run that it did."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "run.yaml").write_text(GOOD.replace("MODEL", str(folder / "model")).replace("OUT", str(folder / "out")))
    assert train_grpo.main([str(folder / "run.yaml")]) == 0
    (made,) = (folder / "out").iterdir()
    made.rename(folder / "run")
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path, good, monkeypatch)
    place.config.write_text(GOOD.replace("MODEL", str(good / "model")).replace("OUT", str(tmp_path / "out")))
    yield place
    for file in place.held:
        if hasattr(file, "close"):
            file.close()
    if dist.is_initialized(): gc.collect()
    if dist.is_initialized():  # a process that failed leaves its world for the exit to end
        parallel_setup.close_model_parallel()
        dist.destroy_process_group()


def assert_one_line(stderr: str, expected: str) -> None:
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 500, stderr
    rest = lines[0]
    for part in expected.split(" ... "):
        assert part in rest, stderr
        rest = rest.partition(part)[2]


@pytest.mark.parametrize("mode", [[], ["--check"]], ids=["run", "check"])
def test_unbroken_input_runs(mode: list[str], place: Place, capfd: CaptureFixture) -> None:
    assert train_grpo.main([str(place.config), *mode]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("broken", [model(lambda m: None), questions(), resumed(lambda r: None)], ids=["model", "gsm8k", "resume"])
def test_what_rows_copy_runs_before_they_break_it(broken: Break, place: Place, capfd: CaptureFixture) -> None:
    broken(place)
    assert train_grpo.main([str(place.config), *place.arguments]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("expected", "arguments", "broken", "run"), TABLE)
def test_bad_input_is_one_line(
    expected: str, arguments: tuple[str, ...], broken: Break | None, run: bool, place: Place, capfd: CaptureFixture
) -> None:
    if broken:
        broken(place)
    capfd.readouterr()
    code = train_grpo.main([str(place.config), *place.arguments, *arguments, *([] if run else ["--check"])])
    assert_one_line(capfd.readouterr().err, expected)
    assert code == 2
