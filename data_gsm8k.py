"""Chooses the questions of a step, from files or from generated arithmetic in GSM8K's form, and writes their prompts.

tasks/question_files.py reads the files, and tasks/arithmetic.py generates questions. The questions of a step depend
only on (seed, step). With dynamic sampling, they also depend on the outcomes of earlier rounds.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from facts.exits import InputError
from facts.seeds import derive_seed
from inputs.files import one_line, read_bytes, read_object, shown
from knobs import GENERATED, DataConfig, Paths, RolloutConfig, listed
from tasks import arithmetic, plain_tokenizer, question_files
from tasks.environment import Environment, Template, Waiting, plain_ids
from tasks.question_files import Question, Turn
from tasks.scoring import Pool

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

PROMPT = "Question: {question}\nAnswer:"  # for a tokenizer without a chat template

# The names of the model's turn, for templates in which an earlier turn does not show how such a turn begins
ASSISTANT = re.compile(r"assistant|answer|response|model|\b(ai|gpt)\b|bot(\b|_)|/inst\b", re.IGNORECASE)
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")


# ------------------------------------------------------------------------------------------------------------ questions
@dataclass(frozen=True, eq=False)
class Questions(Sequence[Question]):
    """The questions of one split, in the order of the file. `pick` chooses the questions of a step."""

    questions: list[Question]
    seed: int
    description: str = ""  # one line with the file, its form and the longest prompt

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: Any) -> Any:
        return self.questions[index]

    def as_read(self) -> str:
        """Return the prompts and gold answers as one string. Ranks compare it to check their files."""
        return repr([(one.prompt, one.gold) for one in self.questions])

    def pick(self, step: int, count: int) -> list[Question]:
        """Return the `count` questions of `step` (from 0), which depend only on (seed, step, count).

        Each epoch has a random permutation of the questions, and all permutations form one sequence. Step s takes
        `count` questions of this sequence, starting at position s * count. So every epoch asks every question once,
        even if the number of questions is not a multiple of `count`.
        """
        epochs = range(step * count // len(self), ((step + 1) * count - 1) // len(self) + 1)
        seeds = (derive_seed(self.seed, "epoch", epoch) for epoch in epochs)
        order = np.concatenate([np.random.Generator(np.random.PCG64(s)).permutation(len(self)) for s in seeds])
        first = step * count - epochs[0] * len(self)
        return [self.questions[index] for index in order[first : first + count]]

    def pick_more(self, step: int, round_: int, count: int, asked: Sequence[Question]) -> list[Question]:
        """Return `count` questions for another round of `step` that are not in `asked`, or fewer if too few are left.

        They depend only on (seed, step, round) and `asked`. They do not change the questions that `pick` returns for
        later steps.
        """
        seed, known = derive_seed(self.seed, "dynamic", step, round_), {question.question for question in asked}
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(self))
        others = (question for index in order if (question := self.questions[index]).question not in known)
        return list(itertools.islice(others, count))


def read(data: DataConfig, split: str) -> tuple[list[Question], str, str]:
    """Return the questions of `split` ("train" or "test"), their source, and a description of their form.

    Raises InputError for an unusable row.
    """
    if data.source == "arithmetic":
        num = {"train": data.num_train or GENERATED, "test": data.num_test}[split]
        most = data.operations_high
        pairs = arithmetic.examples(num, split == "test", data.seed, arithmetic.LOWEST_OPERAND, data.operand_high, most)
        length = f", 1 to {most} operations" if most > 1 else ""
        form = f"generated, operands {arithmetic.LOWEST_OPERAND} to {data.operand_high}{length}"
        return [Question.worked(*pair) for pair in pairs], f"arithmetic ({split})", form
    paths, count = {"train": (data.train_path, data.num_train), "test": (data.test_path, 0)}[split]
    rows, form = _read(data, paths, count)
    return rows, ", ".join(listed(paths)), form


def _read(data: DataConfig, paths: Paths, count: int = 0) -> tuple[list[Question], str]:
    """Return the questions in the files ``paths``, whose kind is data.source, and a description of their form.

    If ``count`` is not 0, only this many questions are returned, evenly spaced in the files.
    """
    return question_files.read(paths, data.columns if data.source == "file" else None, count)


def of_sets(data: DataConfig, sets: Mapping[str, Paths]) -> dict[str, DataConfig]:
    """Return a DataConfig for each set of held-out questions, by the name of the set.

    The split "test" of a DataConfig is its set. The main set has the name "" and the DataConfig ``data``. Each set in
    ``sets`` (eval.sets) gets a copy of ``data`` with the files of the set. If ``data`` generates its questions, the
    source of these copies is gsm8k.
    """
    source = "gsm8k" if data.source == "arithmetic" else data.source
    return {"": data} | {
        name: data.model_copy(update={"source": source, "test_path": paths}) for name, paths in sets.items()
    }


def few_shot(data: DataConfig, asked: Sequence[Question]) -> list[Question]:
    """Return the worked examples in data.few_shot_path, or [] without a path.

    Raises InputError if they contain a question of ``asked``, because its prompt would then show its answer.
    """
    examples = _read(data, data.few_shot_path)[0] if data.few_shot_path else []
    if repeated := question_files.asked_in(asked, examples):
        raise InputError(
            f"data.few_shot_path: {data.few_shot_path} contains {repeated[0][:60]!r}, which is asked as well; choose "
            "examples that are in neither the training nor the held-out questions"
        )
    return examples


def load(
    data: DataConfig,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    beat: Callable[[], None] = lambda: None,
) -> Questions:
    """Return the questions of `split` with their prompts. `seed` decides the order in which steps ask them.

    `beat` is called after each prompt. Raises InputError for an unusable row, example, prompt or chat template.
    """
    rows, source, form = read(data, split)
    examples = few_shot(data, rows)
    _refuse_control_tokens([*examples, *rows], tokenizer, data)
    questions = []
    for row in rows:
        prompt = prompt_ids(row.turns, tokenizer=tokenizer, data=data, examples=examples)
        questions.append(row._replace(prompt=prompt))
        beat()
    for roles in {tuple(role for role, _ in row.turns) for row in rows}:
        turns = _all_turns([(role, f"text {index}.") for index, role in enumerate(roles)], data, examples)
        refuse_closed(turns, tokenizer, data)
    kept = _short_enough(questions, data, source)
    return Questions(
        [question._replace(position=n) for n, question in enumerate(kept)],
        seed,
        f"{len(kept)} questions from {source} ({form}); longest prompt {max(len(one.prompt) for one in kept)} of "
        f"{data.max_prompt_tokens} tokens, dropped {len(rows) - len(kept)}"
        + f"; {len(examples)} worked examples before each"
        * bool(examples),
    )


def _short_enough(questions: list[Question], data: DataConfig, source: str) -> list[Question]:
    """Return the questions whose prompts have at most data.max_prompt_tokens tokens.

    Raises InputError if no prompt is short enough, or if data.overlong_prompts refuses longer prompts. ``source``
    is the source of the questions, for the message.
    """
    limit, lengths = data.max_prompt_tokens, [len(question.prompt) for question in questions]
    kept = [question for question in questions if len(question.prompt) <= limit]
    if len(kept) < len(questions) and (data.overlong_prompts == "refuse" or not kept):
        raise InputError(
            f"{source}: {len(questions) - len(kept)} of {len(questions)} prompts are longer than "
            f"data.max_prompt_tokens = {limit}; the longest (question {lengths.index(max(lengths)) + 1}) has "
            f"{max(lengths)} tokens; raise it" + ", or set data.overlong_prompts: drop" * bool(kept)
        )
    return kept


# ------------------------------------------------------------------------------------------------ tokenizer and prompts
def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a model's folder. Only local files are read, and no code from the folder is run."""
    folder = Path(model_dir)
    files = {path.name for path in folder.glob("*")}
    for name in files & set(TOKENIZER_FILES):
        read_bytes(folder / name)  # the error names an unreadable file; the library's error does not
    if "tokenizer.json" not in files and not {"vocab.json", "merges.txt"} <= files:
        raise InputError(f"{folder}: no tokenizer found; add tokenizer.json, or vocab.json and merges.txt")
    settings = read_object(folder / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    try:
        tokenizer = plain_tokenizer.read(folder, files, settings)
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises a plain Exception for a damaged tokenizer.json
        raise InputError(f"{folder}: the tokenizer cannot be loaded: {one_line(error)}") from error
    for name in files & {"tokenizer_config.json", "chat_template.json"}:  # the second one belongs to old processors
        template = read_object(folder / name).get("chat_template")
        if isinstance(template, str) and template.strip() != str(tokenizer.chat_template).strip():
            raise InputError(f"{folder / name}: its chat template is not the one that is read; keep one of the two")
    return tokenizer


def stop_token_ids(model_dir: str | Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end a completion: the tokenizer's EOS token and every eos_token_id of generation_config.json.

    Both are needed, because they differ in real models: Qwen's chat models stop at <|im_end|> and at <|endoftext|>.
    """
    path = Path(model_dir) / "generation_config.json"
    eos = read_object(path).get("eos_token_id") if path.exists() else None
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InputError(f"{path}: eos_token_id is {shown(eos)}; make it a token id or a list of token ids")
    stops = {*ids, tokenizer.eos_token_id} - {None}
    if not stops:
        raise InputError(f"{model_dir}: neither the tokenizer nor generation_config.json names an EOS token; add one")
    return stops


def pad_token_id(tokenizer: PreTrainedTokenizerBase, stop_tokens: set[int]) -> int:
    """Return the id of the padding token. If the tokenizer has none, return the smallest id of a stop token."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_tokens)


def prompt_ids(
    asked: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, data: DataConfig, examples: Sequence[Question] = ()
) -> list[int]:
    """Return the token ids of a prompt: the system turn, the worked `examples`, then the question's other turns.

    ``asked`` are the turns of the question. The tokenizer's chat template formats all turns, or PROMPT if the tokenizer
    has no template. Tokenizing the result adds no special tokens such as BOS, so the prompt has only those of the
    template. Raises InputError if the template leaves out the text of a turn.
    """
    turns = _all_turns(asked, data, examples)
    text = _chat_text(turns, tokenizer, data) if tokenizer.chat_template else _plain_text(turns, data)
    words = question_files.words(text)
    for role, content in turns:
        if question_files.words(content) not in words:
            raise InputError(
                f"{tokenizer.name_or_path}: its template leaves out the text of a {role} turn, or a part of it: "
                f"{content[:60]!r} becomes {text[:120]!r}; use a chat template that shows all turns"
            )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _all_turns(asked: Sequence[Turn], data: DataConfig, examples: Sequence[Question]) -> list[Turn]:
    """Return the turns of a prompt: the system turn, the worked ``examples``, and the turns of the question ``asked``.

    data.instruction is appended to each question. Raises InputError if there are two system turns.
    """
    turns = [*[("system", data.system)] * bool(data.system), *(turn for turn in asked if turn[0] == "system")]
    if len(turns) > 1:
        raise InputError(f"data.system: the question {asked[-1][1][:60]!r} has a system turn; remove one of the two")
    for talk, answer in (*((row.turns, row.answer) for row in examples), (asked, "")):
        talk = [turn for turn in talk if turn[0] != "system"]
        turns += [*talk[:-1], ("user", f"{talk[-1][1]} {data.instruction}" if data.instruction else talk[-1][1])]
        if answer:
            turns.append(("assistant", answer))
    return turns


def control_token(text: str, tokenizer: PreTrainedTokenizerBase, special: Mapping[int, AddedToken]) -> str:
    """Return the first special token that the tokenizer finds in ``text``, or "" if all of it is read as plain text.

    ``special`` is special_tokens(tokenizer). A text may contain added tokens that are not special, such as <think>.
    """
    if not any(token.normalized or token.content in text for token in special.values()):
        return ""
    ids, plain = list(tokenizer(text, add_special_tokens=False)["input_ids"]), plain_ids(text, tokenizer)
    # A character that the tokenizer lacks becomes its unknown token in both.
    return next((special[one].content for one in ids if one in special and ids.count(one) > plain.count(one)), "")


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, AddedToken]:
    """Return the tokens that the tokenizer flags as special, by id."""
    return {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _refuse_control_tokens(rows: Sequence[Question], tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Raise InputError if a row or the section data contains a special token, which would end or open a turn."""
    special = special_tokens(tokenizer)
    texts = [("data.system", data.system), ("data.instruction", data.instruction)]
    texts += [(f"data.chat_template_kwargs.{name}", str(value)) for name, value in data.chat_template_kwargs.items()]
    for row in rows:
        texts += [(f"{row.where}: {role} turn", text) for role, text in row.turns]
        texts.append((f"{row.where}: answer", row.answer))
    for where, text in texts:
        if token := control_token(text, tokenizer, special):
            raise InputError(f"{where}: contains {token!r}, a special token of the tokenizer; remove it")


def refuse_closed(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Raise InputError unless the prompt of ``turns`` ends with the beginning of an assistant turn.

    The template's text for an earlier assistant turn shows how such a turn begins. It is also enough if the text that
    add_generation_prompt appends names the assistant. For a template that can show only one question, it is enough if
    the text after the question names the assistant. The text of the last turn must be unique.
    """
    if not tokenizer.chat_template:
        return
    asked, answer = turns[-1][1], "An answer."
    prompt, plain = (_chat_text(turns, tokenizer, data, opens=opens) for opens in (True, False))
    end, opening = prompt.rpartition(asked)[2], prompt[len(plain) :]
    talk = ""
    with contextlib.suppress(InputError):  # the template may show only one question
        talk = _chat_text([*turns, ("assistant", answer), ("user", "And now?")], tokenizer, data, opens=False)
    begin, is_shown, _ = talk.rpartition(asked)[2].partition(answer)
    if not is_shown:
        begin, opening = "", end
    # The model itself may write the end of ``begin``, such as an empty thought.
    opened = (begin.strip() and end.startswith(begin.rstrip())) or ASSISTANT.search(opening)
    if not opened or end.rstrip().endswith(tokenizer.eos_token or asked):
        raise InputError(
            f"{tokenizer.name_or_path}: with its chat template a prompt ends with {end[-60:]!r} after the question, "
            f"which does not begin the assistant's turn; use a template that does, with add_generation_prompt"
        )


def _chat_text(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, data: DataConfig, opens: bool = True) -> str:
    """Return the turns as one string, formatted by the tokenizer's chat template.

    If ``opens`` is true, the beginning of the assistant's turn follows them. Raises InputError if the template fails,
    draws at random, or does not read a variable of data.chat_template_kwargs.
    """
    template = str(tokenizer.chat_template)
    for name, value in data.chat_template_kwargs.items():
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise InputError(
                f"data.chat_template_kwargs.{name}: the model's chat template does not read it; remove it "
                "(enable_thinking, for example, is read by the models that can think)"
            )
        if not isinstance(value, bool) and _is_switch(name, template):
            raise InputError(f"data.chat_template_kwargs.{name}: must be true or false, not {shown(value)}")
    if re.search(r"\|\s*random\b", template):
        raise InputError(f"{tokenizer.name_or_path}: the chat template draws at random; use one that does not")
    messages = [{"role": role, "content": content} for role, content in turns]
    variables = {"strftime_now": _refuse_clock} | data.chat_template_kwargs
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens, **variables)
    except Exception as error:  # a template is a program of the model's author, and may raise any exception
        raise InputError(
            f"{tokenizer.name_or_path}: the chat template fails ({one_line(error)}); use one that accepts the turns "
            + ", ".join(role for role, _ in turns)
        ) from error


def open_environment(
    data: DataConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: Collection[int],
    pool: Pool,
    waiting: Waiting = contextlib.nullcontext,
) -> Environment | None:
    """Return the environment for the function rollout.environment, or None if this key is not set.

    The function runs in ``pool``. For ``waiting`` see tasks/environment.py.
    """
    if not rollout.environment:
        return None
    template = turn_tokens(tokenizer, data, rollout.environment_role, stop_tokens)
    return Environment(rollout, tokenizer, stop_tokens, template, pool, waiting)


# Dummy texts of turns. A template that writes JSON would change the second one.
ASKED, ANSWERED = "a turn of the policy", 'the "answer"\nto it'


def turn_tokens(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, role: str, stop_tokens: Collection[int]
) -> Template:
    """Return the tokens that the chat template writes after an assistant turn, before and after the text of ``role``.

    They are taken from a conversation with dummy texts. Raises InputError unless the template shows these texts
    unchanged, with one of ``stop_tokens`` between them.
    """
    if not tokenizer.chat_template:
        return Template()
    text = _chat_text([("user", "?"), ("assistant", ASKED), (role, ANSWERED)], tokenizer, data)
    found = re.fullmatch(rf".*{ASKED}(.*){re.escape(ANSWERED)}(.*)", text, re.DOTALL)
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in found.groups()] if found else [[], []]
    ends = [index for index, token in enumerate(parts[0]) if token in stop_tokens]
    if not ends:
        raise InputError(
            f"rollout.environment_role: {tokenizer.name_or_path}: its chat template does not show an assistant turn, "
            f"an end token and then a {role} turn as it is: {text[-160:]!r}; choose a role that it shows"
        )
    return Template(parts[0][ends[0]], parts[0][ends[0] + 1 :], parts[1])


def _refuse_clock(form: str) -> str:
    """Raise InputError if a template asks for the date, which could differ between ranks or after a resume."""
    raise InputError(f"strftime_now({form!r}): its prompts depend on the clock; use a template with a fixed date")


def _is_switch(name: str, template: str) -> bool:
    """Return whether ``template`` only sets its variable ``name``, or tests whether the variable is true or defined.

    Such a template would treat any non-empty string as true. If it tests whether the variable is false, 0 and null do
    not count as false.
    """
    uses = re.findall(rf"\b{re.escape(name)}\b", template)
    asked = r"\b(?:if|elif|and|or|not)\s+\(?{0}(?=\s*(?:-?[%}}]}}|\)|and\b|or\b|else\b|is\b))|\bset\s+{0}\s*="
    return len(re.findall(asked.format(re.escape(name)), template)) == len(uses)


def _plain_text(turns: Sequence[Turn], data: DataConfig) -> str:
    """Return the turns as one string in the form PROMPT, with an empty line after the system text and each answer.

    Raises InputError if data.chat_template_kwargs is set.
    """
    if data.chat_template_kwargs:
        raise InputError(
            f"data.chat_template_kwargs: {', '.join(data.chat_template_kwargs)} has no effect, because this tokenizer "
            "has no chat template; remove it"
        )
    forms = {"system": "{question}\n\n", "user": PROMPT, "assistant": " {question}\n\n"}
    # Not str.format, which would interpret other braces of the template.
    return "".join(forms[role].replace("{question}", text) for role, text in turns)
