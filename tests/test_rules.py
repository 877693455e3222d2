"""What a well-typed configuration may still get wrong: idle keys, contradictions, layouts; and the files we ship.

Refusals of layouts use the real sizes of Qwen3-30B-A3B and Qwen1.5-MoE-A2.7B. No weights, no torch, no processes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import published
import pytest
import yaml
from refused import refusal

from facts.exits import InputError
from inputs import config, hf_config
from inputs.config import load_config, resolve_config
from inputs.rules import refuse_first, trainer_problems

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TINY = ROOT / "configs" / "tiny_cpu.yaml"
MINIMAL = "model: {path: m}\ndata: {source: arithmetic}\ntrain: {steps: 100}\n"
QWEN3_30B_A3B = hf_config.parse(published.QWEN3_30B_A3B)
QWEN15_MOE = hf_config.parse(published.QWEN15_MOE)


# ------------------------------------------------------------------------------------------------ the files we ship


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_file_loads(path):
    load_config(path)


def test_a_key_of_an_older_version_is_named_with_what_to_do(tmp_path):
    assert refusal(TINY, "parallel.pipeline=2") == (
        "override parallel.pipeline: not a key since version 0.2.0, always 1; needed: leave it out"
    )
    assert refusal(TINY, "rollout.round_bits=3") == (
        "override rollout.round_bits: not a key since version 0.2.0, always 0 (the benchmark plants it: "
        "checks/planted_fault.py); needed: leave it out"
    )
    assert refusal(TINY, "train.tensorboard=true") == (
        "override train.tensorboard: not a key since version 0.2.0; needed: train.trackers: [tensorboard] for true, or "
        "leave it out for false"
    )
    assert refusal(TINY, "checks.truncated=warn") == (
        "override checks.truncated: not a key since version 0.2.0; needed: truncated in the list checks.warn or "
        "checks.off, or in neither: then it stops the run"
    )
    cfg = load_config(TINY)
    older = config.to_dict(cfg)
    older["train"]["tensorboard"] = True
    checks, older["checks"] = older["checks"], {"logp_gap": "warn", "noise": "stop", "surprise": "off"}
    new = load_config(TINY, ["train.trackers=[wandb]", "train.profile_steps=[2]"])
    assert config.changes_at_resume(older, config.to_dict(new)) == ([], [])
    assert config.hash_of(older) == config.config_hash(new)
    del older["train"]["tensorboard"]
    older["checks"] = checks
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    assert config.load_recorded(tmp_path / "config.yaml") == cfg
    older["tiny_model"] |= {"words_per_batch": 32}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    with pytest.raises(InputError, match="tiny_model.words_per_batch: not a key since version 0.2.0"):
        config.load_recorded(tmp_path / "config.yaml")
    assert config.changed_keys(older, config.to_dict(cfg), set()) == ["tiny_model.words_per_batch: 32 -> nothing"]
    del older["tiny_model"]["words_per_batch"], older["loss"]["aggregate"]  # a key that the older version did not have
    assert config.changed_keys(older, config.to_dict(cfg), set()) == []
    assert config.changed_keys(older, config.to_dict(load_config(TINY, ["loss.aggregate=dr-grpo"])), set()) == [
        "loss.aggregate: 'token-mean' -> 'dr-grpo'"
    ]


def test_a_name_that_no_check_has_is_refused_with_the_nearest_one():
    message = "checks.warn, checks.off: {!r} is no check; nearest: {}"
    assert refusal(TINY, "checks.warn=[truncatd, entropy]") == message.format("truncatd", "truncated")
    assert refusal(TINY, "checks.off=[all]").startswith(message.format("all", ""))
    assert load_config(TINY, ["checks.off=[truncated]"]).checks.stops("truncated") is False


# -------------------------------------------------------------------------------------------- keys that are not read


RANDOM_WEIGHTS = "tiny_model: {architecture: qwen3_moe, warm_start_steps: 0, %s}"
IDLE_CASES = [
    # (selectors, key, value, reason)
    ("loss: {kl: none, %s}", "kl_coef", "1e-3", "loss.kl is none"),
    ("loss: {%s}", "importance_clip", "2", "loss.importance is none"),
    ("optim: {%s}", "min_lr_ratio", "0.1", "optim.decay is constant"),
    ("eval: {samples: 0, %s}", "temperature", "1", "eval.samples is 0"),
    ("lora: {targets: [linear_qkv, router], %s}", "expert_rank", "4", "neither linear_fc1 nor linear_fc2"),
    (RANDOM_WEIGHTS, "drills_per_batch", "160", "warm_start_steps is 0"),
    ("train: {steps: 100, checkpoint_every: 0, %s}", "keep_last", "2", "train.checkpoint_every is 0"),
    ("data: {source: arithmetic, %s}", "train_path", "a.jsonl", "data.source is arithmetic"),
    ("data: {source: file, train_path: [a, c], test_path: b, %s}", "num_test", "8", "data.source is a file"),
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
    assert message.startswith(f"{path}: {section}.{key}: not read, ") and reason in message
    path.write_text(base + text.replace(", %s", "").replace("%s", "") + "\n")
    load_config(path)
    assert reason in refusal(path, f"{section}.{key}={value}")


def test_a_key_of_the_file_that_an_override_makes_idle_is_noted_and_takes_its_default():
    cfg, notes = resolve_config(TINY, ["loss.kl=none", "lora.targets=[linear_qkv]"])
    assert notes == [
        "lora.expert_rank: not read, lora.targets has neither linear_fc1 nor linear_fc2",
        "loss.kl_coef: not read, loss.kl is none",
    ]
    assert "kl_coef" not in config.to_dict(cfg)["loss"]
    cfg, notes = resolve_config(
        TINY, ["train.steps=30", "train.steps=40", "optim.min_lr_ratio=0.2", "optim.decay=cosine"]
    )
    assert (cfg.train.steps, cfg.optim.min_lr_ratio) == (40, 0.2)
    assert notes == ["train.steps: given twice on the command line, the last one counts"]
    # The warm start reads the operands.
    _, notes = resolve_config(TINY, ["data.source=gsm8k", "data.train_path=a", "data.test_path=b"])
    assert [note.split(":")[0] for note in notes] == ["data.num_test", "data.num_train"]
    cfg, notes = resolve_config(
        TINY, [*("data.source=gsm8k", "data.train_path=a", "data.test_path=b"), "data.num_train=99"]
    )
    assert cfg.data.num_train == 99 and [note.split(":")[0] for note in notes] == ["data.num_test"]
    assert "loss.kl_coef: not read" in refusal(TINY, "loss.kl=none", "loss.kl_coef=0.1")
    cfg, notes = resolve_config(TINY, ["loss.kl_coef:=0.1", "loss.kl=none", "train.steps:=30", "train.steps=40"])
    assert (cfg.train.steps, notes) == (40, ["loss.kl_coef: not read, loss.kl is none"])
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
    assert "override data.columns: not read" in refusal(TINY, "data.columns.question=problem")
    assert "reward.overlong.bufer: unknown key; did you mean buffer?" in refusal(TINY, "reward.overlong.bufer=4")
    for unknown in ("data.nothing.x=1", "data.source.x=1", "nothing.x.y=1"):
        assert "unknown key" in refusal(TINY, unknown)


def test_the_tiny_model_can_be_left_out_but_not_made_by_accident():
    assert load_config(TINY, ["tiny_model=null"]).tiny_model is None
    assert "tiny_model.architecture: missing" in refusal(ROOT / "configs" / "qwen3.yaml", "tiny_model.seed=1")


# ---------------------------------------------------------------------------------------- values that contradict


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optim.prompts_per_update=12"], "12 does not divide rollout.prompts_per_step 32; nearest: 8, 16"),
        (["rollout.max_new_tokens=8192"], "data.max_prompt_tokens 64 + rollout.max_new_tokens 8192 = 8256 tokens"),
        (["loss.importance=icepop", "loss.importance_low=2"], "loss.importance_low: 2.0 is not below"),
        (["loss.kl_coef=0"], "use loss.kl: none"),
        (["data.source=gsm8k", "data.train_path=a"], "data.test_path: missing"),
        (
            ["data.source=file", "data.train_path=a"],
            "data.test_path: missing; data.source file needs a .jsonl, .json or",
        ),
        (
            ["data.source=file", "data.columns={question: a}"],
            "data.columns: found {'question': 'a'}; needed: {question:",
        ),
        (["data.train_path=[a, 5]"], "data.train_path: expected a path or a list of paths, found ['a', 5]"),
        (["eval.sets={math: []}"], "eval.sets.math: expected a path or a list of paths, found []"),
        (["eval.sets={a/b: c.jsonl, math: ''}"], "eval.sets: found a/b: 'c.jsonl', math: ''; needed: names of letters"),
        (["data.num_train=16"], "rollout.prompts_per_step: 32 exceeds data.num_train 16"),
        (["eval.num_questions=2000"], "eval.num_questions: 2000 exceeds data.num_test 1024"),
        (  # 4096 x (2 x 131072 + 3 x 4 x 100 x 200 of experts + 4 x 4 x 100 x 100 of attention)
            [
                "tiny_model.hidden_size=4096",
                "tiny_model.vocab_size=131072",
                "tiny_model.num_layers=4",
                "tiny_model.num_experts=100",
                "tiny_model.expert_width=200",
                "tiny_model.num_heads=100",
                "tiny_model.num_kv_heads=100",
                "tiny_model.head_dim=100",
            ],
            "tiny_model: about 2.7e+09 parameters; needed: at most 1e+09",
        ),
        (["tiny_model.teacher_right=0.5"], "tiny_model.teacher_right: 0.5 + teacher_wrong_operation 0.55 exceeds 1"),
        (["data.num_train=16", "loss.kl_coef=0"], "exceeds data.num_train 16; loss.kl_coef"),
        (
            ["train.profile_steps=[1, 120, 121]"],
            "train.profile_steps: found [121]; needed: 1 to train.steps, which is 120",
        ),
        (["train.trackers=[wandb, wandb]"], "train.trackers: found [wandb, wandb]; needed: each one once"),
        (["aqn.schedule=qerl", "aqn.num_stages=1"], "aqn.num_stages: 1 over 120 steps has no noisy stage"),
    ],
)
def test_values_that_cannot_work_together_are_refused_with_their_numbers(overrides, expected):
    assert expected in refusal(TINY, *overrides)


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("arch", "world", "layout", "expected"),
    [
        (QWEN3_30B_A3B, 16, {"tensor": 3}, "parallel.tensor: 3 does not divide 4 key/value heads; nearest: 2, 4"),
        (QWEN3_30B_A3B, 6, {"tensor": 4}, "parallel.tensor: 4 does not divide 6 ranks; nearest: 2"),
        (QWEN3_30B_A3B, 12, {"expert": 3}, "parallel.expert: 3 does not divide 128 experts; nearest: 2, 4"),
        (QWEN3_30B_A3B, 12, {"expert": 8}, "parallel.expert: 8 does not divide 12 ranks; nearest: 4"),
        (QWEN15_MOE, 16, {"expert": 16}, "parallel.expert: 16 does not divide 60 experts; nearest: 4"),
        (
            dataclasses.replace(QWEN15_MOE, shared_expert_ffn_size=5630),
            16,
            {"tensor": 4},
            "parallel.tensor: 4 does not divide 5630 columns of the shared expert; nearest: 2",
        ),
        (
            dataclasses.replace(QWEN15_MOE, vocab_size=151937),
            16,
            {"tensor": 4},
            "parallel.tensor: 4 does not divide 151937 tokens of the vocabulary; nearest: 1",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, dense_ffn_size=6142, moe_layers=(False,) + (True,) * 47),
            16,
            {"tensor": 4},
            "parallel.tensor: 4 does not divide 6142 columns of a dense layer; nearest: 2",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, max_positions=1024),
            16,
            {},
            "data.max_prompt_tokens: 512 + rollout.max_new_tokens 1536 = 2048 exceeds the model's 1024 positions",
        ),
    ],
)
def test_an_impossible_layout_is_refused_with_numbers_and_the_nearest_that_works(arch, world, layout, expected):
    sizes = {"tensor": 1, "expert": 1} | layout
    layout = [f"parallel.{key}={size}" for key, size in sizes.items()]
    cfg = load_config(ROOT / "configs" / "qwen3.yaml", [*layout, "rollout.expert_parallel=false"])
    with pytest.raises(InputError) as caught:
        refuse_first(trainer_problems(cfg, arch, world))
    assert str(caught.value).endswith(expected) or str(caught.value).startswith(expected)


# ------------------------------------------------------------------------------------------------ shards in common


SHARED = ["parallel.tensor=4", "rollout.tensor=4", "rollout.expert_parallel=true"]
STREAMED = "(or rollout.expert_parallel false, which pushes whole tensors)"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["device=cpu"], "rollout.expert_parallel: device cpu packs vLLM's weights; needed: npu"),
        (
            ["rollout.tensor=2"],
            "rollout.tensor: 2 with rollout.expert_parallel splits attention differently than parallel.tensor 4; "
            "needed: the same",
        ),
        (["rollout.engine=torch"], "override rollout.expert_parallel: not read, rollout.engine is not vllm"),
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
            ["parallel.expert=4"],
            "rollout.expert_parallel: 60 experts cannot be divided evenly among all 16 ranks; nearest: 12, 20 ranks",
        ),
        (
            QWEN3_30B_A3B,
            16,
            ["parallel.expert=4"],
            "parallel.expert: 4, while rollout.expert_parallel spreads vLLM's experts over all 16 ranks; needed: 16",
        ),
        (
            dataclasses.replace(QWEN3_30B_A3B, vocab_size=151940),
            16,
            [],
            "rollout.expert_parallel: vLLM pads a vocabulary of 151940 to a multiple of 64 before it splits it, the "
            "trainer does not; needed: a multiple",
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
