"""What export.py writes is the policy that was trained: transformers and peft compute the trainer's log-probabilities.

The trainer is the Megatron model in a gloo world, alone and over TP2 x EP2; the factors are random and none is zero.
Not covered: Megatron on an accelerator, and models larger than a few hundred kilobytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import killed
import pytest
import reference
import torch
import world
from safetensors.torch import load_file, save_file
from torch import Tensor

import adapter_weights
import checkpoint
import export
import hf_config
import input_files
import lora_megatron
import model_megatron
import run_record
import weights_hf
from config import load_config

ROOT = Path(__file__).parents[1]
LAYOUTS = ["TP1", "TP2_EP2"]
ALL = "linear_qkv, linear_proj, linear_fc1, linear_fc2"
CASES = {  # name: (model, its changes, targets, rank, expert rank, alpha); layer 1 of 3 is dense
    "qwen3_router_expert_rank": ("qwen3_moe", {"num_key_value_heads": 2}, f"{ALL}, router", 4, 2, 8),
    "qwen2_shared_tied": ("qwen2_moe", {"tie_word_embeddings": True}, ALL, 4, 0, 6.5),
    "qwen3_attention": ("qwen3_moe", {"num_key_value_heads": 4}, "linear_qkv, linear_proj", 4, None, 8),
    "qwen2_no_attention_expert_rank": ("qwen2_moe", {}, "linear_fc1, linear_fc2", 3, 5, 9),
    "qwen3_down_only": ("qwen3_moe", {}, "linear_fc2", 4, 0, 8),
    "qwen2_gate_up_router": ("qwen2_moe", {"num_key_value_heads": 4}, "linear_fc1, router, linear_qkv", 4, 6, 8),
    "qwen2_one_expert": ("qwen2_moe", {"num_experts": 1, "num_experts_per_tok": 1}, ALL, 4, 2, 8),
}


@dataclass(frozen=True)
class Run:
    folder: Path
    base: Path
    factors: dict[str, Tensor]
    logp: dict[str, Tensor]  # layout -> the trainer's log-probability of every token but a row's first


def make_run(folder: Path, name: str, dtype: str = "fp32") -> None:
    """A run folder without checkpoints, and its base model beside it."""
    kind, changes, targets, rank, expert_rank, alpha = CASES[name]
    base = folder.parent / f"base_{name}"
    if not base.exists():
        reference.save(kind, base, **changes)
        (base / "tokenizer.json").write_text('{"some": "tokenizer"}')
        (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    folder.mkdir()
    lines = [
        f"model: {{path: {base}, dtype: {dtype}}}",
        "data: {source: arithmetic}",
        f"lora: {{targets: [{targets}], rank: {rank}, alpha: {alpha}",
        f"  {'' if expert_rank is None else f', expert_rank: {expert_rank}'}}}",
        "train: {steps: 7}",
    ]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n")
    inputs = run_record.inputs(base, load_config(folder / "config.yaml").data)
    (folder / "inputs.json").write_text(json.dumps(inputs))


def random_factors(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    std = {"A": 0.1, "B": 0.3}
    return {name: torch.randn(shapes[name], generator=generator) * std[name[-1]] for name in sorted(shapes)}


def trainer_logp(parallel, folders: dict[str, Path]) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """For each run: random whole factors in the names and shapes of the trainer's checkpoints, and the log-probs."""
    results = {}
    for name, folder in folders.items():
        cfg = load_config(folder / "config.yaml")
        arch = hf_config.read(cfg.model.path)
        if arch.num_experts % parallel.expert:
            continue
        model = model_megatron.build(arch, parallel, dtype=torch.float32, recompute=False)
        weights_hf.load(model, arch, parallel, cfg.model.path)
        adapters = lora_megatron.attach(model, cfg.lora, parallel, seed=0)
        factors = lora_megatron.factors(adapters)
        fresh = adapter_weights.gather(adapters, factors, arch, parallel)
        whole = random_factors({key: value.shape for key, value in fresh.items()})
        pieces = adapter_weights.scatter(adapters, whole, arch, parallel)
        tokens = reference.tokens()
        mask = torch.ones_like(tokens)
        mask[:, 0] = 0
        with torch.no_grad():
            for key, factor in factors.items():
                factor.copy_(pieces[key])
            logp, *_ = model_megatron.token_logprobs(model, tokens, mask, parallel)
        results[name] = (whole, logp[:, 1:])
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("runs")
    folders = {name: root / name for name in CASES}
    for name, folder in folders.items():
        make_run(folder, name)
    by_layout = world.in_layouts(LAYOUTS, trainer_logp, folders)
    made = {}
    for name, folder in folders.items():
        factors = by_layout["TP1"][0][name][0]
        # A later step, and one before it whose updates are the negative: the wrong one would show.
        cfg = load_config(folder / "config.yaml")
        other = {key: -value if key.endswith(".B") else value for key, value in factors.items()}
        checkpoint.save(folder, 2, {"adapter": other, "optimizer": {}}, {}, cfg)
        checkpoint.save(folder, 3, {"adapter": factors, "optimizer": {"x": torch.ones(1)}}, {}, cfg)
        logp = {layout: ranks[0][name][1] for layout, ranks in by_layout.items() if name in ranks[0]}
        made[name] = Run(folder, root / f"base_{name}", factors, logp)
    return made


