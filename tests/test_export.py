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
from pathlib import Path

import adapted
import killed
import pytest
import reference
import torch
import world
from safetensors.torch import load_file
from saved import save
from tiers import asked, ci
from torch import Tensor

import export
import lora_megatron
from facts import limits
from inputs import hf_config
from inputs.config import load_config
from model import megatron_model
from runlog import run_record
from weights import adapter_weights, checkpoint, huggingface

ROOT = Path(__file__).parents[1]
LAYOUTS = ["TP1", "TP2_EP2"]
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"
ALL = "linear_qkv, linear_proj, linear_fc1, linear_fc2"
CASES = {  # name: (model, its changes, targets, rank, expert rank, alpha); layer 1 of 3 is dense
    "qwen3_router_expert_rank": ("qwen3_moe", {"num_key_value_heads": 2}, f"{ALL}, router", 4, 2, 8),
    "qwen2_shared_tied": ("qwen2_moe", {"tie_word_embeddings": True}, ALL, 4, 0, 6.5),
    "qwen3_attention": ("qwen3_moe", {"num_key_value_heads": 4}, "linear_qkv, linear_proj", 4, None, 8),
    "olmoe": ("olmoe", {}, ALL, 4, 2, 8),
    "qwen2_no_attention_expert_rank": ("qwen2_moe", {}, "linear_fc1, linear_fc2", 3, 5, 9),
    "qwen2_one_expert": ("qwen2_moe", {"num_experts": 1, "num_experts_per_tok": 1}, ALL, 4, 2, 8),
    "qwen3_down_only": ("qwen3_moe", {}, "linear_fc2", 4, 0, 8),
    "qwen2_gate_up_router": ("qwen2_moe", {"num_key_value_heads": 4}, "linear_fc1, router, linear_qkv", 4, 6, 8),
}
NAMES = [*list(CASES)[:5], *map(ci, list(CASES)[5:])]


@dataclass(frozen=True)
class Run:
    folder: Path
    base: Path
    factors: dict[str, Tensor]
    logp: dict[str, Tensor]  # layout -> the trainer's log-probability of every token but a row's first


def make_run(folder: Path, name: str) -> None:
    """A run folder without checkpoints, and its base model beside it."""
    kind, changes, targets, rank, expert_rank, alpha = CASES[name]
    base = folder.parent / f"base_{name}"
    reference.save(kind, base, **changes)
    (base / "tokenizer.json").write_text('{"some": "tokenizer"}')
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    folder.mkdir()
    lines = [
        f"model: {{path: {base}, dtype: fp32}}",
        "data: {source: arithmetic}",
        f"lora: {{targets: [{targets}], rank: {rank}, alpha: {alpha}",
        f"  {'' if expert_rank is None else f', expert_rank: {expert_rank}'}}}",
        "train: {steps: 7}",
    ]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n")
    inputs = run_record.inputs(run_record.input_files(load_config(folder / "config.yaml")))
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
        model, _ = adapted.load(cfg.model.path, parallel)
        adapters = lora_megatron.attach(model, cfg.lora, parallel, seed=0)
        factors = lora_megatron.factors(adapters)
        fresh = adapted.gather(adapters, factors, arch, parallel)
        whole = random_factors({key: value.shape for key, value in fresh.items()})
        adapted.fill(adapters, whole, arch, parallel)
        tokens, mask = adapted.my_rows(reference.tokens(), parallel)
        with torch.no_grad():
            logp, *_ = megatron_model.token_logprobs(model, tokens, mask, parallel)
        results[name] = (whole, logp[:, 1:])
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("runs")
    folders = {name: root / name for name in asked(NAMES)}
    for name, folder in folders.items():
        make_run(folder, name)
    by_layout = world.in_layouts(LAYOUTS, trainer_logp, folders)
    made = {}
    for name, folder in folders.items():
        factors = by_layout["TP1"][0][name][0]
        # A step, and one before it whose updates are the negative: the wrong one would show.
        cfg = load_config(folder / "config.yaml")
        other = {key: -value if key.endswith(".B") else value for key, value in factors.items()}
        save(folder, 2, {"adapter": other, "optimizer": {}}, {}, cfg)
        save(folder, 3, {"adapter": factors, "optimizer": {"x": torch.ones(1)}}, {}, cfg)
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


