"""Bad input of every kind, through the command that the user types: one clear line on stderr and exit code 2.

Each row of the table makes one change to a run that works; the first tests show that it works. `--check` refuses
everything that it can see. The other rows (run=True) are refused in a world of one process. Some rows also run as a
process of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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
    failing_read,
    file,
    flip_a_bit,
    folder_instead,
    header,
    index,
    instead,
    model,
    option,
    other_factors,
    pipe_instead,
    questions,
    resumed,
    tensors,
    text,
    tiny,
    typed,
    variables,
    vocabulary,
    write_config,
)
from pytest import CaptureFixture, MonkeyPatch

import data_gsm8k
import runlog
import tiny_model
import train_grpo
import tripwires

pytestmark = [  # warnings of torch and Megatron about GPUs and each other; the command silences them
    pytest.mark.filterwarnings(r"ignore:::megatron\."),
    pytest.mark.filterwarnings(r"ignore:::torch\."),
]
ROOT = Path(__file__).resolve().parent.parent
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
WEIGHTS = "model.safetensors"
NEW = typed("model.path=FOLDER/new", "tiny_model.seed=0")  # a tiny model that is to be made
FAILED = "cannot be read (Input/output error)"


# ------------------------------------------------------------------------------------------------ the table


def row(name: str, expected: str, *changes: str | Break, run: bool = False):
    """``expected``: parts of the message in their order, joined by " ... "; ``changes``: arguments typed, or Breaks."""
    return pytest.param(expected, changes, run, id=name.replace(" ", "-"))


def quantised(target: str) -> dict:
    """A quantization_config of int4 experts in the form of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"quant_method": "compressed-tensors", "config_groups": {"0": {"targets": [target], "weights": weights}}}