def logp_of(model) -> Tensor:
    tokens = reference.tokens()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.float()
    return logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


# ---------------------------------------------------------------- the same policy


@pytest.mark.parametrize("name", CASES)
def test_merged_model_has_the_trainers_logprobs(runs: dict[str, Run], name: str, tmp_path: Path, capsys) -> None:
    run, out = runs[name], tmp_path / "merged"
    assert export.main([str(run.folder), "--merged", str(out)]) == 0
    found = logp_of(reference.load(out))
    assert "TP1" in run.logp and ("TP2_EP2" in run.logp) == (name != "qwen2_one_expert")
    for layout, expected in run.logp.items():
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda m, at=layout: f"{at}: {m}")
    assert (found - logp_of(reference.load(run.base))).abs().max() > 0.1

    base, merged = tensors_in(run.base), tensors_in(out)
    assert {key: value.shape for key, value in merged.items()} == {key: value.shape for key, value in base.items()}
    size = sum(value.nbytes for value in merged.values()) / 2**20
    assert capsys.readouterr().out == f"wrote {out}: merged model after step 3 ({len(base)} tensors, {size:.1f} MiB)\n"
    for copied in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((out / copied).read_text()) == json.loads((run.base / copied).read_text())


# False for a pattern that only matches parameters: the ranks below are loaded as the pattern says.
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match any targeted module:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_peft_adapter_has_the_trainers_logprobs_when_on_and_the_bases_when_off(
    runs: dict[str, Run], name: str, tmp_path: Path, capsys
) -> None:
    from peft import LoraConfig, PeftModel

    run, out = runs[name], tmp_path / "adapter"
    assert export.main([str(run.folder), "--adapter", str(out)]) == 0
    streams = capsys.readouterr()
    assert streams.out.startswith(f"wrote {out}: PEFT adapter after step 3 (")
    assert ("PEFT will warn" in streams.err) == (name == "qwen2_no_attention_expert_rank")
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # whoever may read one may read the other
    assert json.loads((out / "adapter_config.json").read_text()).keys() <= LoraConfig().to_dict().keys()

    base = reference.load(run.base)
    without = logp_of(base)
    model = PeftModel.from_pretrained(base, out)
    on = logp_of(model)
    for layout, expected in run.logp.items():
        torch.testing.assert_close(on, expected, rtol=0, atol=1e-5, msg=lambda m, at=layout: f"{at}: {m}")
    with model.disable_adapter():
        torch.testing.assert_close(logp_of(model), without, rtol=0, atol=1e-6)
    assert (on - without).abs().max() > 0.1

    # Nothing that PEFT has adapters for was left at its start, and nothing of the file was ignored.
    loaded = {key.replace(".default", ""): value for key, value in model.state_dict().items() if ".lora_" in key}
    written = tensors_in(out)
    assert loaded.keys() == written.keys()
    for key, value in written.items():
        assert torch.equal(loaded[key], value), key


def test_attention_only_needs_no_rank_pattern_and_no_parameters(runs: dict[str, Run], tmp_path: Path) -> None:
    export.main([str(runs["qwen3_attention"].folder), "--adapter", str(tmp_path / "out")])
    about = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert about["target_modules"] == [f"self_attn.{letter}_proj" for letter in "qkvo"]
    assert about["target_parameters"] == [] and about["rank_pattern"] == {} and about["r"] == 4


