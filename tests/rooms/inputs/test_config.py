"""Configurations, the rules that they keep, and config.json of a model."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import published
import pytest
import yaml
from refused import refusal

import export
import grpo
import preflight
import report
import reward_gsm8k
import sweep
from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from inputs import config, hf_config
from inputs.config import load_config, resolve_config, to_yaml
from inputs.rules import refuse_first, trainer_problems
from knobs import Config, LossConfig, Merging, RewardConfig

# --------------------------------------------------------------------------------------------------------------- config
# The configuration from outside: how a file and overrides are read, what is refused and in which words, and the run's
# own record of it (what loads back, what a resumed run may change). Idle keys and layouts come next.

ROOT = Path(__file__).resolve().parents[3]
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
        ("reward.zzz", "unknown key; the keys here are method, function"),
    ],
)
def test_an_unknown_override_names_what_may_have_been_meant(key, hint):
    message = refusal(TINY, f"{key}=4")
    assert hint in message and key.split(".")[0] in message


def test_an_unknown_key_of_the_file_names_the_file_and_a_missing_key_says_what_it_is_for(write):
    path = write("rollout: {groupsize: 4}\n")
    assert refusal(path) == f"{path}: rollout.groupsize: unknown key; did you mean group_size?"
    assert "unknown key" in refusal(write("optim: {1: 2}\n"))
    assert "train.steps: missing; set it (number of steps; a step is one rollout" in refusal(
        write("", "model: {path: m}\ntrain: {}\n")
    )
    assert "model: missing" in refusal(write("", "train: {steps: 1}\n"))


# ------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=3.0", "train.steps: must be a whole number, not 3.0"),
        ("train.steps=true", "train.steps: must be a whole number, not true"),
        ("train.steps=null", "train.steps: must be a whole number, not nothing"),
        ("optim.lr=nan", "optim.lr: must be a number, not 'nan'"),
        ("optim.lr=1e999", "optim.lr: must be a finite number, not inf"),
        ("model.recompute=yes", "model.recompute: must be true or false, not 'yes'"),
        ("model.path=", "model.path: must be text that is not empty, not ''"),
        ("lora.targets=linear_qkv", "lora.targets: must be a list such as [a, b], not 'linear_qkv'"),
        ("lora.targets=[linear_qkvv]", "lora.targets[0]: must be 'linear_qkv', 'linear_proj'"),
        ("train.profile_steps=[0]", "train.profile_steps[0]: must be 1 or more, not 0"),
        ("train.completions_logged=some", "must be 'all' or a number of questions, 0 or more, not 'some'"),
        ("train.completions_logged=-1", "must be 'all' or a number of questions, 0 or more, not -1"),
        ("train.completions_logged=true", "must be 'all' or a number of questions, 0 or more, not true"),
        ("train.completions_logged=1.5", "must be 'all' or a number of questions, 0 or more, not 1.5"),
        ("train.trackers=[tensorbord]", "train.trackers[0]: must be 'tensorboard', 'wandb' or 'swanlab'"),
        ("lora.targets=[]", "lora.targets: must be a list of 1 or more values, not []"),
        ("optim.betas=[0.9]", "optim.betas[1]: missing"),
        ("optim.betas=[0.9, 1]", "optim.betas[1]: must be less than 1.0, not 1"),
        ("loss.kl=k4", "loss.kl: must be 'none', 'k1', 'k2'"),
        ("rollout.group_size=1", "rollout.group_size: must be 2 or more, not 1"),
        ("rollout.temperature=0", "rollout.temperature: must be more than 0.0, not 0"),
        ("tiny_model.head_dim=15", "tiny_model.head_dim: must be a multiple of 2, not 15"),
        ("optim=3", "optim: is a section, not a key; write optim.key=value"),
        ("train.steps", "override 'train.steps': not an override; write section.key=value"),
        ("data.instruction=End with #### 5", "YAML would drop the text after ' #' as a comment"),
        ("a\udcff.b=1", "not an override; write section.key=value"),
        (f"name={'n' * 300}", "name: must be text of at most 150 characters"),
        ("reward.function=own.py", "reward.function: must be FILE.py:NAME, not 'own.py'"),
        ("eval.sets=a.jsonl", "eval.sets: must be {NAME: VALUE, ...}, not 'a.jsonl'"),
        ("data.source=gsm8k", "data.train_path: missing; give a .jsonl, .json or .parquet file for data.source gsm8k"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_what_is_needed(override, expected):
    assert expected in refusal(TINY, override)


def test_a_list_of_wrong_members_is_not_called_too_short_as_well():
    assert refusal(TINY, "aqn.targets=[norms, biases]").count("must be") == 2


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


# ------------------------------------------------------------------------------------------------------------- files


FILES = ("data.source=gsm8k", "data.train_path=a.jsonl", "data.test_path=b.jsonl")
PATHS = {  # key -> the other overrides with which it is read
    "model.path": ("tiny_model.seed=0",), "train.out_dir": (), "train.resume": (),
    "data.train_path": FILES, "data.test_path": FILES, "data.few_shot_path": FILES, "eval.sets": (),
    "reward.function": (), "loss.kind": (), "loss.advantage": (), "loss.teacher": (),
    "rollout.environment": ("parallel.timeout_seconds=600",),
}  # fmt: skip
FUNCTIONS = ("reward.function", "loss.kind", "loss.advantage", "rollout.environment")  # FILE.py:NAME


def given(key: str, path: str) -> str:
    """A value of ``key`` with this path in it, and for a function its name."""
    name = ":f" if key in FUNCTIONS else ""
    return f"{{more: [a, '{path}']}}" if key == "eval.sets" else f"'{path}{name}'"


def value_of(cfg: Config, key: str) -> str:
    section, name = key.split(".")
    value = getattr(getattr(cfg, section), name)
    return value["more"][1] if key == "eval.sets" else value.removesuffix(":f")


@pytest.mark.parametrize("key", PATHS)
def test_a_path_is_read_as_a_shell_user_writes_it_and_recorded_so(key: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path, expanded in (("~/x.py", f"{tmp_path}/x.py"), ("x~.py", "x~.py"), ("./~/x.py", "./~/x.py")):
        cfg = load_config("configs/tiny_cpu.yaml", [*PATHS[key], f"{key}={given(key, path)}"])
        assert value_of(cfg, key) == expanded
        text = to_yaml(cfg)
        assert path in text and str(tmp_path) not in text
        (tmp_path / "again.yaml").write_text(text)
        assert load_config(tmp_path / "again.yaml") == cfg
    for path in ("$HOME/x.py", "${HOME}/x.py", "${oc.env:HOME}/x.py", "a/$x.py", "~no_such_user_/x.py"):
        with pytest.raises(InputError, match=rf"{key}.*: must be a path without shell variables .*not ") as caught:
            load_config("configs/tiny_cpu.yaml", [*PATHS[key], f"{key}={given(key, path)}"])
        assert path in str(caught.value) and str(tmp_path) not in str(caught.value)
    (tmp_path / "a$b.py").touch()
    existing = f"{key}={given(key, f'{tmp_path}/a$b.py')}"
    assert value_of(load_config("configs/tiny_cpu.yaml", [*PATHS[key], existing]), key) == f"{tmp_path}/a$b.py"


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (preflight.main, ["CONFIG", "--values"]),
        (preflight.main, ["configs/tiny_cpu.yaml", "--calibrate", "FOLDER/t.jsonl"]),
        (export.main, ["FOLDER/run", "--merged", "m"]),
        (export.main, ["out/run", "--merged", "FOLDER"]),
        (export.main, ["out/run", "--adapter", "FOLDER"]),
        (report.main, ["show", "FOLDER/run"]),
        (report.main, ["compare", "FOLDER/run", "FOLDER/run"]),
        (report.main, ["--results", "FOLDER/run", "rerun", "x"]),
        (sweep.main, ["CONFIG", "--list"]),
    ],
)
def test_a_path_of_an_option_is_expanded_and_a_variable_in_it_is_refused(
    main, arguments: list[str], tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "full").touch()

    def said(folder: str) -> tuple[int, str]:
        typed = [text.replace("FOLDER", folder).replace("CONFIG", f"{folder}/c.yaml") for text in arguments]
        try:
            code = main(typed)
        except SystemExit as ended:  # of argparse
            code = ended.code
        return code, capsys.readouterr().err

    assert said("~")[0] == 2 and said("~")[1] == said(str(tmp_path))[1]  # the same message as for the expanded path
    code, error = said("$HOME")
    assert code == 2 and "not '$HOME" in error and "a path without shell variables" in error


def test_only_the_configuration_is_required(capsys: pytest.CaptureFixture) -> None:
    parser = config.command_line("train_grpo.py", "About.")
    with pytest.raises(SystemExit):
        parser.parse_intermixed_args([])
    assert capsys.readouterr().err.endswith("the following arguments are required: config\n")
    assert parser.parse_intermixed_args(["a.yaml"]).overrides == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "must be a mapping of sections, not nothing"),
        (b"train:\n  steps: 1\n  steps: 2\n", "line 3: not valid YAML: key 'steps' given twice"),
        (b"a: !!python/object:os.system {}\n", "line 1: not valid YAML"),
        (b"a: *nowhere\n", "line 1: not valid YAML: found undefined alias"),
        (b"a: \xff\xfe\n", "not UTF-8 text at byte 3"),
        (b"[" * 5000, "not valid YAML: maximum recursion"),
        (b"eval:\n", "eval: must be a mapping of keys, not nothing"),
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
    "rollout.staleness",
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
        "train.completions_logged": 3,
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


def test_a_difference_is_every_key_but_those_that_a_resumed_run_may_change():
    cfg = load_config(TINY)
    values = other_values(cfg)
    assert len(values) > 70
    for key, value in values.items():
        new = load_config(TINY, [f"{key}={value}"])
        assert new != cfg, key
        changed = config.changed_keys(config.to_dict(cfg), config.to_dict(new))
        assert (changed == []) == (key in config.MAY_CHANGE), key
        if changed:
            assert any(line.startswith(f"{key}: ") and " -> " in line for line in changed)
    same = load_config(TINY, ["optim.lr=0.001", "lora.alpha=32.0"])
    assert config.changed_keys(config.to_dict(same), config.to_dict(cfg)) == []
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == "note: loss.kl_coef: has no effect because loss.kl is none\n"
    assert yaml.safe_load(done.stdout)["loss"]["kl"] == "none"
    assert "  'off': [entropy]\n" in done.stdout  # to YAML 1.1 the bare word is a boolean


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
    assert (cfg.merging is Merging.NOWHERE, cfg.merging >= Merging.PASSES) == (apart, merged)


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


# ---------------------------------------------------------------------------------------------------------------- rules
# What a well-typed configuration may still get wrong: idle keys, contradictions, layouts; and the files we ship.
#
# Refusals of layouts use the real sizes of Qwen3-30B-A3B and Qwen1.5-MoE-A2.7B. No weights, no torch, no processes.

QWEN3_30B_A3B = hf_config.parse(published.QWEN3_30B_A3B)
QWEN15_MOE = hf_config.parse(published.QWEN15_MOE)


# ------------------------------------------------------------------------------------------------ the files we ship


def test_a_key_of_an_older_version_is_named_with_what_to_do(tmp_path):
    assert refusal(TINY, "parallel.pipeline=2") == (
        "override parallel.pipeline: is no longer a key, because its value is always 1; remove it"
    )
    assert refusal(TINY, "checks.truncated=warn") == (
        "override checks.truncated: is no longer a key; list truncated in checks.warn or checks.off, or in "
        "neither to let it stop the run"
    )
    for value in (0, 4):
        assert refusal(TINY, f"rollout.ranks={value}") == (
            "override rollout.ranks: is no longer a key; remove it, because every rank trains "
            "and samples (rollout.staleness=1 still samples with the policy of one step ago, which shows what "
            "sampling ahead costs in learning)"
        )
    cfg = load_config(TINY)
    older = config.to_dict(cfg)
    older["train"]["tensorboard"] = True
    older["checks"] = {"logp_gap": "warn", "noise": "stop", "surprise": "off"}
    new = load_config(TINY, ["train.trackers=[wandb]", "train.profile_steps=[2]"])
    assert config.changes_at_resume(older, config.to_dict(new)) == ([], [])
    assert config.changed_keys(older, config.to_dict(new)) == []
    older["optim"] |= {"min_lr_ratio": 0.1}
    older["rollout"] |= {"round_bits": 0, "ranks": 0}
    assert config.changed_keys(older, config.to_dict(cfg)) == []
    older["train"], older["checks"] = config.to_dict(cfg)["train"], {}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    assert config.load_recorded(tmp_path / "config.yaml") == cfg
    older["tiny_model"] |= {"words_per_batch": 32}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    with pytest.raises(InputError, match="tiny_model.words_per_batch: is no longer a key"):
        config.load_recorded(tmp_path / "config.yaml")
    assert "tiny_model.words_per_batch: 32 -> nothing" in config.changed_keys(older, config.to_dict(cfg), set())
    del older["tiny_model"]["words_per_batch"], older["loss"]["aggregate"]  # a key that the older version did not have
    assert config.changed_keys(older, config.to_dict(cfg)) == []
    assert config.changed_keys(older, config.to_dict(load_config(TINY, ["loss.aggregate=dr-grpo"]))) == [
        "loss.aggregate: 'token-mean' -> 'dr-grpo'"
    ]


def test_a_name_that_no_check_has_is_refused_with_the_nearest_one():
    message = "checks.warn, checks.off: there is no check {!r}; did you mean {}"
    assert refusal(TINY, "checks.warn=[truncatd, entropy]") == message.format("truncatd", "truncated?")
    assert refusal(TINY, "checks.off=[all]").startswith(message.format("all", ""))
    assert load_config(TINY, ["checks.off=[truncated]"]).checks.stops("truncated") is False


# -------------------------------------------------------------------------------------------- keys that are not read


RANDOM_WEIGHTS = "tiny_model: {architecture: qwen3_moe, warm_start_steps: 0, %s}"
IDLE_CASES = [
    # (selectors, key, value, reason)
    ("loss: {kl: none, %s}", "kl_coef", "1e-3", "loss.kl is none"),
    ("loss: {%s}", "importance_clip", "2", "loss.importance is none"),
    ("eval: {samples: 0, %s}", "temperature", "1", "eval.samples is 0"),
    ("lora: {targets: [linear_qkv, router], %s}", "expert_rank", "4", "neither linear_fc1 nor linear_fc2"),
    (RANDOM_WEIGHTS, "drills_per_batch", "160", "warm_start_steps is 0"),
    ("train: {steps: 100, checkpoint_every: 0, %s}", "keep_last", "2", "train.checkpoint_every is 0"),
    ("data: {source: arithmetic, %s}", "train_path", "a.jsonl", "data.source is arithmetic"),
    ("data: {source: file, train_path: [a, c], test_path: b, %s}", "num_test", "8", "data.source reads files"),
    (
        "data: {source: gsm8k, train_path: a, test_path: b, %s}",
        "columns",
        "{question: problem, answer: answer}",
        "data.source is not file",
    ),
]


@pytest.mark.parametrize(("text", "key", "value", "reason"), IDLE_CASES, ids=[case[1] for case in IDLE_CASES])
def test_a_key_that_the_run_would_not_read_is_refused_wherever_it_is_given(tmp_path, text, key, value, reason):
    section = text.split(":")[0]
    base = "".join(line for line in MINIMAL.splitlines(keepends=True) if not line.startswith(section))
    path = tmp_path / "run.yaml"
    path.write_text(base + text % f"{key}: {value}" + "\n")
    message = refusal(path)
    assert message.startswith(f"{path}: {section}.{key}: has no effect because ") and reason in message
    path.write_text(base + text.replace(", %s", "").replace("%s", "") + "\n")
    load_config(path)
    assert reason in refusal(path, f"{section}.{key}={value}")


def test_a_key_of_the_file_that_an_override_makes_idle_is_noted_and_takes_its_default():
    cfg, notes = resolve_config(TINY, ["loss.kl=none", "lora.targets=[linear_qkv]"])
    assert notes == [
        "lora.expert_rank: has no effect because lora.targets has neither linear_fc1 nor linear_fc2",
        "loss.kl_coef: has no effect because loss.kl is none",
    ]
    assert "kl_coef" not in config.to_dict(cfg)["loss"]
    cfg, notes = resolve_config(
        TINY, ["train.steps=30", "train.steps=40", "loss.importance_clip=3", "loss.importance=token"]
    )
    assert (cfg.train.steps, cfg.loss.importance_clip) == (40, 3)
    assert notes == ["train.steps: given twice on the command line; the last value counts"]
    # The warm start reads the operands.
    _, notes = resolve_config(TINY, ["data.source=gsm8k", "data.train_path=a", "data.test_path=b"])
    assert [note.split(":")[0] for note in notes] == ["data.num_test", "data.num_train"]
    cfg, notes = resolve_config(
        TINY, [*("data.source=gsm8k", "data.train_path=a", "data.test_path=b"), "data.num_train=99"]
    )
    assert cfg.data.num_train == 99 and [note.split(":")[0] for note in notes] == ["data.num_test"]
    assert "loss.kl_coef: has no effect" in refusal(TINY, "loss.kl=none", "loss.kl_coef=0.1")
    cfg, notes = resolve_config(TINY, ["loss.kl_coef:=0.1", "loss.kl=none", "train.steps:=30", "train.steps=40"])
    assert (cfg.train.steps, notes) == (40, ["loss.kl_coef: has no effect because loss.kl is none"])
    assert load_config(TINY, ["loss.kl_coef:=0.1"]).loss.kl_coef == 0.1


def test_a_dotted_key_reaches_a_member_of_an_option_and_leaves_its_others():
    cfg = load_config(
        TINY,
        [
            "data.chat_template_kwargs.enable_thinking=false",
            "data.chat_template_kwargs.budget=3",
            "reward.overlong.buffer=4",
            "reward.overlong.penalty=0.5",
            "eval.sets.math-500=b.jsonl",
            "data.source=file",
            "data.train_path=a",
            "data.test_path=b",
            "data.columns.question=problem",
        ],
    )
    assert cfg.data.chat_template_kwargs == {"enable_thinking": False, "budget": 3}
    assert (cfg.reward.overlong.buffer, cfg.reward.overlong.penalty) == (4, 0.5)
    assert cfg.data.columns == {"question": "problem", "answer": "answer"} and list(cfg.eval.sets) == ["math-500"]
    assert "override data.columns: has no effect" in refusal(TINY, "data.columns.question=problem")
    assert "reward.overlong.bufer: unknown key; did you mean buffer?" in refusal(TINY, "reward.overlong.bufer=4")
    for unknown in ("data.nothing.x=1", "nothing.x.y=1"):
        assert "unknown key" in refusal(TINY, unknown)
    assert "data.source: must be 'arithmetic', 'gsm8k'" in refusal(TINY, "data.source.x=1")


def test_the_tiny_model_can_be_left_out_but_not_made_by_accident():
    assert load_config(TINY, ["tiny_model=null"]).tiny_model is None
    assert "tiny_model.architecture: missing" in refusal(ROOT / "configs" / "qwen3.yaml", "tiny_model.seed=1")


# ---------------------------------------------------------------------------------------- values that contradict


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["optim.prompts_per_update=12"],
            "12 does not divide rollout.prompts_per_step (32); the nearest values that do: 8, 16",
        ),
        (
            ["rollout.max_new_tokens=8192"],
            "8256 tokens (data.max_prompt_tokens 64 + rollout.max_new_tokens 8192); set it to at least 8256",
        ),
        (["loss.importance=icepop", "loss.importance_low=2"], "loss.importance_low: 2.0 must be below"),
        (["loss.kl_coef=0"], "set loss.kl to none"),
        (["loss.advantage=zero"], "loss.advantage: zero teaches nothing by itself; set loss.teacher or another"),
        (["loss.teacher=a", "loss.skip_equal_groups=true"], "loss.skip_equal_groups: groups of equal reward still"),
        (["loss.teacher=a", "reward.permute=true"], "reward.permute: loss.teacher can raise accuracy although rewards"),
        (
            ["loss.teacher=a", "loss.advantage=zero", "rollout.dynamic_rounds=1"],
            "rollout.dynamic_rounds: with loss.advantage zero, groups of equal reward teach as much as others; set 0",
        ),
        (["loss.teacher_coef=2"], "loss.teacher_coef: has no effect because loss.teacher is not set"),
        (["loss.teacher=''"], "loss.teacher: must be text that is not empty, not ''"),
        (["loss.teacher=a", "loss.teacher_coef=0"], "override loss.teacher_coef: must be more than 0.0, not 0"),
        (["data.source=gsm8k", "data.train_path=a"], "data.test_path: missing"),
        (
            ["data.source=file", "data.train_path=a"],
            "data.test_path: missing; give a .jsonl, .json or .parquet file for data.source file",
        ),
        (
            ["data.source=file", "data.columns={question: a}"],
            "data.columns: must be {question: NAME, answer: NAME}, not {'question': 'a'}",
        ),
        (["data.train_path=[a, 5]"], "data.train_path: must be a path or a list of paths, not ['a', 5]"),
        (["eval.sets={math: []}"], "eval.sets.math: must be a path or a list of paths, not []"),
        (["eval.sets={a/b: c.jsonl, math: ''}"], "eval.sets: found a/b: 'c.jsonl', math: ''; use names of letters"),
        (["data.num_train=16"], "rollout.prompts_per_step: 32 exceeds data.num_train 16"),
        (["eval.num_questions=2000"], "eval.num_questions: 2000 exceeds data.num_test 1024"),
        (["tiny_model.teacher_right=0.5"], "tiny_model.teacher_right: 0.5 + teacher_wrong_operation 0.55 exceeds 1"),
        (["data.num_train=16", "loss.kl_coef=0"], "exceeds data.num_train 16; loss.kl_coef"),
        (
            ["train.profile_steps=[1, 120, 121]"],
            "train.profile_steps: found [121]; list steps from 1 to train.steps, which is 120",
        ),
        (["aqn.schedule=qerl", "aqn.num_stages=1"], "aqn.num_stages: 1 over 120 steps has no noisy stage"),
    ],
)
def test_values_that_cannot_work_together_are_refused_with_their_numbers(overrides, expected):
    assert expected in refusal(TINY, *overrides)


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("arch", "world", "changes", "expected"),
    [
        (
            QWEN3_30B_A3B,
            16,
            "parallel.tensor=3",
            "parallel.tensor: 3 does not divide the 4 key/value heads; the nearest that do: 2, 4",
        ),
        (
            QWEN3_30B_A3B,
            6,
            "parallel.tensor=4",
            "parallel.tensor: 4 does not divide the 6 ranks; the nearest that do: 2",
        ),
        (
            QWEN3_30B_A3B,
            12,
            "parallel.expert=3",
            "parallel.expert: 3 does not divide the 128 experts; the nearest that do: 2, 4",
        ),
        (
            QWEN3_30B_A3B,
            12,
            "parallel.expert=8",
            "parallel.expert: 8 does not divide the 12 ranks; the nearest that do: 4",
        ),
        (
            QWEN15_MOE,
            16,
            "parallel.expert=16",
            "parallel.expert: 16 does not divide the 60 experts; the nearest that do: 4",
        ),
        (
            dataclasses.replace(QWEN15_MOE, shared_expert_ffn_size=5630),
            16,
            "parallel.tensor=4",
            "parallel.tensor: 4 does not divide the 5630 columns of the shared expert; the nearest that do: 2",
        ),
        (
            dataclasses.replace(QWEN15_MOE, vocab_size=151937),
            16,
            "parallel.tensor=4",
            "parallel.tensor: 4 does not divide the 151937 tokens of the vocabulary; the nearest that do: 1",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, dense_ffn_size=6142, moe_layers=(False,) + (True,) * 47),
            16,
            "parallel.tensor=4",
            "parallel.tensor: 4 does not divide the 6142 columns of a dense layer; the nearest that do: 2",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, max_positions=1024),
            16,
            "",
            "data.max_prompt_tokens: 512 + rollout.max_new_tokens 1536 = 2048 exceeds the model's 1024 positions",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, hidden_size=80),
            16,
            "model.quantisation=int4",
            "int4 cannot store hidden_size 80, no multiple of 32; set it to none",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, expert_ffn_size=48),
            16,
            "model.quantisation=int4",
            "int4 cannot store moe_intermediate_size 48, no multiple of 32; set it to none",
        ),
    ],
)
def test_an_impossible_layout_is_refused_with_numbers_and_the_nearest_that_works(arch, world, changes, expected):
    whole = ["parallel.tensor=1", "parallel.expert=1", "rollout.expert_parallel=false"]
    cfg = load_config(ROOT / "configs" / "qwen3.yaml", [*whole, *changes.split()])
    with pytest.raises(InputError) as caught:
        refuse_first(trainer_problems(cfg, arch, world))
    assert str(caught.value).endswith(expected) or str(caught.value).startswith(expected)


# ------------------------------------------------------------------------------------------------ shards in common


SHARED = ["parallel.tensor=4", "rollout.tensor=4", "rollout.expert_parallel=true"]
STREAMED = "or set rollout.expert_parallel to false, which pushes whole tensors"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["device=cpu"], "rollout.expert_parallel: vLLM packs its weights on device cpu; use npu"),
        (
            ["rollout.tensor=2"],
            "rollout.tensor: 2 splits attention differently than parallel.tensor 4, but rollout.expert_parallel needs "
            "equal shards; set both to the same number",
        ),
        (
            ["rollout.engine=torch"],
            "override rollout.expert_parallel: has no effect because rollout.engine is not vllm",
        ),
    ],
)
def test_what_cannot_share_shards_whatever_the_model_is_refused(overrides, expected):
    assert expected in refusal(ROOT / "configs" / "qwen3.yaml", *SHARED, *overrides)


@pytest.mark.parametrize(
    ("arch", "world", "overrides", "expected"),
    [
        (QWEN3_30B_A3B, 16, [], None),
        (QWEN15_MOE, 12, ["parallel.expert=12"], None),
        (
            QWEN15_MOE,
            16,
            ["parallel.expert=1"],
            "rollout.expert_parallel: 60 experts cannot be divided evenly among all 16 ranks; "
            "use one of the nearest numbers of ranks that work (12, 20),",
        ),
        (
            QWEN3_30B_A3B,
            16,
            ["parallel.expert=4"],
            "parallel.expert: 4, but rollout.expert_parallel spreads vLLM's experts over all 16 ranks; set it to 16,",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, vocab_size=151940),
            16,
            [],
            "rollout.expert_parallel: vLLM pads a vocabulary of 151940 to a multiple of 64 before it splits it, but "
            "the trainer does not; use a model whose vocabulary is a multiple,",
        ),
        (QWEN15_MOE, 12, ["parallel.expert=12", "aqn.schedule=constant"], None),
        (QWEN3_30B_A3B, 16, ["aqn.schedule=constant"], None),
    ],
)
def test_a_model_whose_shards_would_differ_is_refused_with_what_would_do(arch, world, overrides, expected):
    cfg = load_config(ROOT / "configs" / "qwen3.yaml", [*SHARED, *overrides])
    if expected is None:
        refuse_first(trainer_problems(cfg, arch, world))
        return
    with pytest.raises(InputError) as caught:
        refuse_first(trainer_problems(cfg, arch, world))
    assert str(caught.value) == f"{expected} {STREAMED}"


# ---------------------------------------------------------------------------------------------------------- config.json

REAL = {
    "Qwen3-30B-A3B": (published.QWEN3_30B_A3B, 30_532_122_624),
    "Qwen1.5-MoE-A2.7B": (published.QWEN15_MOE, 14_315_784_192),
}


@pytest.fixture(scope="module", params=REAL)
def real(request) -> tuple[dict, int]:
    return REAL[request.param]


# ------------------------------------------------------------------------------------------------ what is accepted


def test_transformers_counts_the_same_parameters_and_shapes(real):
    """Built on the meta device, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw, parameters = real
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    shapes = tensor_shapes(hf_config.parse(raw))
    for name, parameter in model.named_parameters():
        if ".mlp.experts." not in name:  # fused in transformers 5's memory, apart in files
            assert shapes.pop(name) == tuple(parameter.shape), name
    assert all(".mlp.experts." in name for name in shapes)


