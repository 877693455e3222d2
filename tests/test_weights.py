"""Weights between Hugging Face files and Megatron shards: the same bits after a round trip in every layout, no byte
read without need, and one clear line for every kind of broken file. transformers writes the files, safetensors reads
them.
"""

from __future__ import annotations

import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import adapted
import pytest
import reference
import safetensors.torch
import torch
import world
from safetensors.torch import load_file, save_file
from tiers import asked, ci, nightly
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from facts.exits import InputError
from inputs import hf_config
from model import megatron_model
from parallel_setup import Parallel
from weights import huggingface

KINDS = ["qwen3_moe", "qwen2_moe"]
LAYOUTS = ["TP1", "TP2_EP2_DP2", *map(ci, ["DP2", "TP2", "EP2", "TP2_EP2", "EP2_DP4"])]
LAYOUTS += map(nightly, ["TP8_EP8", "TP4_EP16"])
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


def test_transformers_shards_load(folders, tmp_path):
    source = folders["qwen3_moe", "fp32"]
    reference.load(source).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    (tmp_path / "unrelated.safetensors").write_bytes(b"the index decides which files belong to the model")
    expected = load_file(source / "model.safetensors")
    for found in world.in_layouts(["TP2_EP2"], exported, tmp_path)["TP2_EP2"]:
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def exported(parallel: Parallel, folder: Path) -> dict[str, Tensor]:
    model, arch = adapted.load(folder, parallel)
    return {name: value.detach().clone() for name, value in huggingface.export(model, arch, parallel)}


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
    with pytest.raises(InputError, match=f"{EXPERT} is there alone, and in the tensor of all experts"):
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
    huggingface.read_model(tmp_path, hf_config.read(tmp_path))
    tokens = reference.tokens(rows=2)
    with torch.no_grad():
        assert torch.equal(reference.load(tmp_path)(tokens).logits, reference.load(source)(tokens).logits)


def test_save_model_takes_views_and_transposed_tensors_and_others_may_read_them_as_the_mask_says(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tensors = {"a": base.t(), "b": base[1:], "c": base}
    before = os.umask(0o027)
    try:
        huggingface.save_model(iter(tensors.items()), tmp_path)
    finally:
        os.umask(before)
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


def rewrite(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A fault in the bytes of the file."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(edit(path.read_bytes()))

    return apply


def index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


UNREADABLE = r"model\.safetensors: not a readable safetensors file \(.+\)"
BROKEN = {  # the fault: (the change that makes it, the expected line)
    "several missing": (
        change(lambda t: [t.pop(name) for name in list(t) if ".q_norm" in name or ".k_norm" in name]),
        r"missing: .*q_norm.*, .*k_norm.*, .*q_norm.* and 3 more",
    ),
    "surplus tensor": (change(lambda t: t.update(extra=torch.ones(1))), "not part of this architecture: extra"),
    "transposed": (
        change(lambda t: t.update({EXPERT: t[EXPERT].t().contiguous()})),
        rf"{EXPERT} has shape \[32, 64\], config.json needs \[64, 32\]",
    ),
    "float8": (
        change(lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)})),
        f"{EXPERT} has dtype float8_e4m3fn; supported: float32, bfloat16, float16",
    ),
    "cut short": (rewrite(lambda data: data[:-100]), UNREADABLE),
    "header of garbage": (rewrite(lambda data: data[:8] + b"\xff" * 64 + data[72:]), UNREADABLE),
    "a directory": (
        lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").mkdir()),
        r"model.safetensors: cannot be read \(Is a directory\)",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"model.path: no \*\.safetensors in .*: found none"),
    "same tensor in two files": (
        lambda d: save_file({NORM: torch.ones(64)}, d / "more.safetensors"),
        f"more.safetensors: {NORM} is also in another file|{NORM} is also in",
    ),
    "index of an absent file": (
        index('{"weight_map": {"a": "model-00002.safetensors"}}'),
        "index.json: names model-00002.safetensors, which is not in",
    ),
    "index map a list": (index('{"weight_map": ["model.safetensors"]}'), "index.json: not a valid weight index"),
    "index of nothing": (index('{"weight_map": {}}'), "missing: model.embed_tokens.weight"),
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


def test_pickled_weights_are_never_opened(model_dir):
    (model_dir / "model.safetensors").unlink()
    trap = model_dir / "opened"
    (model_dir / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(trap)))
    with pytest.raises(InputError, match=r"found pytorch_model\.bin, and pickled files are never opened"):
        huggingface.read_model(model_dir, hf_config.read(model_dir))
    assert not trap.exists()
    pickle.loads((model_dir / "pytorch_model.bin").read_bytes())
    assert trap.exists()  # control: unpickling does create the file


class _Trap:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


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
    "nan": (f"{EMBEDDING} holds values that are not finite in float32", lambda t: t[EMBEDDING][100].fill_(torch.nan)),
    "-inf": (f"{EXPERT} holds values that are not finite in float32", lambda t: t[EXPERT][0].fill_(-torch.inf)),
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