def test_step_chooses_the_checkpoint(runs: dict[str, Run], tmp_path: Path, capsys) -> None:
    run = runs["qwen3_attention"]
    assert export.main([str(run.folder), "--merged", str(tmp_path / "a"), "--step", "2"]) == 0
    assert "after step 2 " in capsys.readouterr().out
    export.main([str(run.folder), "--merged", str(tmp_path / "b"), "--step", "3"])
    name = "model.layers.0.self_attn.o_proj.weight"
    base, two, three = (tensors_in(folder)[name] for folder in (run.base, tmp_path / "a", tmp_path / "b"))
    torch.testing.assert_close(two - base, base - three)
    assert (three - base).abs().max() > 0.1


# ---------------------------------------------------------------- the files


def test_bf16_is_rounded_once_from_fp32(runs: dict[str, Run], tmp_path: Path) -> None:
    name = "qwen2_shared_tied"
    base, factors = runs[name].base, runs[name].factors
    shutil.copytree(base, tmp_path / base.name)
    make_run(tmp_path / "run", name, dtype="bf16")
    cfg = load_config(tmp_path / "run" / "config.yaml")
    checkpoint.save(tmp_path / "run", 5, {"adapter": factors}, {}, cfg)
    assert export.main([str(tmp_path / "run"), "--merged", str(tmp_path / "out")]) == 0
    before, after = tensors_in(base), tensors_in(tmp_path / "out")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["dtype"] == "bfloat16" and json.loads((base / "config.json").read_text())["dtype"] == "float32"

    scale, layer = 6.5 / 4, "model.layers.2"
    a, b = (factors[f"{layer}.mlp.experts.gate_up_proj.{letter}"][3] for letter in "AB")
    up = scale * (a @ b)[:, 32:].t()  # (in, out) with out = 32 of gate, 32 of up
    a, b = (factors[f"{layer}.self_attn.qkv_proj.{letter}"] for letter in "AB")
    value = scale * (b @ a)[128:]  # 64 rows of q, 64 of k, 64 of v
    for key, delta in ((f"{layer}.mlp.experts.3.up_proj", up), (f"{layer}.self_attn.v_proj", value)):
        expected = (before[f"{key}.weight"].bfloat16().float() + delta).bfloat16()
        assert (after[f"{key}.weight"] == expected).float().mean() > 0.999  # a last bit of B A may tip a rounding
        torch.testing.assert_close(after[f"{key}.weight"], expected, rtol=2**-7, atol=0)
    untouched = "model.norm.weight"
    assert torch.equal(after[untouched], before[untouched].bfloat16())


def test_a_model_in_several_files_is_the_same_model(runs: dict[str, Run], tmp_path: Path, monkeypatch) -> None:
    run = runs["qwen3_down_only"]
    export.main([str(run.folder), "--merged", str(tmp_path / "one")])
    monkeypatch.setattr(weights_hf, "save_model", partial(weights_hf.save_model, shard_bytes=2**18))
    export.main([str(run.folder), "--merged", str(tmp_path / "many")])
    one, many = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert one.keys() == many.keys() and all(torch.equal(one[key], many[key]) for key in one)
    assert torch.equal(logp_of(reference.load(tmp_path / "one")), logp_of(reference.load(tmp_path / "many")))