@pytest.mark.parametrize("name", NAMES)
def test_merged_model_has_the_trainers_logprobs(runs: dict[str, Run], name: str, tmp_path: Path, capsys) -> None:
    run, out = runs[name], tmp_path / "merged"
    assert export.main([str(run.folder), "--merged", str(out)]) == 0
    found = logp_of(reference.load(out))
    assert run.logp.keys() == ({"TP1"} if name == "qwen2_one_expert" else {"TP1", "TP2_EP2"})
    for layout, expected in run.logp.items():
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda m, at=layout: f"{at}: {m}")
    assert (found - logp_of(reference.load(run.base))).abs().max() > 0.1
    base, merged = tensors_in(run.base), tensors_in(out)
    assert {key: value.shape for key, value in merged.items()} == {key: value.shape for key, value in base.items()}
    assert f"wrote {out}: merged model after step 3 ({len(base)} tensors, " in capsys.readouterr().out
    for copied in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((out / copied).read_text()) == json.loads((run.base / copied).read_text())


# False for a pattern that only matches parameters: the ranks below are loaded as the pattern says.
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match any targeted module:RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_peft_adapter_has_the_trainers_logprobs_when_on_and_the_bases_when_off(
    runs: dict[str, Run], name: str, tmp_path: Path, capsys
) -> None:
    from peft import LoraConfig, PeftModel

    run, out = runs[name], tmp_path / "adapter"
    assert export.main([str(run.folder), "--adapter", str(out)]) == 0
    streams = capsys.readouterr()
    assert streams.out.startswith(f"wrote {out}: PEFT adapter after step 3 (")
    # The second note is for quantised bases.
    assert [note in streams.err for note in ("PEFT will warn", "belongs to a base with")] == [
        name == "qwen2_no_attention_expert_rank",
        False,
    ]
    copied = {"tokenizer.json", "generation_config.json"}
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"} | copied
    assert all((out / name).read_bytes() == (run.base / name).read_bytes() for name in copied)
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


def unequal_to_the_push(parallel, path: Path) -> dict[str, list[str]]:
    """For each dtype: the tensors of a merged export that are not, to the last bit, those that the engine gets."""
    unequal = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, arch = adapted.load(path, parallel, dtype=dtype)
        lora = adapted.lora_config(targets=(*ALL.split(", "), "router"))
        adapters = lora_megatron.attach(model, lora, parallel, seed=0)
        fresh = adapted.gather(adapters, lora_megatron.factors(adapters), arch, parallel)
        factors = random_factors({name: value.shape for name, value in fresh.items()})
        adapted.fill(adapters, factors, arch, parallel)
        modules = list(adapter_weights.adapted_modules(arch, lora))
        base = huggingface.read_model(path, arch)
        exported = dict(export.merged_tensors(base, arch, modules, factors, lora.alpha, dtype))
        pushed = dict(huggingface.export(model, arch, parallel))
        assert exported.keys() == pushed.keys()
        assert not torch.equal(exported[EXPERT], base[EXPERT].to(dtype))
        unequal[str(dtype)] = [name for name in pushed if not torch.equal(exported[name], pushed[name])]
    return unequal


@pytest.mark.parametrize("kind", ["qwen3_moe", ci("qwen2_moe"), ci("olmoe")])
@pytest.mark.parametrize("width", [4, 8, 32])
@pytest.mark.parametrize("stack", [2**26, 1500])  # elements that are merged at once
def test_a_merged_model_is_what_the_push_hands_to_the_engine_bit_for_bit(kind, width, stack, tmp_path, monkeypatch):
    """Also for narrow experts, whose products round differently in another order of their factors."""
    monkeypatch.setattr(limits, "STACK", stack)
    path = reference.save(kind, tmp_path / "base", moe_intermediate_size=width, num_key_value_heads=4)
    (unequal,) = world.in_layouts(["TP1"], unequal_to_the_push, path)["TP1"]
    assert unequal == {"torch.float32": [], "torch.bfloat16": []}


# ---------------------------------------------------------------- the files


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


