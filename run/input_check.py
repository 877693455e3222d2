"""Checks everything that a run reads, except its weights, before it starts, and makes the report of `--check`.

The checks raise InputError for input with which the run could not work.
"""

import contextlib
import os
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aqn
import data_gsm8k
import reward_gsm8k
import rollout
from data_gsm8k import Question, Questions
from engines import factory
from engines.interface import Completion
from facts.architectures import Architecture
from facts.exits import InputError
from hardware import device as devices
from inputs import functions, hf_config
from inputs.config import to_dict
from inputs.rules import problems, refuse_first
from knobs import Config, DataConfig, EvalConfig, LossConfig, RewardConfig, TinyModelConfig
from parallel_setup import launched_rank, launched_world_size
from runlog import run_record
from tasks import question_files
from tasks.environment import Environment, Waiting
from tasks.scoring import Call, Score, Scorer
from weights import checkpoint, huggingface, teacher, tiny_model

SCORED_TWICE = 8  # number of training questions whose answers a user's reward scores twice
ASKED_TWICE = 4  # number of training questions whose answers a user's environment gets twice


class Inputs(NamedTuple):
    """The input that the checks have read and that the run will use."""

    arch: Architecture
    tokenizer: Any  # of transformers
    stop_tokens: set[int]  # the tokens that end a completion
    questions: Questions
    held_out: dict[str, Questions]  # the questions of data.test_path under "", and of eval.sets by name
    scorer: Scorer
    environment: Environment | None  # of rollout.environment

    @property
    def pad_token(self) -> int:
        """The id of the token that pads rows."""
        return data_gsm8k.pad_token_id(self.tokenizer, self.stop_tokens)

    @property
    def parts(self) -> list[tuple[str, Questions]]:
        """The training questions and each set of held-out questions, with names to print."""
        return [("train", self.questions), *((name or "held out", part) for name, part in self.held_out.items())]

    @property
    def probe(self) -> list[int]:
        """The prompt on which engine and trainer are compared."""
        return self.held_out[""][0].prompt

    def score(self, answers: Sequence[tuple[Question, Completion]]) -> list[Score]:
        """Score completions as rollout.score_completions does, with the tokenizer and the reward of the run."""
        return rollout.score_completions(answers, self.tokenizer, self.scorer)


def check_settings(cfg: Config, ranks: int, with_device: bool = True) -> Architecture:
    """Check everything except the files of the model and of the questions, and return the model's architecture.

    Raises InputError for a setting that cannot work. If ``with_device`` is false, neither the device nor the engine on
    it is checked.
    """
    if with_device:
        devices.resolve(cfg.device)
    functions.try_out(cfg.loss, cfg.rollout)
    check_writable("train.out_dir", Path(cfg.train.out_dir))
    if is_to_be_made(Path(cfg.model.path), cfg.tiny_model, cfg.data, cfg.row_tokens):
        check_writable("model.path", Path(cfg.model.path))
        arch, _ = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)
    else:
        arch = hf_config.read(cfg.model.path)
    refuse_first(problems(cfg, arch, ranks))
    if cfg.loss.teacher:
        for _ in teacher.read(cfg, arch):  # one module at a time, and none is kept
            pass
    if with_device:
        factory.check_engine(cfg, arch, ranks)
    if cfg.aqn.schedule != "off":
        aqn.norm_targets(arch, cfg.aqn.targets)  # raises InputError for a target that matches no norm
    return arch


def is_to_be_made(folder: Path, tiny: TinyModelConfig | None, data: DataConfig, row_tokens: int) -> bool:
    """Return whether a tiny model must still be created in ``folder``.

    Raises InputError if the folder exists but does not contain this model.
    """
    return tiny is not None and not tiny_model.exists(folder, tiny_model.recipe(tiny, data, row_tokens))


