"""The configuration from outside: how a file and overrides are read, what is refused and in which words, and the run's
own record of it (what loads back, what a resumed run may change). Idle keys and layouts: test_rules.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from refused import refusal

import grpo
import reward_gsm8k
from inputs import config
from inputs.config import load_config
from knobs import Config, LossConfig, RewardConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TINY = ROOT / "configs" / "tiny_cpu.yaml"
MINIMAL = "model: {path: m}\ndata: {source: arithmetic}\ntrain: {steps: 100}\n"


@pytest.fixture
def write(tmp_path):
    """write(text) -> path of a file with MINIMAL's three sections and this text."""

    def write_file(text: str, base: str = MINIMAL) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(base + text, encoding="utf-8")
        return path

    return write_file


# ----------------------------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rollout.groupsize", "unknown key; did you mean group_size?"),
        ("rolout.group_size", "rolout: unknown key; did you mean rollout?"),
        ("rollout.lr", "unknown key; did you mean optim.lr?"),
        ("reward.zzz", "unknown key; known keys: method, function"),
    ],
)
def test_an_unknown_override_names_what_may_have_been_meant(key, hint):
    message = refusal(TINY, f"{key}=4")
    assert hint in message and key.split(".")[0] in message


def test_an_unknown_key_of_the_file_names_the_file_and_a_missing_key_says_what_it_is_for(write):
    path = write("rollout: {groupsize: 4}\n")
    assert refusal(path) == f"{path}: rollout.groupsize: unknown key; did you mean group_size?"
    assert "unknown key" in refusal(write("optim: {1: 2}\n"))
    assert "train.steps: missing; needed: a step is one rollout" in refusal(write("", "model: {path: m}\ntrain: {}\n"))
    assert "model: missing" in refusal(write("", "train: {steps: 1}\n"))


