"""The parts of a prompt before the question: a system turn, worked examples, and options of the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prompts import data, make_model_dir, write_jsonl

import data_gsm8k
from input_files import InputError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    return data_gsm8k.load_tokenizer(model_dir)


EXAMPLES = [("What is 2 + 2?", "2 + 2 = 4\n#### 4"), ("What is 3 - 1?", "3 - 1 = 2\n#### 2")]
# As hybrid models do it: without thoughts wanted, the answer begins with an empty thought.
HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def test_system_turn_and_worked_examples_come_before_the_question(tokenizer: Any, tmp_path: Path) -> None:
    """As earlier turns of the chat, each question with the instruction; a file of its own, and a run's few lines."""
    rows = [{"question": question, "answer": answer} for question, answer in EXAMPLES]
    shots = str(write_jsonl(tmp_path / "shots.jsonl", rows))
    asked = str(write_jsonl(tmp_path / "rows.jsonl", [{"question": "What is 5 + 1?", "answer": "#### 6"}]))
    section = data(source="gsm8k", train_path=asked, few_shot_path=shots, system="Be brief.", instruction="Go.")
    loaded = data_gsm8k.load(section, "train", tokenizer, seed=0)
    assert tokenizer.decode(loaded[0].prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2? Go.<|im_end|>\n<|im_start|>assistant\n2 + 2 = 4\n#### 4<|im_end|>\n"
        "<|im_start|>user\nWhat is 3 - 1? Go.<|im_end|>\n<|im_start|>assistant\n3 - 1 = 2\n#### 2<|im_end|>\n"
        "<|im_start|>user\nWhat is 5 + 1? Go.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "2 worked examples before each" in loaded.description
    overlap = data(source="gsm8k", train_path=shots, few_shot_path=shots)
    with pytest.raises(InputError, match=r"data.few_shot_path: .*holds 'What is 2 \+ 2\?', which is asked as well"):
        data_gsm8k.load(overlap, "train", tokenizer, seed=0)


def test_without_a_chat_template_examples_follow_the_plain_one(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    text = tokenizer.decode(data_gsm8k.prompt_ids("1+1?", tokenizer, data(system="Be brief."), EXAMPLES[:1]))
    assert text == "Be brief.\n\nQuestion: What is 2 + 2?\nAnswer: 2 + 2 = 4\n#### 4\n\nQuestion: 1+1?\nAnswer:"
    with pytest.raises(InputError, match="found enable_thinking; needed: none, this tokenizer has no chat template"):
        data_gsm8k.prompt_ids("1+1?", tokenizer, data(chat_template_kwargs={"enable_thinking": False}))


def test_chat_template_kwargs_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = HYBRID
    end = "<|im_start|>assistant\n"
    for kwargs, tail in (({}, end), ({"enable_thinking": False}, end + "<think>\n\n</think>\n\n")):
        text = tokenizer.decode(data_gsm8k.prompt_ids("1+1?", tokenizer, data(chat_template_kwargs=kwargs)))
        assert text == f"<|im_start|>user\n1+1?<|im_end|>\n{tail}"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_thinkin": False}, r"data.chat_template_kwargs.enable_thinkin: the chat template .* does not read it"),
        ({"messages": []}, "the chat template fails"),
    ],
    ids=["a misspelled name", "a name of transformers"],
)
def test_template_kwargs_without_effect_are_refused(kwargs: dict, message: str, tokenizer: Any) -> None:
    tokenizer.chat_template = HYBRID
    with pytest.raises(InputError, match=message):
        data_gsm8k.prompt_ids("1+1?", tokenizer, data(chat_template_kwargs=kwargs))


def test_a_template_that_leaves_the_system_turn_out_is_refused(tokenizer: Any) -> None:
    """Some models have no system turn, and their templates drop it without a word."""
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="leaves out the text of a system turn, or a part of it: 'Be brief.'"):
        data_gsm8k.prompt_ids("1+1?", tokenizer, data(system="Be brief."))