def test_export_needs_neither_megatron_nor_transformers_nor_peft(runs: dict[str, Run], tmp_path: Path) -> None:
    run = str(runs["qwen2_shared_tied"].folder)
    code = "\n".join(
        [
            "import sys",
            "sys.modules.update(dict.fromkeys(('megatron', 'transformers', 'peft')))  # importing one is an error now",
            "import export",
            *(f"assert export.main([{run!r}, '--{k}', {str(tmp_path / k)!r}]) == 0" for k in ("merged", "adapter")),
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("wrote ") == 2, done.stderr


def test_an_empty_target_and_what_a_killed_export_left_are_replaced(runs: dict[str, Run], tmp_path: Path) -> None:
    out, left = tmp_path / "out", tmp_path / ".tmp-out"
    out.mkdir()
    input_files.fresh_folder(left)
    (left / "stale.safetensors").write_bytes(b"x")
    assert export.main([str(runs["qwen3_attention"].folder), "--merged", str(out)]) == 0
    assert (out / "model.safetensors").is_file() and not (out / "stale.safetensors").exists() and not left.exists()


@pytest.mark.parametrize("kind", ["--merged", "--adapter"])
def test_an_export_that_was_killed_at_any_file_operation_works_again(kind, runs: dict[str, Run], tmp_path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    command = [str(runs["qwen3_attention"].folder), kind, str(folder / "out")]
    moments, wrong = killed.after_each_kill(lambda: export.main(command), folder)
    assert wrong == [] and moments > 10
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_a_folder_of_the_users_beside_the_target_stays(runs: dict[str, Run], tmp_path: Path, capsys) -> None:
    theirs = tmp_path / ".tmp-out" / "thesis.tex"
    theirs.parent.mkdir()
    theirs.write_text("years of work")
    assert export.main([str(runs["qwen3_attention"].folder), "--adapter", str(tmp_path / "out")]) == 2
    assert "in the way, and not made by this program" in capsys.readouterr().err
    assert theirs.read_text() == "years of work" and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- refusals

QKV_A = "model.layers.0.self_attn.qkv_proj.A"
LAST = "checkpoints/step-000003"


def save_factors(run_dir: Path, **changed: Tensor | None) -> None:
    """Step 3 again with some factors changed, or left out where None."""
    cfg = load_config(run_dir / "config.yaml")
    factors = dict(checkpoint.load(run_dir / LAST).tensors["adapter"]) | changed
    kept = {name: factor for name, factor in factors.items() if factor is not None}
    checkpoint.save(run_dir, 3, {"adapter": kept}, {}, cfg)


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def base_norm(base: Path, **new: Tensor) -> None:
    """The base model with another final norm, or without one."""
    kept = {name: tensor for name, tensor in tensors_in(base).items() if name != "model.norm.weight"}
    save_file(kept | {f"model.norm.{key}": value for key, value in new.items()}, base / "model.safetensors")


REFUSALS = {  # what is wrong: (how it is made so, given the run, base and target folders; what the line says)
    "target in use": (lambda r, b, t: (t.mkdir(), (t / "x").touch()), ["already there and not an empty directory"]),
    "target is a file": (lambda r, b, t: t.touch(), ["already there"]),
    "target below a file": (lambda r, b, t: t.parent.rmdir() or t.parent.touch(), ["not written", "Not a directory"]),
    "no run": (lambda r, b, t: shutil.rmtree(r), ["no config.yaml", "needed: a run folder"]),
    "no checkpoints": (lambda r, b, t: shutil.rmtree(r / "checkpoints"), ["no checkpoint whose checksums hold"]),
    "damaged checkpoints": (
        lambda r, b, t: [truncate(path) for path in r.glob("checkpoints/*/adapter.safetensors")],
        ["no checkpoint whose checksums hold"],
    ),
    "factors missing": (lambda r, b, t: save_factors(r, **{QKV_A: None}), [f"{QKV_A} is missing", LAST]),
    "factors of others": (lambda r, b, t: save_factors(r, x=torch.ones(1)), ["x is not what lora.targets trains"]),
    "a factor's shape": (
        lambda r, b, t: save_factors(r, **{QKV_A: torch.ones(2, 64)}),
        [f"{QKV_A} has shape [2, 64], the run needs [4, 64]"],
    ),
    "a factor not finite": (
        lambda r, b, t: save_factors(r, **{QKV_A: torch.full((4, 64), float("inf"))}),
        [f"{QKV_A} holds values that are not finite"],
    ),
    "a factor of whole numbers": (
        lambda r, b, t: save_factors(r, **{QKV_A: torch.ones(4, 64, dtype=torch.int64)}),
        [f"{QKV_A} holds torch.int64; needed: floating-point numbers"],
    ),
    "another alpha": (
        lambda r, b, t: rewrite(r / "config.yaml", "alpha: 8", "alpha: 9"),
        ["config.yaml: changed since step-000003", "lora.alpha: 8", "9"],
    ),
    "another dtype": (lambda r, b, t: rewrite(r / "config.yaml", "fp32", "bf16"), ["model.dtype"]),
    "no base model": (lambda r, b, t: shutil.rmtree(b), ["model.path: no config.json in"]),
    "another base model": (
        lambda r, b, t: rewrite(b / "config.json", '"hidden_size": 64', '"hidden_size": 32'),
        ["weights do not fit config.json"],
    ),
    "a base tensor missing": (lambda r, b, t: base_norm(b), ["missing: model.norm.weight"]),
    "a base tensor not finite": (
        lambda r, b, t: base_norm(b, weight=torch.full((64,), float("nan"))),
        ["model.norm.weight, merged, is not a finite"],
    ),
    "a damaged base": (lambda r, b, t: truncate(b / "model.safetensors"), ["not a readable safetensors file"]),
}


@pytest.fixture
def copied(runs: dict[str, Run], tmp_path: Path) -> tuple[Path, Path, Path]:
    """A run to spoil: its folder, its base model, and a target in a folder of its own."""
    name = "qwen3_attention"
    run, base, target = tmp_path / "run", tmp_path / "base", tmp_path / "target" / "out"
    shutil.copytree(runs[name].folder, run)
    shutil.copytree(runs[name].base, base)
    target.parent.mkdir()
    rewrite(run / "config.yaml", str(runs[name].base), str(base))
    return run, base, target


@pytest.mark.parametrize("what", REFUSALS)
def test_refuses_in_one_line_and_writes_nothing(what: str, copied: tuple[Path, Path, Path], capsys) -> None:
    spoil, says = REFUSALS[what]
    spoil(*copied)
    check_refused(copied, ["--merged", str(copied[2])], says, capsys)


def check_refused(copied: tuple[Path, Path, Path], arguments: list[str], says: list[str], capsys) -> None:
    folder = copied[2].parent
    before = sorted(folder.rglob("*"))
    # Some of the faults are changed inputs, which would be refused before they are looked at.
    assert export.main([str(copied[0]), *arguments, "--accept-changed-inputs"]) == 2
    streams = capsys.readouterr()
    errors = [line for line in streams.err.splitlines() if not line.startswith("note: checkpoint skipped")]
    assert streams.out == "" and len(errors) == 1 and errors[0].startswith("error: "), streams.err
    for text in says:
        assert text in errors[0]
    assert sorted(folder.rglob("*")) == before


def test_another_base_model_under_the_same_path_is_refused_or_accepted_and_recorded(copied, capsys) -> None:
    run, base, target = copied
    was = {name: hashlib.sha256((base / name).read_bytes()).hexdigest() for name in ("tokenizer.json", "config.json")}
    (base / "tokenizer.json").write_text('{"another": "tokenizer"}')
    now = hashlib.sha256((base / "tokenizer.json").read_bytes()).hexdigest()
    for flag in ("--merged", "--adapter"):
        assert export.main([str(run), flag, str(target)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{base}/tokenizer.json" in error and was["tokenizer.json"] in error
        assert now in error and "--accept-changed-inputs" in error and not target.exists()
    assert export.main([str(run), "--merged", str(target), "--accept-changed-inputs"]) == 0
    (line,) = json.loads((target / "changed_inputs.json").read_text())
    assert f"{base}/tokenizer.json" in line and was["tokenizer.json"] in line and now in line
    assert line in capsys.readouterr().err


def test_refuses_a_step_without_checkpoint_and_lists_those_there_are(copied, capsys) -> None:
    says = ["no step-000009 in", "there: step-000002, step-000003"]
    check_refused(copied, ["--adapter", str(copied[2]), "--step", "9"], says, capsys)


def test_a_chosen_step_is_not_replaced_by_another_when_damaged(copied, capsys) -> None:
    truncate(copied[0] / LAST / "adapter.safetensors")
    arguments = ["--adapter", str(copied[2])]
    check_refused(copied, [*arguments, "--step", "3"], [f"{LAST}/adapter.safetensors: corrupted"], capsys)
    assert export.main([str(copied[0]), *arguments]) == 0
    streams = capsys.readouterr()
    assert "after step 2 " in streams.out and "checkpoint skipped" in streams.err


def test_the_optimizers_moments_are_never_read(copied, tmp_path: Path) -> None:
    """They are two thirds of a checkpoint: 9.5 of 14.3 GiB for Qwen3-30B-A3B."""
    run, _, out = copied
    moments = next(run.glob("checkpoints/step-000003/optimizer.safetensors"))
    moments.write_bytes(b"not even a safetensors file")
    assert export.main([str(run), "--adapter", str(out)]) == 0
    moments.unlink()
    assert export.main([str(run), "--adapter", str(tmp_path / "again"), "--step", "3"]) == 2  # but it has to be there


@pytest.mark.parametrize("flag", ["--merged", "--adapter"])
def test_a_full_disk_is_said_before_anything_is_written(copied, flag: str, capsys, monkeypatch) -> None:
    usage = shutil.disk_usage(copied[2].parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_refused(copied, [flag, str(copied[2])], ["MiB needed, 0.0 MiB free"], capsys)


def test_nothing_is_left_when_writing_fails(copied, capsys, monkeypatch) -> None:
    def fail(tensors, out_dir: Path) -> None:
        (out_dir / "model-00001.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_hf, "save_model", fail)
    check_refused(copied, ["--merged", str(copied[2])], [f"{copied[2]}: not written: No space left"], capsys)