def test_every_field_of_a_real_config_is_read():
    arch = hf_config.parse(published.QWEN3_30B_A3B)
    assert arch == Architecture(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        dense_ffn_size=6144,
        expert_ffn_size=768,
        shared_expert_ffn_size=0,
        num_experts=128,
        experts_per_token=8,
        norm_topk_prob=True,
        moe_layers=(True,) * 48,
        qkv_bias=False,
        tied_head=False,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        max_positions=262_144,
    )
    assert arch.qkv_size == 32 * 128 + 2 * 4 * 128
    arch = hf_config.parse(published.QWEN15_MOE)
    assert (arch.head_dim, arch.shared_expert_ffn_size, arch.qkv_bias, arch.qk_norm) == (128, 5632, True, "")
    assert (arch.num_experts, arch.experts_per_token, arch.norm_topk_prob) == (60, 4, False)


def test_what_transformers_5_writes_is_the_same_architecture_and_absent_keys_mean_what_it_means(real, tmp_path):
    """rope_parameters for rope_theta, num_local_experts for Qwen3MoE's num_experts, layer_types, dtype."""
    from transformers import AutoConfig

    raw, _ = real
    keys = {"rope_theta", "tie_word_embeddings", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "qkv_bias"}
    for given in (raw, {name: value for name, value in raw.items() if name not in keys}):
        AutoConfig.for_model(**given).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert "rope_parameters" in written and "rope_theta" not in written
        assert hf_config.parse(written | {"architectures": raw["architectures"]}) == hf_config.parse(given)