# ------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=3.0", "train.steps: expected a whole number, found 3.0"),
        ("train.steps=true", "train.steps: expected a whole number, found true"),
        ("train.steps=null", "train.steps: expected a whole number, found nothing"),
        ("optim.lr=nan", "optim.lr: expected a number, found 'nan'"),
        ("optim.lr=1e999", "optim.lr: expected a finite number, found inf"),
        ("model.recompute=yes", "model.recompute: expected true or false, found 'yes'"),
        ("model.path=", "model.path: expected text, found ''"),
        ("lora.targets=linear_qkv", "lora.targets: expected a list: [a, b], found 'linear_qkv'"),
        ("lora.targets=[linear_qkvv]", "lora.targets[0]: expected 'linear_qkv', 'linear_proj'"),
        ("train.profile_steps=[0]", "train.profile_steps[0]: expected 1 or more, found 0"),
        ("train.trackers=[tensorbord]", "train.trackers[0]: expected 'tensorboard', 'wandb' or 'swanlab'"),
        ("lora.targets=[]", "lora.targets: expected at least 1 members, found []"),
        ("optim.betas=[0.9]", "optim.betas[1]: missing"),
        ("optim.betas=[0.9, 1]", "optim.betas[1]: expected less than 1.0, found 1"),
        ("loss.kl=k4", "loss.kl: expected 'none', 'k1', 'k2'"),
        ("rollout.group_size=1", "rollout.group_size: expected 2 or more, found 1"),
        ("rollout.temperature=0", "rollout.temperature: expected more than 0.0, found 0"),
        ("tiny_model.head_dim=15", "tiny_model.head_dim: expected a multiple of 2, found 15"),
        ("optim=3", "optim: this is a section; expected optim.key=value"),
        ("train.steps", "override 'train.steps': expected section.key=value"),
        ("data.instruction=End with #### 5", "YAML would drop what follows ' #' as a comment"),
        ("a\udcff.b=1", "expected section.key=value"),
        (f"name={'n' * 300}", "name: expected text of at most 150 characters"),
        ("reward.function=own.py", "reward.function: expected FILE.py:NAME, found 'own.py'"),
        ("eval.sets=a.jsonl", "eval.sets: expected {NAME: VALUE, ...}, found 'a.jsonl'"),
        ("data.source=gsm8k", "data.train_path: missing; data.source gsm8k needs"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_what_is_needed(override, expected):
    assert expected in refusal(TINY, override)


def test_a_whole_number_is_fine_where_a_real_one_is_meant_and_exponents_need_no_dot(write):
    path = write("optim: {lr: 1e-6, max_grad_norm: 1E-8, weight_decay: 0, betas: [0, .9]}\nlora: {alpha: +16.}\n")
    cfg = load_config(path, ["loss.clip_high=3e-1"])
    assert (cfg.optim.lr, cfg.optim.max_grad_norm, cfg.optim.betas, cfg.lora.alpha) == (1e-6, 1e-8, (0.0, 0.9), 16.0)
    assert cfg.loss.clip_high == 0.3 and type(cfg.optim.weight_decay) is float


@pytest.mark.parametrize("word", ["no", "2024-01-01", "1:30", "0x10"])
def test_text_that_yaml_1_1_would_convert_stays_text(write, word):
    base = MINIMAL.replace("data: {source: arithmetic}\n", "")
    assert load_config(write(f"data: {{source: arithmetic, instruction: {word}}}\n", base)).data.instruction == word
    assert load_config(TINY, [f"data.instruction={word}"]).data.instruction == word


def test_lists_and_empty_text_can_be_overridden():
    overrides = ["lora.targets=[linear_qkv,linear_fc1, router]", "data.instruction=", "optim.betas=[0, 0]"]
    cfg = load_config(TINY, overrides)
    assert cfg.lora.targets == ("linear_qkv", "linear_fc1", "router")
    assert cfg.data.instruction == "" and cfg.optim.betas == (0.0, 0.0)
    assert load_config(TINY, ["data.instruction='End with #### 5'"]).data.instruction == "End with #### 5"


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "expected a mapping of sections, found nothing"),
        (b"train:\n  steps: 1\n  steps: 2\n", "line 3: not valid YAML: key 'steps' given twice"),
        (b"a: !!python/object:os.system {}\n", "line 1: not valid YAML"),
        (b"a: *nowhere\n", "line 1: not valid YAML: found undefined alias"),
        (b"a: \xff\xfe\n", "not UTF-8 text at byte 3"),
        (b"[" * 5000, "not valid YAML: maximum recursion"),
        (b"eval:\n", "eval: expected a mapping of keys, found nothing"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_line(tmp_path, content, expected):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(str(path)) and expected in message


# --------------------------------------------------------------------------------------------------- the run's record


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_resolved_configuration_loads_back_to_itself(path, tmp_path):
    cfg = load_config(path, ["loss.kl=none", "name='1e-6'", "data.instruction='a: \"b\"\n# c'"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.to_yaml(cfg))
    assert load_config(resolved) == cfg
    assert yaml.safe_load(resolved.read_text())["data"]["instruction"] == cfg.data.instruction
    sections = list(config.to_dict(cfg))
    assert sections == [name for name in Config.model_fields if name in sections]


SINGLE = {
    "data.source",
    "data.operations_low",
    "rollout.staleness",
    "rollout.ranks",
}  # nothing else is accepted beside the rest


def other_values(cfg: Config) -> dict[str, object]:
    """Another acceptable value for each key that the run reads."""
    choices = {
        "device": "auto",
        "model.dtype": "bf16",
        "model.path": ".",  # a folder that does not exist would be a model to make
        "model.quantisation": "int4",
        "tiny_model.architecture": "qwen2_moe",
        "data.overlong_prompts": "drop",
        "data.chat_template_kwargs": "{enable_thinking: false}",
        "eval.sets": "{other: [a.jsonl, b.json]}",
        "rollout.engine": "vllm",
        "rollout.sync": "adapter",
        "reward.method": "openai",
        "lora.targets": "[linear_fc1]",
        "loss.advantage": "none",
        "loss.kind": "gspo",
        "loss.aggregate": "dr-grpo",
        "loss.kl": "k1",
        "loss.importance": "token",
        "optim.betas": "[0.8, 0.95]",
        "optim.decay": "linear",
        "optim.prompts_per_update": 16,
        "data.max_prompt_tokens": 65,
        "tiny_model.num_heads": 8,
        "tiny_model.num_kv_heads": 1,
        "tiny_model.head_dim": 32,
        "rollout.prompts_per_step": 64,
        "tiny_model.teacher_right": 0.1,
        "tiny_model.teacher_wrong_operation": 0.1,
        "aqn.schedule": "constant",
        "replay.mode": "r3",
        "checks.warn": "[logp_gap]",
        "checks.off": "[entropy]",
        "train.changed_inputs": "accept",
        "train.trackers": "[wandb]",
        "train.profile_steps": "[3, 4]",
    }

    def changed(value: object) -> object:
        if isinstance(value, bool):
            return str(not value).lower()
        return value + "x" if isinstance(value, str) else value * 2 or 1

    flat = config.flatten(config.to_dict(cfg))
    return {key: choices[key] if key in choices else changed(old) for key, old in flat.items() if key not in SINGLE}


def test_the_hash_ignores_what_a_resumed_run_may_change_and_sees_every_other_key():
    cfg = load_config(TINY)
    values = other_values(cfg)
    assert len(values) > 70
    for key, value in values.items():
        new = load_config(TINY, [f"{key}={value}"])
        assert new != cfg, key
        changed = config.changed_keys(config.to_dict(cfg), config.to_dict(new))
        same_hash = config.config_hash(new) == config.config_hash(cfg)
        assert same_hash == (changed == []) == (key in config.MAY_CHANGE), key
        if changed:
            assert any(line.startswith(f"{key}: ") and " -> " in line for line in changed)
    assert config.config_hash(load_config(TINY, ["optim.lr=0.001", "lora.alpha=32.0"])) == config.config_hash(cfg)
    assert {"train.steps", "optim.lr", "train.seed", "rollout.engine"} & config.MAY_CHANGE == set()


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_prints_the_resolved_configuration_and_its_notes():
    command = [
        sys.executable,
        str(ROOT / "preflight.py"),
        str(TINY),
        "--values",
        "loss.kl=none",
        "checks.off=[entropy]",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == "note: loss.kl_coef: not read, loss.kl is none\n"
    assert yaml.safe_load(done.stdout)["loss"]["kl"] == "none"
    assert re.search(r"  'off': \[entropy\] +# command line\n", done.stdout)  # to YAML 1.1 the bare word is a boolean


@pytest.mark.parametrize(
    ("overrides", "apart", "merged"),
    [
        (["model.dtype=fp32", "rollout.sync=adapter"], True, False),
        (["model.dtype=bf16"], True, False),
        (["model.dtype=bf16", "rollout.sync=merged"], False, True),
        (["model.dtype=bf16", "aqn.schedule=constant"], True, False),
        (["model.dtype=bf16", "rollout.engine=vllm"], False, True),
    ],
)
def test_the_policy_of_sampler_and_trainer_follows_from_type_and_engine(
    overrides: list[str], apart: bool, merged: bool
) -> None:
    """Factors apart by default where bf16 would round them away and the engine can; else merged on both sides."""
    cfg = load_config("configs/tiny_cpu.yaml", overrides)
    assert (cfg.keeps_factors_apart, cfg.trains_merged) == (apart, merged)


def test_the_choices_of_a_key_are_those_of_the_function_that_gets_it():
    """A choice that only one of them knows would end a run with a traceback, or could never be chosen."""
    choices = {
        (RewardConfig, "method"): (*reward_gsm8k.METHODS, "math"),  # tasks/scoring.py
        (LossConfig, "advantage"): grpo.NORMS,
        (LossConfig, "kind"): grpo.PER_TOKEN,
        (LossConfig, "aggregate"): grpo.AGGREGATES,
        (LossConfig, "kl"): ("none", *grpo.KL_KINDS),
        (LossConfig, "importance"): grpo.WEIGHT_MODES,
    }
    for (section, key), known in choices.items():
        taken = section.model_fields[key].annotation
        names = get_args(taken) if get_origin(taken) is Literal else get_args(get_args(taken)[0])  # or a function
        assert set(names) == set(known), key