def read_inputs(
    cfg: Config,
    arch: Architecture,
    scorer: Scorer,
    beat: Callable[..., None] = lambda done="": None,
    waiting: Waiting = contextlib.nullcontext,
) -> Inputs:
    """Read the tokenizer and the questions with their prompts, but no weights. Calls ``beat`` after each prompt.

    Raises InputError for an unusable file or environment and for too few questions. If the check held_out may stop the
    run, it also raises InputError for a held-out question that is also a training question. For ``waiting`` see
    tasks/environment.py.
    """
    huggingface.read_model(cfg.model.path, arch)
    tokenizer = data_gsm8k.load_tokenizer(cfg.model.path)
    beat("the checks of the model")
    questions = data_gsm8k.load(cfg.data, "train", tokenizer, cfg.train.seed, beat)
    held_out = {
        name: data_gsm8k.load(data, "test", tokenizer, cfg.train.seed, beat)
        for name, data in data_gsm8k.of_sets(cfg.data, cfg.eval.sets).items()
    }
    for key, count, part, kind in (
        ("rollout.prompts_per_step", cfg.rollout.prompts_per_step, questions, "training"),
        ("eval.num_questions", cfg.eval.num_questions, held_out[""], "held-out"),
    ):
        if count > len(part):
            raise InputError(f"{key}: {count} exceeds the {len(part)} {kind} questions")
    for name, part in held_out.items():
        shared = question_files.asked_in(part, questions)
        if shared and cfg.checks.stops("held_out"):
            key = f"eval.sets.{name}" if name else "data.test_path"
            raise InputError(
                f"data: {len(shared)} held-out questions of {key} are also training questions, for example "
                f"{min(shared)[:60]!r}; remove them, or list held_out in checks.warn"
            )
    stop_tokens = data_gsm8k.stop_token_ids(cfg.model.path, tokenizer)
    prompts = (question.prompt for part in (questions, *held_out.values()) for question in part)
    largest = max(stop_tokens.union(*prompts))
    if largest >= arch.vocab_size:
        raise InputError(
            f"model.path: prompts or stop tokens of {cfg.model.path} use token {largest}, beyond its vocabulary of "
            f"{arch.vocab_size}; use the tokenizer and generation_config.json that belong to the model"
        )
    environment = data_gsm8k.open_environment(cfg.data, cfg.rollout, tokenizer, stop_tokens, scorer, waiting)
    if environment:
        check_environment(environment, [questions[i] for i in range(min(ASKED_TWICE, len(questions)))], arch)
    return Inputs(arch, tokenizer, stop_tokens, questions, held_out, scorer, environment)


def check_answers(reward: RewardConfig, train: DataConfig, evaluation: EvalConfig, scorer: Scorer) -> None:
    """Raise InputError unless the reward scores every gold answer as correct. Otherwise the advantages would be noise.

    If the reward runs in separate processes, it may be slow, so each rank checks only its share of the answers. If
    reward.check_gold is false, nothing is checked.
    """
    if not reward.check_gold:
        return
    first, ranks = (launched_rank(), launched_world_size()) if scorer.in_processes else (0, 1)
    parts = [("training", train, "train")]
    parts += [(name or "held-out", data, "test") for name, data in data_gsm8k.of_sets(train, evaluation.sets).items()]
    for kind, data, split in parts:
        rows = data_gsm8k.read(data, split)[0][first::ranks]
        calls = [Call(right_answer(reward, train.instruction, row), row.gold, row.columns) for row in rows]
        scores = scorer(calls)
        wrong = [place for place, score in enumerate(scores) if not score.correct]
        if wrong:
            first_wrong = wrong[0]
            rule = f"for base_acc, data.instruction must ask for {reward_gsm8k.BOX_FORM}"
            if reward.function:
                rule = "a score of 1.0 or more counts as correct, or return (score, answer found, correct)"
            raise InputError(
                f"{scorer.name} scores {len(wrong)} of {len(calls)} gold {kind} answers as wrong, the first with "
                f"{scores[first_wrong].reward:g}: {calls[first_wrong].completion[-60:]!r}, the answer to "
                f"{rows[first_wrong].question[:60]!r}; use a reward that fits the data's answers ({rule}), or set "
                "reward.check_gold=false"
            )


def check_functions(reward: RewardConfig, loss: LossConfig, data: DataConfig, scorer: Scorer) -> None:
    """Raise InputError unless the user's functions are reproducible and treat all rows alike.

    This check cannot show whether the functions reward the right behaviour.
    """
    if reward.function:
        rows = data_gsm8k.read(data, "train")[0][:SCORED_TWICE]
        calls = [Call(row.answer, row.gold, row.columns) for row in rows]
        if scorer(calls) != scorer(calls[::-1])[::-1]:
            raise InputError(
                f"reward.function: {reward.function} scores an answer differently in two calls; return a score "
                "that depends only on its arguments"
            )
    functions.compare_orders(loss)


