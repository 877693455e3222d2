"""Adapters of others: whatever their files say, they are read as PEFT applies them or refused in one line."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from safetensors.torch import load_file, save_file
from tiers import asked, nightly
from torch import Tensor

import export
from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from inputs import hf_config
from inputs.files import one_line
from weights import peft_adapters, probes

CONFIG, FACTORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers.0.self_attn"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and an adapter of it in each form."""
    folder = tmp_path_factory.mktemp("adapters")
    base = reference.save("qwen3_moe", folder / "base", moe_intermediate_size=24, hidden_size=64)
    arch = hf_config.read(base)
    names = [name.removesuffix(".weight") for name in tensor_shapes(arch) if "_proj.weight" in name]
    pairs = probes.draw(names, arch, rank=2, alpha=3.0, size=1.0)
    for form in ("full", "leaf", "stack"):
        peft_adapters.write(folder / form, str(base), arch, pairs, 3.0, form)
    return folder


@pytest.fixture
def arch(made: Path) -> Architecture:
    return hf_config.read(made / "base")


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_factors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    factors = load_file(folder / FACTORS)
    change(factors)
    save_file({name: factor.contiguous() for name, factor in factors.items()}, folder / FACTORS)


def wrong(key: str, *values: Any) -> list[tuple[str, Any, str]]:
    return [(f"{key} {value!r}", functools.partial(set_config, **{key: value}), key) for value in values]


ROW = f"{PREFIX}.q_proj.lora_A.weight"
FAULTS = [
    *wrong("r", 0, -1, 2.0, "2", None, True, [2], 10**9, 3),
    *wrong("lora_alpha", "x", 0, -3, None, [], True, 1e300, {}),
    *wrong(
        "rank_pattern",
        {"q_proj": "2"},
        {"q_proj": 0},
        {"[": 2},
        {"(?i)q_proj": 2},
        {"*": 2},
        [],
        "q_proj",
    ),
    *wrong("alpha_pattern", {"[": 3}, {"q_proj": "x"}, {"q_proj": None}, {"q_proj": 0}, [1], 3, {"(": 1.0}),
    *wrong("use_rslora", "yes", 2, None),
    *wrong("target_modules", 3, {"q_proj": 1}, [1]),
    *wrong("target_parameters", "x", 3, [None]),
    *wrong("base_model_name_or_path", 3, ["x"]),
    *wrong("lora_dropout", "x"),
    *wrong("inference_mode", "x"),
    *wrong("peft_type", "IA3", 3),
    *wrong("lora_bias", True),
    *wrong("alora_invocation_tokens", [1, 2]),
    (
        "a key twice",
        lambda folder: (folder / CONFIG).write_text('{"r": 2, "lora_alpha": 3, "r": 4}'),
        "'r' occurs twice",
    ),
    (
        "A alone",
        lambda folder: set_factors(folder, lambda t: t.pop(ROW.replace("lora_A", "lora_B"))),
        "only one of lora_A and lora_B",
    ),
    ("B alone", lambda folder: set_factors(folder, lambda t: t.pop(ROW)), "only one of lora_A and lora_B"),
    ("nan", lambda folder: set_factors(folder, lambda t: t[ROW][0].fill_(torch.nan)), "not all finite"),
    ("inf", lambda folder: set_factors(folder, lambda t: t[ROW][1].fill_(torch.inf)), "not all finite"),
    ("whole numbers", lambda folder: set_factors(folder, lambda t: t.update({ROW: t[ROW].int()})), "int32"),
    (
        "a pattern of another rank",
        lambda folder: set_config(folder, rank_pattern={"q_proj": 3}),
        "rank 2, but adapter_config",
    ),
    (
        "another rank",
        lambda folder: set_factors(
            folder,
            lambda t: t.update({ROW: t[ROW][:1], ROW.replace("_A", "_B"): t[ROW.replace("_A", "_B")][:, :1]}),
        ),
        "rank 1, but adapter_config.json says 2",
    ),
    (
        "no rank",
        lambda folder: set_factors(
            folder,
            lambda t: t.update({ROW: t[ROW][:0], ROW.replace("_A", "_B"): t[ROW.replace("_A", "_B")][:, :0]}),
        ),
        "rank 0, but adapter_config.json says 2",
    ),
]


