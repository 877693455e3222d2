"""Questions and their prompts: real GSM8K (gsm8k_files.py) or generated arithmetic in GSM8K's form.

A worked answer ends in `#### N`.  Which questions a step asks is a pure function of (seed, step).  The generated set is
split by the unordered operand pair across operations: no sum of the test set occurs in training, not even as a slip.

    python data_gsm8k.py convert IN OUT     question/answer columns -> chat form; any other form -> question/answer
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import gsm8k_files
from config import derive_seed
from input_files import BAD_INPUT, InputError, check_folder, read_object, refuse_endless, refused, shown
from knobs import Config
from reward_gsm8k import gold_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = ["Tom", "Mia", "Ben", "Eva", "Sam", "Lily", "Max", "Anna"]
ITEMS = ["apples", "pens", "books", "coins", "eggs", "cards", "shells", "stamps"]
TEMPLATES = {
    "add": [
        "{name} has {x} {items} and finds {y} more. How many {items} does {name} have now?",
        "There are {x} {items} in a box. {name} puts in {y} more. How many {items} are in the box?",
        "{name} buys {x} {items} on Monday and {y} {items} on Tuesday. How many {items} did {name} buy?",
    ],
    "sub": [
        "{name} has {x} {items} and gives away {y}. How many {items} are left?",
        "There are {x} {items} in a box. {name} takes out {y}. How many {items} stay in the box?",
        "{name} had {x} {items} and lost {y} of them. How many {items} does {name} have now?",
    ],
}


# ------------------------------------------------------------------------------------------------------------ questions
@dataclass(frozen=True)
class Question:
    question: str
    answer: str  # worked answer, ending in '#### N'
    gold: str  # N, without commas
    prompt: list[int]  # token ids, chat template applied


class Questions(Sequence[Question]):
    """The questions of one split, in file order; `pick` says which of them a step asks."""

    def __init__(self, questions: list[Question], seed: int, dropped: int = 0, description: str = "") -> None:
        assert questions
        self.questions, self.seed, self.dropped = questions, seed, dropped
        self.description = description  # one line: where they come from, the form found, the longest prompt

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]

    def pick(self, step: int, count: int) -> list[Question]:
        """The `count` questions of `step` (from 0); a pure function of (seed, step, count).

        All epochs' permutations are laid end to end and step s takes places s * count to (s + 1) * count: no question
        comes twice within an epoch and none is left out, also where an epoch is no multiple of `count`.
        """
        assert step >= 0 and count > 0
        places = range(step * count, (step + 1) * count)
        orders = {epoch: self._order(epoch) for epoch in {place // len(self) for place in places}}
        return [self.questions[orders[place // len(self)][place % len(self)]] for place in places]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64(derive_seed(self.seed, "epoch", epoch))).permutation(len(self))


def read(cfg: Config, split: str) -> tuple[list[tuple[str, str]], str, str]:
    """(question, worked answer) of every row of `split` ("train" | "test"), where they come from and in what form.

    InputError for any row that cannot be used. Needs no tokenizer, so it works before there is a model.
    """
    assert split in ("train", "test")
    if cfg.data.source == "arithmetic":
        num, low, high = getattr(cfg.data, f"num_{split}"), cfg.data.operand_low, cfg.data.operand_high
        pairs = arithmetic(num, split == "test", cfg.data.seed, low, high)
        return pairs, f"arithmetic ({split})", f"generated, operands {low} to {high}"
    where = getattr(cfg.data, f"{split}_path")
    rows, form = gsm8k_files.read(where)
    return [(question, answer) for question, answer, _ in rows], where, form


def few_shot(cfg: Config, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(question, worked answer) of data.few_shot_path, none without one; InputError if one of ``pairs`` is among them.

    Such a question would be asked with its own answer before it.
    """
    if not (where := cfg.data.few_shot_path):
        return []
    examples = [(question, answer) for question, answer, _ in gsm8k_files.read(where)[0]]
    shown = {_words(question).casefold() for question, _ in examples}
    for question, _ in pairs:
        if _words(question).casefold() in shown:
            raise InputError(
                f"data.few_shot_path: {where} holds {question[:60]!r}, which is asked as well; needed: examples that "
                "are in neither the training nor the held-out questions"
            )
    return examples