@pytest.mark.parametrize("kind", ["--adapter", ci("--merged")])
def test_an_export_that_was_killed_at_any_file_operation_works_again(kind, runs: dict[str, Run], tmp_path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    command = [str(runs["qwen3_attention"].folder), kind, str(folder / "out")]
    moments, wrong = killed.after_each_kill(lambda: export.main(command), folder)
    assert wrong == [] and moments > 8
    assert [path.name for path in folder.iterdir()] == ["out"]


# ---------------------------------------------------------------- refusals

QKV_A = "model.layers.0.self_attn.qkv_proj.A"
LAST = "checkpoints/step-000003"


def save_factors(run_dir: Path, **changed: Tensor | None) -> None:
    """Step 3 again with some factors changed, or left out where None."""
    cfg = load_config(run_dir / "config.yaml")
    factors = dict(checkpoint.load(run_dir / LAST).tensors["adapter"]) | changed
    kept = {name: factor for name, factor in factors.items() if factor is not None}
    save(run_dir, 3, {"adapter": kept}, {}, cfg)


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


REFUSALS = {  # what is wrong: how it is made so, given the run, base and target folders; what the line says; options
    "target in use": (lambda r, b, t: (t.mkdir(), (t / "x").touch()), ["already there and not an empty directory"]),
    "no run": (lambda r, b, t: shutil.rmtree(r), ["no config.yaml", "needed: a run folder"]),
    "factors missing": (lambda r, b, t: save_factors(r, **{QKV_A: None}), [f"{QKV_A} is missing", LAST]),
    "a factor's shape": (
        lambda r, b, t: save_factors(r, **{QKV_A: torch.ones(2, 64)}),
        [f"{QKV_A} has shape [2, 64], the run needs [4, 64]"],
    ),
    "a factor not finite": (
        lambda r, b, t: save_factors(r, **{QKV_A: torch.full((4, 64), float("inf"))}),
        [f"{QKV_A} holds values that are not finite"],
    ),
    "another alpha": (
        lambda r, b, t: rewrite(r / "config.yaml", "alpha: 8", "alpha: 9"),
        ["config.yaml: changed since step-000003", "lora.alpha: 8", "9"],
    ),
    "a damaged base": (lambda r, b, t: truncate(b / "model.safetensors"), ["not a readable safetensors file"]),
    "an absent step": (lambda r, b, t: None, ["no step-000009 in", "there: step-000002, step-000003"], "--step", "9"),
    "a damaged step": (
        lambda r, b, t: truncate(r / LAST / "adapter.safetensors"),
        [f"{LAST}/adapter.safetensors: corrupted"],
        "--step",
        "3",
    ),
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
    spoil, says, *more = REFUSALS[what]
    spoil(*copied)
    run, _, target = copied
    before = sorted(target.parent.rglob("*"))
    # Some of the faults are changed inputs, which would be refused before they are looked at.
    assert export.main([str(run), "--merged", str(target), "--accept-changed-inputs", *more]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.startswith("error: ") and streams.err.count("\n") == 1, streams.err
    assert all(text in streams.err for text in says), streams.err
    assert sorted(target.parent.rglob("*")) == before


def test_another_base_model_under_the_same_path_is_refused_or_accepted_and_recorded(copied, capsys) -> None:
    run, base, target = copied
    tokenizer = base / "tokenizer.json"
    was = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    tokenizer.write_text('{"another": "tokenizer"}')
    named = [str(tokenizer), was, hashlib.sha256(tokenizer.read_bytes()).hexdigest()]
    assert export.main([str(run), "--merged", str(target)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(text in error for text in [*named, "--accept-changed-inputs"])
    assert export.main([str(run), "--merged", str(target), "--accept-changed-inputs"]) == 0
    (line,) = json.loads((target / "changed_inputs.json").read_text())
    assert all(text in line for text in named) and line in capsys.readouterr().err


def test_an_adapter_names_its_base_so_that_it_is_found_from_anywhere(copied, monkeypatch) -> None:
    run, base, target = copied
    monkeypatch.chdir(base.parent)
    rewrite(run / "config.yaml", str(base), base.name)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    assert export.main([str(run), "--adapter", str(target), "--accept-changed-inputs"]) == 0
    assert json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_damaged_last_step_is_skipped_with_a_note(copied, capsys) -> None:
    run, _, target = copied
    truncate(run / LAST / "adapter.safetensors")
    assert export.main([str(run), "--adapter", str(target)]) == 0
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


def test_a_full_disk_is_said_before_anything_is_written(copied, capsys, monkeypatch) -> None:
    usage = shutil.disk_usage(copied[2].parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert export.main([str(copied[0]), "--merged", str(copied[2])]) == 2
    assert "MiB needed, 0.0 MiB free" in capsys.readouterr().err and [*copied[2].parent.iterdir()] == []