@pytest.mark.parametrize(("change", "said"), [pytest.param(*rest, id=name) for name, *rest in FAULTS])
def test_an_adapter_that_is_wrong_is_refused_in_one_line_with_code_2(
    change: Callable[[Path], object], said: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = Path(shutil.copytree(made / "full", tmp_path / "own"))
    change(folder)
    assert export.main([str(folder), "--probes", str(tmp_path / "probes"), "--base", str(made / "base")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error, error
    assert not (tmp_path / "probes").exists()


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("full", ["--probes", "DIR", "--form", "leaf"], "--form: leaf has no effect without --adapter; leave it out"),
        ("run", ["--merged", "DIR", "--form", "leaf"], "--form: leaf has no effect without --adapter; leave it out"),
        ("full", ["--probes", "DIR", "--step", "3"], "full is a PEFT adapter, which has no steps; leave it out"),
        ("run", ["--merged", "DIR", "--base", "b"], "--base: b has no effect without --probes; leave it out"),
        ("run", ["--probes", "DIR", "--base", "b"], "run is a run, whose configuration names its base; leave it out"),
    ],
)
def test_an_option_of_export_that_would_have_no_effect_is_refused(
    source: str, options: list[str], said: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = [str(tmp_path / "made") if option == "DIR" else option for option in options]
    assert export.main([str(made / source), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith(f"{said}\n"), error


def test_a_matrix_that_is_adapted_alone_and_in_a_stack_is_refused(
    made: Path, arch: Architecture, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made / "stack", tmp_path / "own"))
    of_one = {name: factor for name, factor in load_file(made / "full" / FACTORS).items() if ".experts.1.down" in name}
    set_factors(folder, lambda factors: factors.update(of_one))
    with pytest.raises(InputError, match=r"experts\.1\.down_proj is adapted twice"):
        peft_adapters.read(folder, arch)


@pytest.mark.parametrize("form", ["full", "stack"])
def test_patterns_give_a_module_its_rank_and_alpha_as_in_peft(
    form: str, made: Path, arch: Architecture, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made / form, tmp_path / form))
    plain = peft_adapters.read(folder, arch)
    set_config(
        folder, r=7, rank_pattern={r"layers\.0\..*_proj|.*experts.*": 2, "nothing": 3}, alpha_pattern={"q_proj": 6}
    )
    if any(".layers.1." in name for name in plain):
        set_config(folder, rank_pattern={".*": 2})
    read = peft_adapters.read(folder, arch)
    assert {name: pair.scale / plain[name].scale for name, pair in read.items()} == {
        name: 2.0 if name.endswith(".q_proj") else 1.0 for name in plain
    }


steady = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=asked([60, nightly(400)])[-1],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEAVES = draw.sampled_from([0, 1, 2, -1, 2.5, 1e300, "x", "", "[", "(a", None, True, "q_proj", 10**30, float("nan")])
VALUES = draw.recursive(
    LEAVES,
    lambda inner: draw.lists(inner, max_size=2) | draw.dictionaries(draw.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = draw.sampled_from(["r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "target_modules",
                          "use_dora",
                          "peft_type", "modules_to_save", "base_model_name_or_path", "layer_replication"])  # fmt: skip
CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda x: None, "row": lambda x: x[:1], "rows": lambda x: x[:0], "column": lambda x: x[:, :1],
    "flat": lambda x: x.flatten(), "turned": lambda x: x.t(), "nan": lambda x: x * torch.nan, 
    "half": lambda x: x.half(),
    "whole": lambda x: x.to(torch.int8), "fp8": lambda x: x.to(torch.float8_e4m3fn), "zero": lambda x: 0 * x,
    "point": lambda x: x[0, 0],
}  # fmt: skip


@steady
@given(
    form=draw.sampled_from(["full", "leaf", "stack"]),
    keys=draw.dictionaries(KEYS, VALUES, max_size=2),
    factors=draw.lists(draw.tuples(draw.integers(0, 10**4), draw.sampled_from([*CHANGES])), max_size=2),
    renamed=draw.sampled_from([None, "x", f"{PREFIX}.q_proj.lora_A.default.weight", "base_model.model.lora_A.weight"]),
)
def test_any_adapter_is_read_or_refused_in_one_line(form, keys, factors, renamed, made: Path, tmp_path: Path) -> None:
    folder, arch = tmp_path / "any", hf_config.read(made / "base")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made / form, folder)
    set_config(folder, **keys)

    def change(tensors: dict[str, Tensor]) -> None:
        for place, kind in factors:
            name = sorted(tensors)[place % len(tensors)]
            new = CHANGES[kind](tensors.pop(name).float()) if tensors[name].dim() == 2 else tensors[name]
            if new is not None:
                tensors[name] = new.clone()
        if renamed:
            tensors[renamed] = tensors.pop(min(tensors)).clone()

    set_factors(folder, change)
    try:
        pairs = peft_adapters.read(folder, arch)
    except InputError as error:
        assert str(folder) in str(error) and one_line(error).isprintable()
    else:
        assert all(re.search("_proj$", name) and 0 < pair.scale < 1e30 for name, pair in pairs.items())
        assert all(pair.a.isfinite().all() and pair.b.isfinite().all() for pair in pairs.values())