def load(cfg: Config, split: str, tokenizer: PreTrainedTokenizerBase) -> Questions:
    """The questions of `split` ("train" | "test") with their prompts; InputError if any of them cannot be used."""
    pairs, where, form = read(cfg, split)
    limit = cfg.data.max_prompt_tokens
    examples = few_shot(cfg, pairs)
    if tokenizer.chat_template:
        where_it_is = f"{tokenizer.name_or_path}: the chat template"
        refuse_endless(lambda: prompt_ids(pairs[0][0], tokenizer, cfg, examples), where_it_is)
    prompts = [prompt_ids(question, tokenizer, cfg, examples) for question, _ in pairs]
    _refuse_equal_prompts([question for question, _ in pairs], prompts, tokenizer)
    lengths = [len(prompt) for prompt in prompts]
    fits = [length <= limit for length in lengths]
    dropped = fits.count(False)
    if dropped and (cfg.data.overlong_prompts == "refuse" or dropped == len(pairs)):
        advice = "raise it" if dropped == len(pairs) else "raise it, or set data.overlong_prompts: drop"
        raise InputError(
            f"{where}: {dropped} of {len(pairs)} prompts are longer than data.max_prompt_tokens = {limit}; the longest "
            f"(question {lengths.index(max(lengths)) + 1}) has {max(lengths)} tokens; {advice}"
        )
    kept = [
        Question(question, answer, gold_answer(answer), prompt)
        for (question, answer), prompt, fit in zip(pairs, prompts, fits, strict=True)
        if fit
    ]
    longest = max(len(question.prompt) for question in kept)
    line = f"{len(kept)} questions from {where} ({form}); longest prompt {longest} of {limit} tokens, dropped {dropped}"
    line += f"; {len(examples)} worked examples before each" if examples else ""
    return Questions(kept, cfg.train.seed, dropped, line)


def _words(text: str) -> str:
    """``text`` with single spaces and one form of each character: a template or a tokenizer may change those."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _refuse_equal_prompts(questions: list[str], prompts: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """InputError if two different questions are the same prompt: all their answers would be compared with one gold."""
    first: dict[tuple[int, ...], str] = {}
    for question, prompt in zip(questions, prompts, strict=True):
        other = first.setdefault(tuple(prompt), question)
        if other != question and _words(other).casefold() != _words(question).casefold():
            raise InputError(
                f"{tokenizer.name_or_path}: {other[:60]!r} and {question[:60]!r} become the same prompt; needed: a "
                "tokenizer that knows the questions' characters"
            )


# ------------------------------------------------------------------------------------------------ tokenizer and prompts
def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a model directory; local files only, no code from the directory is run."""
    folder = Path(model_dir)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory; needed: a model directory with tokenizer.json")
    check_folder(folder)
    files = {path.name for path in folder.iterdir()}
    if "tokenizer.json" not in files and not {"vocab.json", "merges.txt"} <= files:
        raise InputError(f"{folder}: no tokenizer found; needed: tokenizer.json, or vocab.json and merges.txt")
    try:
        if _is_plain(folder / "tokenizer_config.json"):
            # AutoTokenizer would find this class, and import all model code and torch's compiler to do so: a second.
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
        return Tokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json surfaces as a plain Exception from the tokenizers library
        raise InputError(f"{folder}: the tokenizer cannot be loaded: {gsm8k_files.first_line(error)}") from error


def _is_plain(settings: Path) -> bool:
    """Whether the tokenizer is nothing but its tokenizer.json, by its own account."""
    plain = "PreTrainedTokenizerFast"
    return settings.exists() and read_object(settings).get("tokenizer_class") == plain