def check_environment(environment: Environment, questions: Sequence[Question], arch: Architecture) -> None:
    """Raise InputError unless the user's environment is reproducible and its tokens are in the model's vocabulary.

    The environment gets the data's answers as turns of the policy. For each text in rollout.stop, an answer is cut at
    the first occurrence of this text, and ends with it. If the chat template ends a turn with a token, the environment
    also gets the whole answer.
    """
    if (size := len(environment.tokenizer)) > arch.vocab_size:
        raise InputError(
            f"rollout.environment: the tokenizer has {size} tokens, but the model has {arch.vocab_size}; use a "
            "tokenizer that gives no other tokens"
        )
    ends, calls = list(environment.stops), []
    if environment.template.end is not None:
        ends.append(environment.tokenizer.decode([environment.template.end]))
    for one in questions:
        for end in ends:
            calls.append(([one.answer.partition(end)[0] + end], one.columns))
    if environment.answers(calls) != environment.answers(calls[::-1])[::-1]:
        raise InputError(
            f"rollout.environment: {environment.rollout.environment} answers a turn differently in two calls; return "
            "an answer that depends only on its arguments"
        )


def right_answer(reward: RewardConfig, instruction: str, question: Question) -> str:
    """Return a completion that the reward should score as correct, in the form that reward.method reads."""
    answer = question.answer if "#### " in question.answer else f"#### {question.gold}"
    asks_for_box = reward_gsm8k.BOXED in instruction
    return answer if reward.function else reward_gsm8k.in_form(answer, reward.method, asks_for_box)


def report(cfg: Config, ranks: int) -> str:
    """Check the input of a run without starting it, and return the text for `--check` to print.

    Temporary files are removed. Raises InputError for input with which the run could not start. If the configuration
    needs a device that this machine lacks, a line of the text says so, and everything else is checked.
    """
    elsewhere = making = ""
    try:
        devices.resolve(cfg.device)
    except InputError as error:
        elsewhere = f"not checked: the device and the engine on it ({error})\n"
    scorer = Scorer(cfg.reward, environment=cfg.rollout.environment)
    with contextlib.closing(scorer), tempfile.TemporaryDirectory() as temporary:
        arch = check_settings(cfg, ranks, with_device=not elsewhere)
        check_answers(cfg.reward, cfg.data, cfg.eval, scorer)
        check_functions(cfg.reward, cfg.loss, cfg.data, scorer)
        model = cfg.model.path
        if is_to_be_made(Path(cfg.model.path), cfg.tiny_model, cfg.data, cfg.row_tokens):
            making = f"model: {model} does not exist; a start creates a tiny model: {cfg.tiny_model}\n"
            model = temporary
            config = tiny_model.recipe(cfg.tiny_model, cfg.data, cfg.row_tokens)["config"]
            tiny_model.write_random_model(Path(model), cfg.tiny_model, cfg.data, config)
        inputs = read_inputs(cfg.changed(model={"path": model}), arch, scorer)
    if cfg.loss.teacher:
        teacher.refuse_other_files(cfg.loss.teacher, run_record.inputs(run_record.input_files(cfg)))
    saved = checkpoint_to_resume(cfg)
    step = saved.step if saved else 0
    first = inputs.questions.pick(step, cfg.rollout.prompts_per_step)[0]
    prompt = inputs.tokenizer.decode(first.prompt)
    answer = right_answer(cfg.reward, cfg.data.instruction, first)
    if rollout.opened_thinking(first.prompt, inputs.tokenizer):  # the model continues it
        answer = answer.removeprefix("<think>")
    start = (
        f"continues {saved.run_dir} after step {step} of {cfg.train.steps}"
        if saved
        else f"begins a new run in {cfg.train.out_dir}/"
    )
    return (
        f"{making}{introduction(cfg, ranks, inputs)}\n"
        f"the first prompt of step {step + 1}, as the model sees it ({len(first.prompt)} tokens):\n"
        f"{textwrap.indent(prompt, '    ')}\n"
        f"a correct answer, in the form that the reward reads:\n{textwrap.indent(answer, '    ')}\n"
        f"{inputs.environment.shown() if inputs.environment else ''}"
        f"{elsewhere}a start {start}; the input is usable"
    )