# fmt: off
CONFIG = [
    row("no file", "run.yaml: cannot be read (No such file", instead(lambda path: None)),
    row("a folder as file", "run.yaml: cannot be read (Is a directory", instead(Path.mkdir)),
    row("an empty file", "run.yaml: expected a mapping of sections, found nothing", instead(Path.touch)),
    row("a list as file", "expected a mapping of sections, found [1]", instead(lambda path: path.write_text("[1]"))),
    row("bytes as file", "run.yaml: not UTF-8 text at byte 0", instead(lambda path: path.write_bytes(b"\xff\0"))),
    row("YAML syntax", "run.yaml line 3: not valid YAML: expected", text("device: cpu", "device: [cpu")),
    row("a tab", "run.yaml line 2: not valid YAML", text("device: cpu", "\tdevice: cpu")),
    row("a Python object", "not valid YAML: could not determine", text("name: good", "name: !!python/name:os.x")),
    row("a key twice", "line 3: not valid YAML: key 'device' given", text("device: cpu", "device: cpu\ndevice: cpu")),
    row("unknown key", "rollout.groupsize: unknown key; did you mean group_size?", text("group_size", "groupsize")),
    row("unknown section", "optimizer: unknown key; did you mean optim?", text("optim:", "optimizer:")),
    row("key of another section", "model.steps: unknown key; did you mean train.steps?", "model.steps=1"),
    row("a key is missing", "run.yaml: train.steps: missing; needed: a step is", text("steps: 2, ", "")),
    row("a number for a section", "eval: expected a mapping of keys, found 3", text("{samples: 0}", "3")),
    row("text for a number", "train.steps: expected a whole number, found 'many'", "train.steps=many"),
    row("true for a number", "train.steps: expected a whole number, found true", "train.steps=true"),
    row("a number for true", "train.tensorboard: expected true or false, found 1", "train.tensorboard=1"),
    row("no for false", "train.tensorboard: expected true or false, found 'no'", "train.tensorboard=no"),
    row("a fraction", "train.steps: expected a whole number, found 1.5", "train.steps=1.5"),
    row("nothing for a number", "train.steps: expected a whole number, found ''", "train.steps="),
    row("a number for text", "name: expected text (in quotes", "name=1"),
    row("a path as name", "name: expected text like ... found 'a/b'", "name=a/b"),
    row("nan", "optim.lr: expected a number, found 'nan'", "optim.lr=nan"),
    row("infinite", "optim.lr: expected a finite number, found inf", "optim.lr=1e999"),
    row("negative", "optim.lr: expected more than 0.0, found -0.1", "optim.lr=-0.1"),
    row("zero", "parallel.tensor: expected 1 or more, found 0", "parallel.tensor=0"),
    row("a group of one", "rollout.group_size: expected 2 or more, found 1", "rollout.group_size=1"),
    row("for ever", "parallel.timeout_seconds: expected less than", "parallel.timeout_seconds=999999999999999"),
    row("text for a list", "lora.targets: expected a list: [a, b], found 'router'", "lora.targets=router"),
    row("an empty list", "lora.targets: expected at least 1 members, found []", "lora.targets=[]"),
    row("unknown target", "lora.targets[1]: expected 'linear_qkv', ... found 'q'", "lora.targets=[router, q]"),
    row("unknown choice", "reward.method: expected 'strict', ... found 'exact'", "reward.method=exact"),
    row("idle key", "run.yaml: loss.dual_clip: not read, loss.kind is not ppo",
        text("optim:", "loss: {kind: gspo, dual_clip: 3}\noptim:")),
    row("idle override", "override loss.importance_clip: not read, loss.importance", "loss.importance_clip=3"),
    row("override without value", "override 'train.steps': expected section.key=value", "train.steps"),
    row("override of a section", "override train: this is a section; expected train.key=value", "train=3"),
    row("override with a comment", "override name: YAML would drop what follows ' #'", "name=a #b"),
    row("override of two lines", "override train.st eps: unknown key; did you mean steps?", "train.st\neps=3"),
    row("override without end", "override 'xxxxxxxx ... expected section.key=value", "x" * 9999),
    row("update size", "optim.prompts_per_update: 3 does not divide ... nearest: 2", "optim.prompts_per_update=3"),
    row("micro-batch size", "optim.tokens_per_micro_batch: 64 cannot hold one row", "optim.tokens_per_micro_batch=64"),
    row("more prompts than questions", "rollout.prompts_per_step: 9 exceeds data.num_train 8",
        "rollout.prompts_per_step=9", "optim.prompts_per_update=9"),
    row("penalty without weight", "loss.kl_coef: 0, so the KL of loss.kl low_var_kl", "loss.kl_coef=0"),
    row("gsm8k without files", "data.train_path: missing; data.source gsm8k needs", "data.source=gsm8k"),
    row("no place in the template", "data.prompt_template: 'Q' does not contain {question}", "data.prompt_template=Q"),
    row("a pipe as file", "run.yaml: found a pipe; needed: a file", instead(os.mkfifo)),
    row("an endless file", "run.yaml: found a device; needed: a file", instead(lambda p: p.symlink_to("/dev/zero"))),
    row("a large file", "run.yaml: larger than 0.25 MiB", instead(lambda path: path.write_text("# x\n" * 2**17))),
    row("a file that fails", f"run.yaml: {FAILED}", instead(failing_read)),
    row("another field in the template", "data.prompt_template: {0} is not replaced; needed: {question} alone",
        'data.prompt_template="{0} {question}"'),
    row("aliases of aliases", "line 2: not valid YAML: the alias *a: write its value out",
        instead(lambda path: path.write_text("a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n"))),
    row("deep lists", "run.yaml: not valid YAML: maximum recursion", instead(lambda path: path.write_text("[" * 9999))),
    row("a tag that fails", "not valid YAML", text("name: good", "name: !!timestamp x")),
    row("NUL in a name", "override train.out_dir line 1: not valid YAML: found NUL", 'train.out_dir="a\\0b"'),
    row("half a character", "override data.instruction line 1: not valid YAML: found NUL or half a character in 'a",
        'data.instruction="a\\ud800"'),
    row("half a character as key", "expected section.key=value", "a\udcff.b=1"),
    row("long name", "name: expected text of at most 150 characters", "name=" + "n" * 300),
    row("long path", "nnn/x: File name too long", typed("model.path=FOLDER/" + "n" * 256 + "/x")),
    row("long folder", "nnn: File name too long", typed("train.out_dir=FOLDER/" + "n" * 256)),
    row("long run", "nnn/checkpoints: File name too long", typed("train.resume=FOLDER/" + "n" * 256)),
    row("huge rank", "lora.rank: expected at most 4096, found 10000000000", "lora.rank=10000000000"),
    row("huge operands", "data.operand_high: expected at most 1000000", "data.operand_high=1000000000"),
    row("huge steps", "train.steps: expected at most 1000000000", "train.steps=" + "9" * 40),
    row("huge tiny model", "tiny_model: about 1.4e+11 parameters; needed: at most 1e+09",
        "tiny_model.hidden_size=16384", "tiny_model.num_experts=1024", "tiny_model.expert_width=2730"),
]
ENVIRONMENT = [
    row("threads", "environment's OMP_NUM_THREADS: found '' ... 1 to 1024", variables(OMP_NUM_THREADS=""), run=True),
    row("rank", "the environment's RANK: found 'one'", variables(RANK="one"), run=True),
    row("rank beyond", "environment's RANK: found '2' ... from 0 to 1", variables(RANK="2", WORLD_SIZE="2"), run=True),
    row("world", "the environment's WORLD_SIZE: found '0'", variables(RANK="0", WORLD_SIZE="0")),
    row("local rank", "the environment's LOCAL_RANK: found '-1'", variables(LOCAL_RANK="-1"), run=True),
    row("local world", "the environment's LOCAL_WORLD_SIZE: found '1,1'", variables(LOCAL_WORLD_SIZE="1,1"), run=True),
    row("port", "the environment's MASTER_PORT: found '99999' ... to 65535", variables(MASTER_PORT="99999"), run=True),
    row("address", "the environment's MASTER_ADDR: 'no.such.host.invalid'",
        variables(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_PORT="29000", MASTER_ADDR="no.such.host.invalid"),
        run=True),
    row("interface", "torch.distributed: the ranks did not find each other: ... nope",
        variables(GLOO_SOCKET_IFNAME="nope"), run=True),
]
LAYOUT = [
    row("key heads", "tensor: 4 does not divide 2 key/value heads; nearest: 2", "parallel.tensor=4", "--ranks=4"),
    row("heads", "parallel.tensor: 3 does not divide 2 key/value heads; nearest: 1", "parallel.tensor=3", "--ranks=3"),
    row("vocabulary", "parallel.tensor: 2 does not divide 319 tokens of the vocabulary; nearest: 1",
        option(vocab_size=319), "parallel.tensor=2", "--ranks=2"),
    row("experts", "parallel.expert: 3 does not divide 4 experts; nearest: 1", "parallel.expert=3", "--ranks=3"),
    row("columns of an expert", "parallel.expert_tensor: 3 does not divide 16 columns of an expert",
        "parallel.expert_tensor=3", "--ranks=3"),
    row("ranks", "parallel.tensor: 2 does not divide 3 ranks; nearest: 1", "parallel.tensor=2", "--ranks=3"),
    row("expert ranks", "parallel.expert: 4 does not divide 2 ranks", "parallel.expert=4", "--ranks=2"),
    row("one rank for two", "parallel.expert: 2 does not divide 1 ranks", "parallel.expert=2", run=True),
    row("no ranks", "--ranks: found 0; needed: 1 or more", "--ranks=0"),
    row("ranks of a run", "--ranks: found 2; needed: ... --check: torchrun starts the ranks", "--ranks=2", run=True),
    row("pipeline", "parallel.pipeline: 2 is not supported yet; only 1 is", "parallel.pipeline=2"),
    row("context", "parallel.context: 2 is not supported yet; only 1 is", "parallel.context=2"),
    row("npu", "device: npu: torch_npu is not installed; needed: requirements/npu.txt", "device=npu"),
    row("cuda", "device: cuda: torch 2.13.0+cpu has no CUDA", "device=cuda", run=True),
    row("engine ranks", "rollout.tensor: 3 does not divide 1 ranks; nearest: 1",
        "rollout.engine=vllm", "rollout.tensor=3"),
    row("vllm", "rollout.engine: vllm ... or rollout.engine torch", "rollout.engine=vllm"),
    row("half a torchrun", "environment's WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: not set, but others ... "
        "needed: all of RANK, WORLD_SIZE,", variables(RANK="0"), run=True),
    row("a world without ranks", "environment's RANK, LOCAL_RANK, MASTER_ADDR", variables(WORLD_SIZE="2"), run=True),
    row("a world without ranks, check", "environment's RANK, LOCAL_RANK, MASTER_ADDR", variables(WORLD_SIZE="2")),
    row("a local rank alone", "environment's RANK, WORLD_SIZE, MASTER_ADDR", variables(LOCAL_RANK="0"), run=True),
    row("positions", "data.max_prompt_tokens: 96 + rollout.max_new_tokens 4 = 100 exceeds the model's 64 positions",
        option(max_position_embeddings=64)),
]
MODEL = [
    row("no model", "model.path: no config.json in Qwen/Qwen3; needed: a Hugging Face model directory",
        "tiny_model=null", "model.path=Qwen/Qwen3"),
    row("a file as model", "model.path: ... run.yaml ... needed: a Hugging Face model directory",
        typed("tiny_model=null", "model.path=FOLDER/run.yaml")),
    row("config.json cut", "model/config.json: not valid JSON", model(cut("config.json"))),
    row("config.json a list", "config.json: expected a JSON object, found list", model(file("config.json", "[]"))),
    row("config.json a folder", "config.json: cannot be read (Is a dir", model(folder_instead("config.json"))),
    row("architecture", "config.json: model_type 'llama' is not supported; supported: qwen3_moe, qwen2_moe",
        option(model_type="llama")),
    row("class", "config.json: architectures = ['Other'] is not supported", option(architectures=["Other"])),
    row("class a number", "config.json: architectures = 5 is not supported", option(architectures=5)),
    row("sliding window", "use_sliding_window = true is not supported; only false", option(use_sliding_window=True)),
    row("layer types", "layer_types = 'chunked' is not supported; only", option(layer_types=["chunked"])),
    row("rope scaling", "rope scaling = 'yarn' is not supported; only", option(rope_scaling={"type": "yarn"})),
    row("rope scaling a text", "rope_scaling: expected a dict, found 'yarn'", option(rope_scaling="yarn")),
    row("activation", "config.json: hidden_act = 'gelu' is not supported; only 'silu'", option(hidden_act="gelu")),
    row("quantized", "quantization_config = {'bits': 4} is not supported", option(quantization_config={"bits": 4})),
    row("no size", "config.json: num_experts is missing", option(num_experts=None)),
    row("size a text", "config.json: hidden_size: expected a positive int, found '16'", option(hidden_size="16")),
    row("head_dim a text", "config.json: head_dim: expected a positive int, found '4'", option(head_dim="4")),
    row("head_dim odd", "config.json: head_dim: found 3; needed: an even number", option(head_dim=3)),
    row("rope theta nan", "rope_theta: expected a positive number, found nan", option(rope_theta=float("nan"))),
    row("no sparse layer", "decoder_sparse_step: expected a positive int, found 0", option(decoder_sparse_step=0)),
    row("dense layers", "config.json: mlp_only_layers: expected a list, found 5", option(mlp_only_layers=5)),
    row("a dense layer", "mlp_only_layers: found '0'; needed: layers from 0 to 0", option(mlp_only_layers=["0"])),
    row("negative eps", "rms_norm_eps: expected a positive float, found -1.0", option(rms_norm_eps=-1.0)),
    row("tied a text", "tie_word_embeddings: expected a bool, found 'no'", option(tie_word_embeddings="no")),
    row("norm_topk_prob a text", "norm_topk_prob: expected a bool, found 'no'", option(norm_topk_prob="no")),
    row("no weights", "model.path: no *.safetensors in ... found none", model(file(WEIGHTS, None))),
    row("only pickled weights", "found pytorch_model.bin, and pickled files are never opened",
        model(lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"))),
    row("weights cut", "model/model.safetensors: not a readable safetensors file", model(cut(WEIGHTS))),
    row("weights cut, run", "model/model.safetensors: not a readable safetensors", model(cut(WEIGHTS)), run=True),
    row("weights of x", "model.safetensors: not a readable safetensors", model(file(WEIGHTS, "x" * 999)), run=True),
    row("weights empty", "model.safetensors: not a readable safetensors file", model(file(WEIGHTS, ""))),
    row("weights a folder", "model.safetensors: cannot be read (Is a directory)", model(folder_instead(WEIGHTS))),
    row("tensor missing", f"config.json: missing: {NORM}", tensors(lambda t: t.pop(NORM)), run=True),
    row("tensor too many", "not part of this architecture: x", tensors(lambda t: t.update(x=torch.ones(1)))),
    row("shape", f"{NORM} has shape [17], config.json needs [16]", tensors(lambda t: t.update({NORM: torch.ones(17)}))),
    row("dtype", f"{NORM} has dtype int64; supported: float32,", tensors(lambda t: t.update({NORM: t[NORM].long()}))),
    row("weights of fewer layers", "weights do not fit config.json: missing: ... more", option(num_hidden_layers=2)),
    row("one nan", f"{NORM} holds values that are not finite", tensors(lambda t: t[NORM].fill_(torch.nan)), run=True),
    row("one infinite", f"{EMBED} holds values that are", tensors(lambda t: t[EMBED][3].fill_(torch.inf)), run=True),
    row("index of nothing", "index.json: names a.safetensors, which is not in", index({NORM: "a.safetensors"})),
    row("index of numbers", "index.json: not a valid weight index", index({NORM: 5})),
    row("index a list", "index.json: not a valid weight index", index([])),
    row("tensors twice", "z.safetensors: ... is also in another file",
        model(lambda folder: shutil.copy(folder / WEIGHTS, folder / "z.safetensors"))),
    row("no tokenizer", "no tokenizer found; needed: tokenizer.json", model(file("tokenizer.json", None))),
    row("tokenizer", "model: the tokenizer cannot be loaded", model(file("tokenizer.json", "{}"))),
    row("tokenizer of another", "use token ... beyond its vocabulary of 270; needed: the model's own", vocabulary(270)),
    row("chat template", "the chat template fails (Exp ... needed", model(file("chat_template.jinja", "{% if %}"))),
    row("silent chat template", "leaves out the text of a user turn", model(file("chat_template.jinja", "{##}"))),
    row("huge layers", "config.json: num_hidden_layers: found 1000000000; needed: at", option(num_hidden_layers=10**9)),
    row("huge hidden size", "hidden_size: found 1000000000000; needed: at most", option(hidden_size=10**12)),
    row("huge theta", "rope_theta: expected a positive number, found 1000", option(rope_theta=10**400)),
    row("deep config.json", "config.json: not valid JSON (maximum recursion", model(file("config.json", "[" * 99999))),
    row("a pipe as weights", "model.safetensors: found a pipe", model(pipe_instead(WEIGHTS))),
    row("a pipe as tokenizer", "tokenizer.json: found a pipe", model(pipe_instead("tokenizer.json"))),
    row("a pipe as index", "index.json: found a pipe", model(lambda f: os.mkfifo(f / "model.safetensors.index.json"))),
    row("header of 2**60 bytes", "not a readable safetensors file",
        model(file(WEIGHTS, (2**60).to_bytes(8, "little") + b"{}"))),
    row("offsets that overlap", "not a readable safetensors", header(lambda h: h[NORM].update(data_offsets=[0, 64]))),
    row("unknown dtype", "not a readable safetensors file", header(lambda h: h[NORM].update(dtype="X9"))),
    row("endless template", "the chat template does not end in 10 s",
        model(file("chat_template.jinja", "{{ 9 ** (9 ** 9) }}{{ messages[0].content }}"))),
    *(row(f"{name} that fails", f"model/{name}: {FAILED}", model(lambda folder, name=name: failing_read(folder / name)))
      for name in ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json")),
    row("weights that fail", "model/model.safetensors: cannot be read (", model(lambda f: failing_read(f / WEIGHTS))),
    row("tokenizer that fails", "tokenizer.json: cannot be read", model(lambda f: failing_read(f / "tokenizer.json"))),
    row("endless pattern", "config.json: quantization_config: a pattern of targets or ignore does not end in",
        option(quantization_config=quantised(r"re:(([a-z_.0-9]+)+)+\$"))),
    row("deep pattern", "config.json: quantization_config: targets, ignore: no pattern: maximum recursion",
        option(quantization_config=quantised("re:" + "(" * 5000))),
    row("broken pattern", "config.json: quantization_config: targets, ignore: no pattern: missing )",
        option(quantization_config=quantised("re:("))),
    row("generation config", "generation_config.json: not valid JSON", model(file("generation_config.json", "{"))),
    row("stop token a text", "eos_token_id: found 'x'", model(file("generation_config.json", '{"eos_token_id": "x"}'))),
    row("stop token", "use token 320, beyond its ", model(file("generation_config.json", '{"eos_token_id": 320}'))),
    row("tiny path of another", "model exists and has no readable tiny_model.json, ... needed: another path",
        tiny(file("tiny_model.json", None))),
    row("tiny record a list", "no readable tiny_model.json", tiny(file("tiny_model.json", "[]"))),
    row("tiny path a file", "run.yaml exists and has no readable tiny_model.json", typed("model.path=FOLDER/run.yaml")),
    row("tiny path in a file", "model.path: ... run.yaml is not a folder",
        typed("model.path=FOLDER/run.yaml/model", "tiny_model.seed=0")),
    row("no such model", "override model.path: there is no HuggingFaceTB/SmolLM2-135M; needed: the folder of a model",
        "model.path=HuggingFaceTB/SmolLM2-135M", run=True),
    row("tiny model, other seed", "was made with another tiny_model.seed (0); needed: another", "tiny_model.seed=1"),
    row("tiny model, other operands", "was made with another operands ([1, 49])", "data.operand_high=40"),
    row("tiny heads", "tiny_model.num_kv_heads: 3 does not divide num_heads 4", "tiny_model.num_kv_heads=3"),
    row("tiny experts", "tiny_model.experts_per_token: 5 exceeds num_experts 4", "tiny_model.experts_per_token=5"),
    row("tiny vocabulary", "tiny_model.vocab_size: expected 259 or more, found 100", "tiny_model.vocab_size=100"),
]
DATA = [
    row("no data file", "train.jsonl: cannot be read (No such file", questions(train=None)),
    row("no held-out file", "test.jsonl: cannot be read (No such file", questions(test=None), run=True),
    row("data a folder", "cannot be read (Is a dir", "data.source=gsm8k", "data.train_path=/", "data.test_path=/"),
    row("data empty", "train.jsonl: no rows found; needed: at least one question", questions("\n")),
    row("data ending", "train.csv: found the ending '.csv'; needed: .jsonl or .parquet", questions(ending="csv")),
    row("parquet", "train.parquet: not a readable parquet file", questions(ending="parquet")),
    row("no answer mark", "train.jsonl, row 3: answer: found '5'; needed: a worked answer that ends in '#### '",
        questions(QUESTIONS + '{"question": "2 + 3?", "answer": "5"}\n')),
    row("held-out and trained on", "data: 2 held-out questions are training questions", questions(test=QUESTIONS)),
    row("held-out and trained on, for a reader", "data: 1 held-out questions are training questions",
        questions(test=HELD_OUT + QUESTIONS.splitlines()[0].replace("What is", "\u200bWHAT \u00a0 \uff49s") + "\n")),
    row("one question, two answers", "train.jsonl, row 3: answer: 5; row 1 has the same question with 4; needed: one",
        questions(QUESTIONS + '{"question": "what  is 3 + 1?", "answer": "#### 5"}\n')),
    row("a question of nothing", "row 3: question: found an empty text",
        questions(QUESTIONS + '{"question": "\u200b", "answer": "#### 5"}\n')),
    row("data that fails", f"train.jsonl: {FAILED}", questions(train=None),
        lambda place: failing_read(place.folder / "train.jsonl")),
    row("half a row", "test.jsonl, row 3: not one JSON object a line", questions(test=QUESTIONS + '{"question": "2')),
    row("no column", "row 1: found the columns answer; needed: ... question", questions('{"answer": "#### 1"}\n')),
    row("no column, later", "train.jsonl, row 3: answer: missing", questions(QUESTIONS + '{"question": "2?"}\n')),
    row("prompts too long", "train.jsonl: 2 of 2 prompts are longer than data.max_prompt_tokens = 2; the longest",
        questions(), "data.max_prompt_tokens=2"),
    row("all prompts dropped", "train.jsonl: 2 of 2 prompts are longer than data.max_prompt_tokens = 2",
        questions(), "data.max_prompt_tokens=2", "data.overlong_prompts=drop"),
    row("few questions", "rollout.prompts_per_step: 4 exceeds the 2 training questions",
        questions(), "rollout.prompts_per_step=4"),
    row("few held-out questions", "eval.num_questions: 3 exceeds the 2 held-out questions",
        questions(), "eval.num_questions=3"),
    row("reward", "reward.method: base_acc gives 8 of 8 gold training answers less than 1.0, ... needed: a method",
        "reward.method=base_acc"),
    row("reward in another form", "base_acc gives 8 of 8 gold ... or an instruction that asks for <think>",
        "reward.method=base_acc"),
    row("data a pipe", "train.jsonl: found a pipe", questions(train=None),
        lambda place: os.mkfifo(place.folder / "train.jsonl")),
    row("digits of another script", "row 1: answer: found '#### \\u0664\\u0662'; needed: ... one number",
        questions('{"question": "2?", "answer": "#### \\u0664\\u0662"}\n')),
    row("NUL in a question", "row 1: question: found a lone surrogate or NUL",
        questions('{"question": "a\\u0000b", "answer": "#### 2"}\n')),
    row("not a number in JSON", "row 1: not one JSON object a line: found NaN",
        questions('{"question": "2?", "answer": "#### 2", "x": NaN}\n')),
    row("a question of 1 MB", "row 1: question: found 1000000 characters; needed: at most 100000",
        questions(f'{{"question": "{"x" * 10**6}", "answer": "#### 2"}}\n')),
    row("too many generated", "data.num_train: found 999999; operands 1 to 49 give", "data.num_train=999999"),
    row("operands", "data.operand_low: 50 exceeds data.operand_high 49", "data.operand_low=50"),
    # Everything else is checked before a tiny model is made, because that takes minutes.
    row("no model, no data file", "train.jsonl: cannot be read", questions(train=None), NEW),
    row("no model, bad reward", "reward.method: base_acc", "reward.method=base_acc", NEW),
    row("no model, bad layout", "parallel.expert: 3 does not divide 4 experts",
        "parallel.expert=3", "--ranks=3", NEW),
]
RESUME = [
    row("resume nothing", "train.resume: a/b holds no usable checkpoint; needed: auto, never,", "train.resume=a/b"),
    row("resume a file", "run.yaml holds no usable checkpoint", typed("train.resume=FOLDER/run.yaml"), run=True),
    row("no checkpoints", "run holds no usable", resumed(lambda r: shutil.rmtree(r / "checkpoints")), run=True),
    row("changed key", "step-000002: changed since: optim.lr: 1e-05 -> 0.1; needed: the old values",
        resumed(lambda r: None), "optim.lr=0.1"),
    row("changed key, run", "step-000002: changed since: optim.lr: 1e-05 -> 0.1; needed: the old values",
        resumed(lambda r: None), "optim.lr=0.1", run=True),
    row("checkpoints corrupted", "run holds no usable checkpoint", each_adapter(flip_a_bit), run=True),
    row("checkpoints torn", "run holds no usable checkpoint", each_adapter(Path.unlink)),
    row("adapter of another", "is on one side only", each_adapter(other_factors(lambda t: t.popitem())), run=True),
    row("adapter sizes", "checkpoint: model.layers.0. ... has shape [ ... the model needs [",
        each_adapter(other_factors(lambda t: t.update({max(t): torch.ones(3, 5)}))), run=True),
    row("a text as step", "state.json: step: found '2'; needed: what a run saves",
        each_state(lambda state: state.update(step="2")), run=True),
    row("other optimizer steps", "step-000002/state.json: found step 2, optimizer_steps 7; needed: at most train.steps "
        "2 steps of 2 // 2 optimizer steps, 2 in all", each_state(lambda s: s["state"].update(optimizer_steps=7))),
    row("more steps than the run", "state.json: found step 2, ... at most train.steps 1",
        each_state(lambda state: state["config"]["train"].update(steps=1))),
    row("no sizes", "state.json: found step 2, ... at most train.steps 0", each_state(lambda s: s.update(config={}))),
    row("an unknown tensor", "checkpoint: optimizer: more.exp: unknown; needed: exp_avg and exp_avg_sq alone",
        each_moment(lambda t: t.update({"more.exp": torch.ones(1)})), run=True),
    row("an unknown factor", "more is on one side only",
        each_adapter(other_factors(lambda t: t.update(more=torch.ones(1)))), run=True),
    row("moments of another type", "the model needs [", each_moment(lambda t: t.update({max(t): t[max(t)].double()})),
        run=True),
    row("a negative square", "exp_avg_sq holds a number that is not finite, or a negative square",
        each_moment(lambda t: [v.fill_(-1) for k, v in t.items() if k.endswith("sq")]), run=True),
    row("no optimizer steps", "checkpoint: found adapter, optimizer, optimizer_steps nothing",
        each_state(lambda state: state.update(state={})), run=True),
    row("adapter not finite", "checkpoint: ... holds a number that is not finite",
        each_adapter(other_factors(lambda t: t[max(t)].fill_(torch.nan))), run=True),
    row("metrics of another kind", "metrics.jsonl: 0 whole lines before step 2",
        resumed(file("metrics.jsonl", '{"step": "0"}\n')), run=True),
    row("evaluation without accuracy", "eval.jsonl: an evaluation without accuracies",
        resumed(file("eval.jsonl", '{"step": 0}\n')), run=True),
    row("inputs that fail", f"inputs.json: {FAILED}", resumed(lambda r: failing_read(r / "inputs.json"))),
    row("metrics that fail", f"metrics.jsonl: {FAILED}",
        resumed(lambda r: failing_read(r / "metrics.jsonl")), run=True),
    row("checkpoints that fail", "run holds no usable checkpoint", each_adapter(failing_read)),
    row("a pipe as lock", "run.lock: found a pipe", resumed(pipe_instead("run.lock")), run=True),
    row("a pipe as log", "log.txt: found a pipe", resumed(pipe_instead("log.txt")), run=True),
    row("live process", "run: a live process writes this run; end it, or", resumed(runlog.lock_run), run=True),
    row("metrics cut", "metrics.jsonl: 1 whole lines before step 2, needed", resumed(cut("metrics.jsonl")), run=True),
    row("no metrics", "metrics.jsonl: 0 whole lines before step 2", resumed(file("metrics.jsonl", None)), run=True),
    row("out_dir a file", "train.out_dir: ... run.yaml is not a folder", typed("train.out_dir=FOLDER/run.yaml")),
    row("out_dir in a file", "run.yaml/a/b: ... run.yaml is not a folder", typed("train.out_dir=FOLDER/run.yaml/a/b")),
    row("out_dir that takes nothing", "/proc", "train.out_dir=/proc/out", run=True),
    row("full disk", "run/log.txt: not written: No space left on device; needed: a folder to write, with room",
        resumed(lambda r: ((r / "log.txt").unlink(), (r / "log.txt").symlink_to("/dev/full"))), run=True),
    row("no tensorboard", "train.tensorboard: ... needed: pip install tensorboard, or false", "train.tensorboard=true",
        lambda p: p.monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None), run=True),
]
# fmt: on
TABLE = CONFIG + ENVIRONMENT + LAYOUT + MODEL + DATA + RESUME
PROCESSES = [param for param in TABLE if param.id in ("unknown-key", "one-infinite", "checkpoints-corrupted")]


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
    data_gsm8k.load_tokenizer(
        folder / "model"
    )  # import here what the process of every row would otherwise import again
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
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    assert len(stderr) < 500 and "Traceback" not in stderr, stderr
    rest = stderr
    for part in expected.split(" ... "):
        assert part in rest, f"{part!r} is not in {rest!r} of {stderr!r}"
        rest = rest.partition(part)[2]


@pytest.mark.parametrize("run", [True, False], ids=["run", "check"])
@pytest.mark.parametrize(
    "broken",
    [
        typed(),
        NEW,
        model(lambda m: None),
        questions(),
        resumed(lambda r: None),
    ],
    ids=["made", "new", "model", "gsm8k", "resume"],
)
def test_an_unbroken_run_prints_nothing_on_stderr(broken, run, place: Place, capfd: CaptureFixture) -> None:
    assert exit_code(command(place, (broken,), run)) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("expected", "changes", "run"), TABLE)
def test_bad_input_gives_one_line_and_code_2(expected, changes, run, place: Place, capfd: CaptureFixture) -> None:
    assert exit_code(command(place, changes, run)) == 2
    assert_one_line(capfd.readouterr().err, expected)


@pytest.mark.parametrize(("expected", "changes", "run"), PROCESSES)
def test_the_process_ends_with_that_line_and_code(expected, changes, run, place: Place) -> None:
    typed_line = [sys.executable, "train_grpo.py", *command(place, changes, run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(typed_line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert_one_line(done.stderr, expected)


@pytest.mark.parametrize("module, name", [(train_grpo.doctor, "quick"), (tiny_model, "_write_random_model")])
def test_the_watcher_ends_a_start_that_stalls(module, name, place: Place, capfd: CaptureFixture) -> None:
    place.monkeypatch.setattr(module, name, lambda *arguments: time.sleep(100))
    changes = (NEW, "train.stall_seconds=2")
    assert exit_code(command(place, changes, run=True)) == tripwires.EXIT_CODE
    assert "rank 0: stood still for" in capfd.readouterr().err


def test_check_leaves_nothing_behind(place: Place) -> None:
    assert exit_code(command(place, (NEW,), run=False)) == 0
    assert [path.name for path in place.folder.iterdir()] == ["run.yaml"]
