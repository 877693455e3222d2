"""Whatever comes, the readers of configuration and data give a value or one line that names the place (hypothesis).

The inputs are drawn from valid ones by changes, since random text hardly gets beyond the first check. The draws are the
same on every machine and in every run: what fails here fails for everybody.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import breaking
import pyarrow
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from pyarrow import parquet
from tiers import asked, nightly

from facts.architectures import Architecture
from facts.exits import InputError
from inputs import hf_config
from inputs.config import load_config, to_yaml
from inputs.files import one_line
from knobs import Config
from tasks import question_files

steady = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=asked([100, nightly(600)])[-1],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TREE = yaml.safe_load(breaking.CONFIG.replace("MODEL", "m").replace("OUT", "out"))
MODEL = json.loads((Path(__file__).parents[1] / "configs" / "Qwen3-30B-A3B-Instruct-2507.config.json").read_text())
SIZES = draw.sampled_from([-1, 0, 1, 2, 3, 10**4, 10**6, 10**12, 10**30, 0.5, 1e300, True, None, "7", [], {}])
NUMBERS = draw.integers() | draw.floats()
ANSWERS = draw.sampled_from(["#### 3", "#### \u0663", "#### 1e5", "#### -0.5", "#### 3\0", "#### 1 #### 2"])


def nested(leaves):
    """Lists and dictionaries of ``leaves``, and the leaves themselves."""
    leaves |= SIZES | NUMBERS | draw.booleans() | draw.none() | draw.text(max_size=9)

    def more(inner):
        return draw.lists(inner, max_size=3) | draw.dictionaries(draw.text(max_size=5), inner, max_size=3)

    return draw.recursive(leaves, more, max_leaves=6)


ANYTHING, JSON = nested(draw.binary(max_size=4)), nested(ANSWERS)
BYTES = draw.lists(draw.tuples(draw.integers(0, 2**16), draw.binary(max_size=3), draw.integers(0, 3)), max_size=6)


def damaged(content: bytes, changes: list[tuple[int, bytes, int]]) -> bytes:
    """``content`` with some bytes put in place of some others."""
    for place, new, gone in changes:
        place %= len(content) + 1
        content = content[:place] + new + content[place + gone :]
    return content


def read(function, *arguments):
    """What ``function`` returns, or None after a proper refusal."""
    try:
        return function(*arguments)
    except InputError as error:
        assert str(error).strip() and one_line(error).isprintable() and len(one_line(error)) <= 1010
        return error


def refused_by_name(found: object, path: Path) -> bool:
    return isinstance(found, InputError) and str(found).startswith(str(path))


@steady
@given(changes=BYTES)
def test_a_damaged_configuration_is_one_or_is_refused_by_name(changes, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(damaged(yaml.safe_dump(TREE).encode(), changes))
    found = read(load_config, path)
    assert isinstance(found, Config) or path.name in str(found) or found.args[0].split(":")[0].count(".") <= 1


@steady
@given(
    where=draw.sampled_from([(s, k) for s, keys in TREE.items() if isinstance(keys, dict) for k in keys]),
    value=ANYTHING,
)
def test_any_value_of_a_key_is_taken_up_or_refused_with_the_key(where, value, tmp_path: Path) -> None:
    section, key = where
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(TREE | {section: TREE[section] | {key: value}}, allow_unicode=True), "utf-8")
    found = read(load_config, path)
    if isinstance(found, Config):
        again = tmp_path / "again.yaml"
        again.write_text(to_yaml(found), "utf-8")
        assert load_config(again) == found  # what was read is kept whole
    else:
        assert key in str(found) or section in str(found) or path.name in str(found)


@steady
@given(item=draw.text(max_size=20) | draw.builds("train.{}={}".format, draw.text(max_size=8), draw.text(max_size=8)))
def test_any_override_is_taken_up_or_refused(item: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(TREE))
    assert isinstance(read(load_config, path, [item]), Config | InputError)


@steady
@given(key=draw.sampled_from(sorted(MODEL)), value=JSON)
def test_any_value_in_config_json_is_a_model_or_refused_with_the_file(key: str, value, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL | {key: value}))
    found = read(hf_config.read, tmp_path)
    assert isinstance(found, Architecture) or refused_by_name(found, path)


ROW = draw.one_of(
    draw.fixed_dictionaries({"question": JSON, "answer": JSON}),
    draw.fixed_dictionaries({"question": draw.just("2?"), "answer": ANSWERS}),
    draw.fixed_dictionaries({"question": draw.just("2?"), "answer": draw.just("#### 3")}, optional={"more": JSON}),
    draw.builds(
        lambda role, content, answer: {"messages": [{"role": role, "content": content}], "answer": answer},
        draw.just("user") | JSON,
        JSON,
        JSON,
    ),
    draw.builds(
        lambda extra, reward: {
            "prompt": [{"role": "user", "content": "2?"}],
            "extra_info": extra,
            "reward_model": reward,
        },
        JSON,
        JSON | draw.fixed_dictionaries({"ground_truth": JSON}),
    ),
    JSON,
)


def questions_or_refusal(path: Path) -> None:
    found = read(question_files.read, path)
    if isinstance(found, InputError):
        assert refused_by_name(found, path)
    else:
        for row in found[0]:
            assert row.question.strip() and row.question.encode() and question_files.gold_number(row.answer).isascii()
    for columns in ({"question": "question", "answer": "more"}, {"question": "messages", "answer": "answer"}):
        own = read(lambda path, columns=columns: question_files.read(path, columns), path)
        if isinstance(own, InputError):
            assert refused_by_name(own, path)
        else:
            assert all(row.question.encode() and row.gold.encode() and row.gold == row.gold.strip() for row in own[0])


@steady
@given(rows=draw.lists(ROW, min_size=1, max_size=2), changes=BYTES, start=draw.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_any_jsonl_is_questions_or_refused_with_the_file(rows, changes, start, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(start + lines)
    questions_or_refusal(path)
    path.write_bytes(damaged(lines, changes))
    questions_or_refusal(path)


@steady
@given(changes=BYTES, columns=draw.sampled_from(["text", "numbers", "bytes", "none"]))
def test_any_parquet_is_questions_or_refused_with_the_file(changes, columns: str, tmp_path: Path) -> None:
    values = {"text": ["2?"], "numbers": [2], "bytes": [b"\xff"], "none": pyarrow.array([None], pyarrow.string())}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"question": values[columns], "answer": ["#### 3"]}), buffer)
    path = tmp_path / "d.parquet"
    path.write_bytes(damaged(buffer.getvalue(), changes))
    questions_or_refusal(path)