def check_writable(key: str, folder: Path) -> None:
    """Raise InputError unless ``folder`` is writable or can be created. The check creates nothing."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{key}: {folder}: {nearest} is not a writable folder; choose one that is")


def checkpoint_to_resume(cfg: Config, beat: Callable[[], None] = lambda: None) -> checkpoint.Checkpoint | None:
    """Return the checkpoint for train.resume, with verified checksums, or None for a new run.

    Raises InputError if the named run has no usable checkpoint or has another configuration. Unless
    train.changed_inputs is accept, it is also an error if files of the model, the tokenizer or the data have changed
    since the run's start. ``beat`` is called while these files are read.
    """
    if cfg.train.resume == "never":
        return None
    is_auto, config = cfg.train.resume == "auto", to_dict(cfg)
    if is_auto:
        saved = checkpoint.find_resumable(checkpoint.runs_of(cfg.name, Path(cfg.train.out_dir)), config)
    else:
        saved = checkpoint.latest(Path(cfg.train.resume))
    if saved is None and is_auto:
        return None
    if saved is None:
        raise InputError(
            f"train.resume: {cfg.train.resume} has no usable checkpoint; give auto, never, or the folder of a run"
        )
    checkpoint.check_resume(saved, config)
    changed = run_record.changed_inputs(saved.run_dir, run_record.input_files(cfg), Path(cfg.model.path), beat)
    for line in run_record.refuse_changed_inputs(
        changed,
        accept=cfg.train.changed_inputs == "accept",
        how="start a new run with train.resume=never, or continue with train.changed_inputs=accept",
    ):
        print(f"note: train.changed_inputs: accepted: {line}", flush=True)
    return saved


def introduction(cfg: Config, ranks: int, inputs: Inputs) -> str:
    """Return the text to print before the first step: the layout, the data, the sizes of a step, and warnings."""
    prompts, group = cfg.rollout.prompts_per_step, cfg.rollout.group_size
    updates = prompts // cfg.optim.prompts_per_update
    tensor, expert = cfg.parallel.tensor, cfg.parallel.expert
    lines = [
        f"layout: {ranks} ranks = tensor {tensor} x data {ranks // tensor} = "
        f"expert {expert} x expert_data {ranks // expert}"
    ]
    for name, part in inputs.parts:
        lines += [f"{name}: {part.description}", *look_alikes(name, part, part)]
        if part is not inputs.questions:
            lines += look_alikes(f"train and {name}", inputs.questions, part)
    question_files.normalised.cache_clear()  # a run does not need these texts any more
    lines.append(
        f"a step: {prompts} prompts x {group} = {prompts * group} sequences, "
        f"{updates} update{'s' * (updates > 1)} of {cfg.optim.prompts_per_update} prompts x {group}"
    )
    if unread := huggingface.unread_weights(Path(cfg.model.path)):
        lines.append(
            f"note: only safetensors files are read, so these are not: {', '.join(unread)} in {cfg.model.path}"
        )
    if cfg.loss.teacher:
        lines.append(teacher.describe(cfg.loss.teacher))
    return "\n".join(lines + unread_forms(cfg.reward, cfg.data.instruction, inputs))


def look_alikes(name: str, first: Questions, second: Questions) -> list[str]:
    """Return a warning if questions of ``first`` and ``second`` differ only in case, width or invisible characters."""
    pairs = question_files.alike(first, second)
    if not pairs:
        return []
    one, other = (text[:60] for text in pairs[0])
    return [
        f"warning: {name}: {len(pairs)} questions differ from another one only in case, width or invisible characters, "
        f"for example {one!r} and {other!r}; all are kept"
    ]


def unread_forms(reward: RewardConfig, instruction: str, inputs: Inputs) -> list[str]:
    """Return a warning for each answer form that most prompts ask for but reward.method does not read."""
    if reward.function:
        return []
    texts = {"data.instruction": [instruction]}
    for name, part in inputs.parts:
        texts[f"{name}: the questions' own text"] = [one.question for one in part]
    warnings = []
    for name, of_part in texts.items():
        for form, readers in reward_gsm8k.READERS.items():
            asking = sum(form in text for text in of_part)
            if 2 * asking > len(of_part) and reward.method not in readers:
                warnings.append(
                    f"warning: {name} asks for {form!r} and stays in the prompt; reward.method={reward.method} "
                    f"does not read that form, but reward.method={readers[0]} does"
                )
    return warnings


def texts(settings: str, inputs: Inputs) -> dict[str, str]:
    """Return, by name, the texts that all ranks compare.

    They must be equal, although each rank reads the files of its own node.
    """
    return {
        "the configuration": settings,
        "config.json of model.path": repr(inputs.arch),
        "the training questions as prompts": inputs.questions.as_read(),
        **{
            f"the held-out questions{name and f' of {name}'} as prompts": q.as_read()
            for name, q in inputs.held_out.items()
        },
    }