@pytest.mark.parametrize(
    ("changes", "moe"),
    [
        ({}, "MMMMMMMM"),
        ({"decoder_sparse_step": 2}, "dMdMdMdM"),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, "ddMddddd"),
        ({"mlp_only_layers": [0, 7]}, "dMMMMMMd"),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, "MMMMMMMM"),
    ],
)
def test_which_layers_are_moe(changes, moe):
    arch = hf_config.parse(published.QWEN15_MOE | {"num_hidden_layers": 8} | changes)
    assert "".join("M" if is_moe else "d" for is_moe in arch.moe_layers) == moe


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED = [  # (config to start from, what differs, what the line says)
    (
        published.QWEN3_30B_A3B,
        {"model_type": "llama"},
        "model_type 'llama' is not supported; use one of qwen3_moe, qwen2_moe",
    ),
    (published.QWEN3_30B_A3B, {"architectures": ["Qwen2MoeForCausalLM"]}, "only ['Qwen3MoeForCausalLM'] is"),
    (published.QWEN3_30B_A3B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu' is"),
    (published.QWEN3_30B_A3B, {"attention_bias": True}, "attention_bias = true is not supported"),
    (published.QWEN3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
    (published.QWEN15_MOE, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (
        published.QWEN3_30B_A3B,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope scaling = 'yarn' is not supported",
    ),
    (published.QWEN3_30B_A3B, {"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope scaling = 'yarn'"),
    (
        published.QWEN3_30B_A3B,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn"}},
        "rope scaling = 'yarn' is not supported",
    ),
    (published.QWEN3_30B_A3B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    (published.QWEN3_30B_A3B, {"rope_theta": "1e6"}, "rope_theta: must be a positive number"),
    (
        published.QWEN3_30B_A3B,
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config: found {'quant_method': 'fp8'}, a quantised checkpoint; use one in bf16, ",
    ),
    (
        published.QWEN3_30B_A3B,
        {"num_key_value_heads": 5},
        "num_attention_heads 32 is not a multiple of num_key_value_heads 5",
    ),
    (published.QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds num_experts 128"),
    (published.QWEN3_30B_A3B, {"num_experts": None}, "num_experts is missing"),
    (published.QWEN3_30B_A3B, {"num_local_experts": 64}, "num_local_experts 64 and num_experts 128 differ"),
    (published.QWEN3_30B_A3B, {"num_experts_per_tok": 1}, "norm_topk_prob"),
    (published.QWEN3_30B_A3B, {"hidden_size": 2048.0}, "hidden_size: must be a positive int, not 2048.0"),
    (published.QWEN3_30B_A3B, {"vocab_size": -1}, "vocab_size: must be a positive int, not -1"),
    (published.QWEN3_30B_A3B, {"rms_norm_eps": math.nan}, "rms_norm_eps: must be a positive float"),
    (published.QWEN3_30B_A3B, {"head_dim": 127}, "head_dim"),
    (published.QWEN3_30B_A3B, {"norm_topk_prob": "true"}, "norm_topk_prob: must be a bool, not 'true'"),
    (published.QWEN15_MOE, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    (
        published.QWEN15_MOE,
        {"mlp_only_layers": [24]},
        "mlp_only_layers: there is no layer 24; list layers from 0 to 23",
    ),
]


@pytest.mark.parametrize(("raw", "changes", "line"), REFUSED, ids=[str(changes) for _, changes, _ in REFUSED])
def test_options_that_are_not_computed_are_refused(raw, changes, line):
    with pytest.raises(InputError) as caught:
        hf_config.parse(raw | changes, "somewhere/config.json")
    assert line in str(caught.value)
    assert str(caught.value).startswith("somewhere/config.json: ")
    assert "\n" not in str(caught.value)