def stop_token_ids(model_dir: str | Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end a completion: the tokenizer's EOS and every eos_token_id of generation_config.json.

    The two differ in real models (Qwen's chat models stop at <|im_end|> and at <|endoftext|>), so both are needed.
    """
    stops = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = Path(model_dir) / "generation_config.json"
    if path.exists():
        eos = read_object(path).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise InputError(f"{path}: eos_token_id: found {shown(eos)}; needed: a token id or a list of token ids")
        stops.update(ids)
    if not stops:
        raise InputError(f"{model_dir}: neither the tokenizer nor generation_config.json names an EOS token")
    return stops


def prompt_ids(
    question: str, tokenizer: PreTrainedTokenizerBase, cfg: Config, examples: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """Token ids of the prompt: data.system, the worked ``examples``, then the question, in the tokenizer's form.

    That is its chat template if it has one, else data.prompt_template. The text is rendered first and then tokenized
    without adding special tokens: what the template shows is what the model gets (a tokenizer that would put a BOS in
    front of plain text does not).
    """
    turns = [("system", cfg.data.system)] if cfg.data.system else []
    for asked, answer in (*examples, (question, None)):
        turns.append(("user", f"{asked} {cfg.data.instruction}" if cfg.data.instruction else asked))
        if answer is not None:
            turns.append(("assistant", answer))
    text = _chat_text(turns, tokenizer, cfg) if tokenizer.chat_template else _plain_text(turns, cfg)
    words = _words(text)
    for role, content in turns:
        if _words(content) not in words:
            raise InputError(
                f"{tokenizer.name_or_path}: its template leaves out the text of a {role} turn, or a part of it: "
                f"{content[:60]!r} becomes {text[:120]!r}; needed: a chat template that shows all turns"
            )
    prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not prompt:
        raise InputError(f"{tokenizer.name_or_path}: its template makes an empty prompt; needed: one with the question")
    return prompt


def _chat_text(turns: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, cfg: Config) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    options = cfg.data.chat_template_kwargs
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise InputError(
                f"data.chat_template_kwargs.{name}: the chat template of {tokenizer.name_or_path} does not read it; "
                "needed: a variable of the template (for example enable_thinking, where a model can think)"
            )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # a template is a program of the model's author, and fails in any way it likes
        roles = ", ".join(role for role, _ in turns)
        found = f"{tokenizer.name_or_path}: the chat template fails ({gsm8k_files.first_line(error)})"
        raise InputError(f"{found}; needed: one that takes the turns {roles}") from error


def _plain_text(turns: list[tuple[str, str]], cfg: Config) -> str:
    """Turns for a tokenizer without a chat template, an empty line between a worked answer and the next question."""
    template = cfg.data.prompt_template
    if "{question}" not in template:
        raise InputError(
            f"data.prompt_template: found {template!r}; needed: a text with {{question}}, "
            "as this tokenizer has no chat template"
        )
    if cfg.data.chat_template_kwargs:
        found = ", ".join(cfg.data.chat_template_kwargs)
        raise InputError(f"data.chat_template_kwargs: found {found}; needed: none, this tokenizer has no chat template")
    forms = {"system": "{question}\n\n", "user": template, "assistant": " {question}\n\n"}
    return "".join(forms[role].replace("{question}", text) for role, text in turns)  # str.format would read braces


# ------------------------------------------------------------------------------------------------- generated arithmetic
@dataclass(frozen=True)
class Problem:
    question: str
    kind: str  # add | sub
    x: int
    y: int  # for sub, y <= x


def held_out(x: int, y: int) -> bool:
    """Whether the unordered pair {x, y} belongs to the test set: one in eight, 151 of the 1,225 pairs of 1 to 49.

    The operation plays no part: were only a sum held out, the wrong-operation slip of the difference would teach it.
    """
    return (min(x, y) * 7919 + max(x, y) * 104729) % 1009 % 8 == 0


def arithmetic(num: int, heldout: bool, seed: int, low: int, high: int) -> list[tuple[str, str]]:
    """`num` different (question, worked answer) pairs, operands low..high, from held-out pairs only or from the others.

    Raises InputError if the range leaves training or test without a pair, or has fewer questions than asked for.
    """
    if not 0 <= low <= high:
        raise InputError(f"data.operand_low, operand_high: found {low} to {high}; needed: 0 <= low <= high")
    for part, name in ((True, "test"), (False, "training")):
        if not _num_questions(part, low, high, enough=1):
            raise InputError(f"data.operand_low, operand_high: {low} to {high} has no {name} pair; use a wider range")
    available = _num_questions(heldout, low, high, enough=num)
    if available < num:
        where = f"data.num_{'test' if heldout else 'train'}"
        raise InputError(f"{where}: found {num}; operands {low} to {high} give {available} different questions")
    rng = random.Random(derive_seed(seed, "arithmetic", "test" if heldout else "train"))
    pairs: dict[str, str] = {}
    while len(pairs) < num:
        made = problem(rng, low, high, heldout)
        pairs[made.question] = solution(made)  # a question met before changes nothing: its answer is the same
    return list(pairs.items())


def _num_questions(heldout: bool, low: int, high: int, enough: int) -> int:
    """How many different questions one side of the split has; stops counting at `enough`."""
    total = 0
    for x in range(low, high + 1):
        for y in range(x, high + 1):
            if held_out(x, y) == heldout:
                # x + y, y + x and larger - smaller; each with three templates
                total += (2 if x == y else 3) * 3 * len(NAMES) * len(ITEMS)
            if total >= enough:
                return total
    return total


def _operands(rng: random.Random, low: int, high: int, heldout: bool) -> tuple[str, int, int]:
    for _ in range(100_000):
        kind, x, y = rng.choice(["add", "sub"]), rng.randint(low, high), rng.randint(low, high)
        if kind == "sub" and y > x:
            x, y = y, x
        if held_out(x, y) == heldout:
            return kind, x, y
    name = "test" if heldout else "training"
    raise InputError(f"data.operand_low, operand_high: {low} to {high} has no {name} pair; use a wider range")


def problem(rng: random.Random, low: int, high: int, heldout: bool) -> Problem:
    """One word problem drawn from `rng`: one step of addition or subtraction, never below zero."""
    kind, x, y = _operands(rng, low, high, heldout)
    template, name, items = rng.choice(TEMPLATES[kind]), rng.choice(NAMES), rng.choice(ITEMS)
    return Problem(template.format(name=name, items=items, x=x, y=y), kind, x, y)


def _worked(kind: str, x: int, y: int, result: int) -> str:
    return f"{x} {'+' if kind == 'add' else '-'} {y} = {result}\n#### {result}"


def solution(problem: Problem) -> str:
    """The right worked answer, as in `37 - 25 = 12\\n#### 12`."""
    x, y = problem.x, problem.y
    return _worked(problem.kind, x, y, x + y if problem.kind == "add" else x - y)


def sloppy_solution(problem: Problem, rng: random.Random, right: float, wrong_operation: float) -> str:
    """A careless pupil's answer: right with probability `right`, the other operation done correctly with probability
    `wrong_operation`, else the right operation with a result off by one or by ten, never below zero.

    A model taught by it knows format and sums but chooses badly, which is what reinforcement learning can repair.
    """
    kind, x, y = problem.kind, problem.x, problem.y
    draw = rng.random()
    if draw < right:
        return solution(problem)
    if draw < right + wrong_operation:
        if kind == "sub":
            return _worked("add", x, y, x + y)
        return _worked("sub", max(x, y), min(x, y), abs(x - y))
    result = x + y if kind == "add" else x - y
    if rng.choice(["one", "ten"]) == "one":
        off = max(0, result + rng.choice([-1, 1]))
    else:
        off = result + 10 if result < 10 else result + rng.choice([-10, 10])
    return _worked(kind, x, y, off)


def drill(rng: random.Random, low: int, high: int) -> tuple[str, str]:
    """A bare, always right sum of a training pair as (text, completion): ("37 + 25", " = 62")."""
    kind, x, y = _operands(rng, low, high, heldout=False)
    return (f"{x} + {y}", f" = {x + y}") if kind == "add" else (f"{x} - {y}", f" = {x - y}")


# --------------------------------------------------------------------------------------------------------- command line
def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit code: 0 done or usage shown, 2 bad input."""
    parser = argparse.ArgumentParser(prog="data_gsm8k.py", description="Convert GSM8K files between their forms.")
    commands = parser.add_subparsers(dest="command")
    about = "question/answer columns -> chat form; any other form -> question/answer columns"
    sub = commands.add_parser("convert", help=about, description=about)
    sub.add_argument("in_path", metavar="IN", help="a .jsonl or .parquet file")
    sub.add_argument("out_path", metavar="OUT", help="a new .jsonl or .parquet file")
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        print(gsm8k_files.convert(options.in_path, options.out_path))
    except BAD_INPUT as error:
        return refused(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
