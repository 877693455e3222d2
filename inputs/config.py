"""Reads the configuration of a run, one YAML file and `section.key=value` on the command line, into knobs.Config.

Four faults stop a run before any weight is read: an unknown key, a wrong type, values that cannot work together
(inputs/rules.py), and a key that the run would not read. This file does not import torch.
"""

import argparse
import difflib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from facts.checks import CHECKS
from facts.exits import InputError, Tripped
from inputs.files import dump_yaml, of_the_user, one_line, parse_override, print_every_letter, read_file, report, shown
from inputs.rules import idle_keys, problems
from knobs import FUNCTION, AqnConfig, ChecksConfig, Config, ParallelConfig, Section, TinyModelConfig, user_path

# ------------------------------------------------------------------------------------------------------------ loading


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that resolve_config returns, without the notes."""
    return resolve_config(path, overrides)[0]


def resolve_config(path: str | Path, overrides: Sequence[str] = (), *, layout: bool = True) -> tuple[Config, list[str]]:
    """Return the configuration in the file at ``path`` with the overrides applied, and notes for the user.

    The file must be valid without the overrides. An idle key is one that the run would not read. It is an error in the
    file and among the overrides. But if only the overrides make a key of the file idle, the key takes its default, and
    a note says so. An idle override of the form `section.key:=value`, which the run scripts use, is treated in the same
    way. Without ``layout``, this function does not check the sizes of the layout, so the caller must. Raises InputError
    for any fault.
    """
    file_tree = read_file(path)
    of_file = _typed(file_tree, f"{path}: ")
    _refuse_idle(flatten(file_tree), idle_keys(of_file), f"{path}: ")
    tree, given, notes = _overridden(file_tree, overrides)
    cfg = _typed(tree, "override ")
    idle = idle_keys(cfg)
    _refuse_idle(given, idle, "override ")
    if cfg.data.source != file_tree["data"]["source"] and "data.num_train" not in given:
        idle["data.num_train"] = "it counts the questions of another data.source"
    unread = [key for key in idle if key in flatten(tree)]
    notes += [f"{key}: has no effect because {idle[key]}" for key in unread]
    cfg = _typed(_without(tree, unread), "")
    if found := unknown_checks(cfg.checks) + problems(cfg, layout=layout):
        raise InputError("; ".join(found))
    if cfg.model.path != of_file.model.path:
        _refuse_mistyped_model(cfg.model.path, cfg.tiny_model, given)
    return cfg, notes


def _overridden(tree: dict, overrides: Sequence[str]) -> tuple[dict, set[str], list[str]]:
    """Return ``tree`` with the overrides applied, the keys that the user gave, and notes.

    If a given key has three parts, its first two parts also count as given. A key that ends in `:` comes from a script
    and does not count as given.
    """
    given: set[str] = set()
    notes = []
    for key, value in map(parse_override, overrides):
        tree = _with(tree, key.removesuffix(":"), value)
        if key.endswith(":"):
            continue
        if key in given:
            notes.append(f"{key}: given twice on the command line; the last value counts")
        given |= {key, ".".join(key.split(".")[:2])}
    return tree, given, notes


def _without(tree: dict, keys: Iterable[str]) -> dict:
    """Return a copy of ``tree`` without ``keys``, so that they take their defaults."""
    for section, name in (key.split(".") for key in keys):
        tree = tree | {section: {other: value for other, value in tree[section].items() if other != name}}
    return tree


def _refuse_mistyped_model(path: str, tiny: TinyModelConfig | None, given: Set[str]) -> None:
    """Raise InputError if model.path was overridden with a missing folder, unless the user wants a tiny model there.

    The path may be mistyped, or may name a model that has yet to be downloaded. If a key of tiny_model was overridden,
    the user wants a tiny model. Without the section tiny_model, this function does nothing.
    """
    wants_tiny_model = any(key.startswith("tiny_model.") for key in given)
    if tiny is not None and not wants_tiny_model and not Path(path).exists():
        raise InputError(
            f"override model.path: {path} does not exist; give the folder of a model together with tiny_model=null, or "
            f"create a tiny model there by also setting one of its keys, e.g. tiny_model.seed={tiny.seed}"
        )


def load_recorded(path: Path) -> Config:
    """Return the configuration that a run has recorded.

    Raises InputError if the value of a removed key differs from that in REMOVED.
    """
    return recorded_config(read_file(path), path)


def recorded_config(recorded: dict[str, Any], where: Path) -> Config:
    """Return ``recorded``, read from the file ``where``, as a Config. Raises InputError as load_recorded does."""
    return _typed(of_today(recorded), f"{where}: ")


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap ``main`` so that it returns exit code 2 for unusable input and 3 for Tripped, after one line on stderr."""

    @functools.wraps(main)
    def called(*arguments: Any) -> int:
        print_every_letter()
        try:
            code = main(*arguments)
            print(end="", flush=True)  # unlike sys.stdout.flush, also without a stdout
            return code
        except BrokenPipeError:  # the reader of the output has ended, for example head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except Tripped as error:
            report(f"stopped: {error}")
            return error.exit_code
        except Exception as error:
            if not of_the_user(error):
                raise
            report(f"error: {one_line(error)}")
            return InputError.exit_code

    return called


def command_line(prog: str, about: str, **config: Any) -> argparse.ArgumentParser:
    """Return an argument parser for CONFIG and its overrides.

    ``about`` is the docstring of the command; its first paragraph becomes the description. ``config`` has arguments of
    add_argument for CONFIG. They replace the default ones.
    """
    parser = argparse.ArgumentParser(prog=prog, description=about.split("\n\n")[0])
    of_config: dict[str, Any] = {"help": "YAML file, e.g. configs/qwen3.yaml", "type": path_option}
    parser.add_argument("config", **of_config | config)
    # Without a default, argparse calls the overrides required in its message about a missing CONFIG.
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    return parser


def text_option(text: str) -> str:
    """Return the text of an option, checked by user_path. If user_path refuses it, argparse prints the reason."""
    try:
        return user_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, not {shown(text)}") from None


def path_option(text: str) -> Path:
    """Return the text of an option as a path, checked as in text_option."""
    return Path(text_option(text))


def flatten(tree: dict) -> dict[str, Any]:
    """Turn {section: {key: value}} into {"section.key": value}. Values outside a section keep their names."""
    flat = {}
    for name, value in tree.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _with(tree: dict, key: str, value: Any) -> dict:
    """Return a copy of ``tree`` in which the dotted ``key`` has ``value``. Raises InputError if ``key`` is a section.

    A key of three parts sets one member of a mapping; its other members stay the same.
    """
    section, dot, name = key.partition(".")
    if not dot:
        if key in _sections() and not (key == "tiny_model" and value is None):
            raise InputError(f"override {key}: is a section, not a key; write {key}.key=value")
        return tree | {key: value}
    before = tree[section] if isinstance(tree.get(section), dict) else {}
    option, dot, member = name.partition(".")
    if dot:
        field = _sections().get(section, Config).model_fields.get(option)
        known = before.get(option, field and field.default)
        value = (known if isinstance(known, dict) else {}) | {member: value}
    return tree | {section: before | {option: value}}


def _refuse_idle(keys: Iterable[str], idle: dict[str, str], where: str) -> None:
    """Raise InputError if any of ``keys`` are in ``idle``, which maps each idle key to the reason."""
    if unread := [
        f"{where}{key}: has no effect because {reason}; remove it" for key, reason in idle.items() if key in keys
    ]:
        raise InputError("; ".join(unread))


# Maps pydantic's error types to the kind of value that is needed.
NEEDED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (in quotes if YAML would read it as another type)",
    "string_too_short": "text that is not empty",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "dict_type": "{{NAME: VALUE, ...}}",
    "literal_error": "{expected}",
    "value_error": "{error}",
    "tuple_type": "a list such as [a, b]",
    "too_short": "a list of {min_length} or more values",
    "too_long": "a list of at most {max_length} values",
    "model_type": "a mapping of keys",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}


def _typed(tree: dict, where: str) -> Config:
    """Return ``tree``, as read from YAML, as a Config. Raises InputError with the first three faults.

    Each fault in the message begins with ``where``.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False)
        with_bad_members = {one["loc"][:-1] for one in found}
        paths = {one["loc"][:-1] for one in found if _of_function(one) and one["type"] == "value_error"}
        # For a key that takes a choice or a function, pydantic reports two faults. The one about the function is shown
        # if the function's path is wrong, otherwise the one about the choice. pydantic also calls a list too short if
        # all its members are wrong.
        faults = [
            where + _sentence(one)
            for one in found
            if _of_function(one) == (one["loc"][:-1] in paths)
            and not (one["type"] == "too_short" and one["loc"] in with_bad_members)
        ]
    raise InputError("; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else ""))


def _of_function(fault: Any) -> bool:
    return "constrained-str" in str(fault["loc"][-1])


def _sentence(fault: Any) -> str:
    """Return a message for one error of pydantic: the key, the kind of value needed, and the value found."""
    or_function = ", or FILE.py:NAME" * str(fault["loc"][-1]).startswith("literal[")
    section, *rest = where = fault["loc"][:-1] if or_function or _of_function(fault) else fault["loc"]
    key = str(section) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    if key in REPLACED:
        return f"{key}: is no longer a key; {REPLACED[key]}"
    if key in REMOVED:
        planted = " (the benchmark plants it: checks/planted_fault.py)" * (key in PLANTED)
        return f"{key}: is no longer a key, because its value is always {REMOVED[key]}{planted}; remove it"
    if fault["type"] in ("extra_forbidden", "invalid_key"):
        return f"{key}: unknown key; {_suggestion(str(where[-1]), '.'.join(map(str, where[:-1])))}"
    if fault["type"] == "missing":
        *outer, name = (part for part in where if isinstance(part, str))  # without the position in a list
        fields = (_sections()[".".join(outer)] if outer else Config).model_fields
        return f"{key}: missing; set it ({fields[name].description})"
    needed = NEEDED.get(fault["type"], fault["msg"]).format(**fault.get("ctx", {}))
    if fault.get("ctx", {}).get("pattern") == FUNCTION:
        needed = "FILE.py:NAME"
    return f"{key}: must be {needed}{or_function}, not {shown(fault['input'])}"


def _sections(model: type[Section] = Config, within: str = "") -> dict[str, type[Section]]:
    """Return the pydantic class of each section by its dotted name, including sections within sections."""
    found = {
        within + name: kind
        for name, field in model.model_fields.items()
        for kind in (field.annotation, *get_args(field.annotation))
        if isinstance(kind, type) and issubclass(kind, Section)
    }
    return found | {name: one for outer, kind in found.items() for name, one in _sections(kind, f"{outer}.").items()}


def unknown_checks(checks: ChecksConfig) -> list[str]:
    """Return a message for each name in checks.warn and checks.off that is not a check of run/tripwires.py."""
    return [
        f"checks.warn, checks.off: there is no check {name!r}; "
        f"did you mean {difflib.get_close_matches(name, CHECKS, 1, 0)[0]}?"
        for name in (*checks.warn, *checks.off)
        if name not in CHECKS
    ]


def _suggestion(name: str, section: str) -> str:
    """Suggest a replacement for an unknown key: the same key elsewhere, the most similar key here, or all keys here."""
    sections = _sections()
    if elsewhere := [f"{other}.{name}" for other, model in sections.items() if name in model.model_fields]:
        return f"did you mean {' or '.join(elsewhere)}?"
    known = list((sections[section] if section else Config).model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(known)}"


# ------------------------------------------------------------------------------------------------- the run's own record


# Removed keys, each with the value that is now fixed. Old records still contain them. The benchmark can plant the
# effects of the keys in PLANTED.
PLANTED = ("rollout.round_bits", "rollout.route_flips", "rollout.logit_noise")
REMOVED = {
    "parallel.pipeline": 1, "parallel.context": 1, "data.operand_low": 1,
    "data.prompt_template": "Question: {question}\nAnswer:", "tiny_model.words_per_batch": 64,
    "tiny_model.warm_start_lr": 3e-3, "data.operations_low": 1, "optim.min_lr_ratio": 0.1,
    "checks.unparsable_share": 0.95, "checks.truncated_share": 0.5,
    "checks.collapse_reward": 0.2, "checks.collapse_kl": 1.0, "checks.logp_gap_fp32": 1e-3,
    "checks.gradient_spike_factor": 20.0, "checks.entropy_floor": 1e-4, "checks.reward_constant_steps": 20,
    "checks.non_finite": "stop", "checks.surprise": "off", "checks.rounding": "off",
    "lora.dropout": 0.0, "optim.eps": 1e-8,
    "rollout.round_group": 32, "rollout.round_bits": 0, "rollout.route_flips": 0.0,
    "rollout.logit_noise": 0.0, "loss.score_centering": 0, "tiny_model.shared_expert_width": 64,
    "model.attention_shapes": "auto", "model.quantised": ["experts"], "aqn.router": "noisy", "aqn.bf16": "grid",
    "rollout.top_p": 1.0, "rollout.top_k": 0, "replay.reference": "replayed", "parallel.expert_tensor": 1,
    "rollout.ranks": 0,
}  # fmt: skip

# Keys that were replaced, each with an instruction.
REPLACED = {
    "train.tensorboard": "write train.trackers: [tensorboard] for true, or remove it for false",
    "rollout.ranks": "remove it, because every rank trains and samples (rollout.staleness=1 still samples with the "
    "policy of one step ago, which shows what sampling ahead costs in learning)",
} | {
    f"checks.{name}": f"list {name} in checks.warn or checks.off, or in neither to let it stop the run"
    for name in CHECKS
}

# Keys that a resumed run may change. They decide where it writes and how it is split, not what it computes.
MAY_CHANGE = frozenset(
    {"name", "device", "model.recompute", "optim.tokens_per_micro_batch", "eval.batch_size"}
    | {f"parallel.{key}" for key in ParallelConfig.model_fields}
    | {"rollout.tensor", "rollout.expert_parallel", "rollout.kv_cache_mib"}
    | {"train.out_dir", "train.checkpoint_every", "train.keep_last", "train.resume", "train.changed_inputs"}
    | {"train.completions_logged", "train.stall_seconds", "train.trackers", "train.profile_steps"}
    | REPLACED.keys()
    | {f"checks.{key}" for key in ChecksConfig.model_fields}
    | {key for key in REMOVED if key.startswith(("parallel.", "checks.", "model.attention_shapes"))}
)

# A resume may also change when and on which sets to evaluate, whether graphs are used, and the paths of files whose
# content is compared with inputs.json. Between two different runs, these keys still count as differences.
MAY_CHANGE_AT_RESUME = (
    MAY_CHANGE
    | {"eval.every", "eval.sets", "rollout.enforce_eager", "model.path", "loss.teacher"}
    | {f"data.{use}_path" for use in ("train", "test", "few_shot")}
)


def to_dict(cfg: Config) -> dict[str, Any]:
    """Return the sections of ``cfg`` with every key that the run reads, in the order of knobs.py.

    All values have the plain types of YAML, and load_config accepts them.
    """
    idle = idle_keys(cfg)
    return {
        name: {k: v for k, v in value.items() if f"{name}.{k}" not in idle} if isinstance(value, dict) else value
        for name, value in cfg.model_dump(mode="json", exclude_none=True).items()
    }


def to_yaml(cfg: Config) -> str:
    """Return the result of to_dict as the text of a configuration file."""
    return dump_yaml(to_dict(cfg))


def of_today(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration without the removed keys whose values equal those in REMOVED.

    ``recorded`` is a result of to_dict, perhaps from another version of the code.
    """
    return {
        name: {k: v for k, v in value.items() if REMOVED.get(f"{name}.{k}") != v} if isinstance(value, dict) else value
        for name, value in recorded.items()
    }


def changed_keys(old: dict, new: dict, may: Set[str] = MAY_CHANGE) -> list[str]:
    """Return a line "section.key: old -> new" for each key that differs and is not in ``may``.

    ``old`` and ``new`` are results of to_dict. If one of them lacks a key, it was recorded before the key existed,
    or the key is idle there. The default then counts as the value of this key.
    """
    before, after = flatten(of_today(old)), flatten(of_today(new))
    fields = {f"{name}.{key}": f for name, section in _sections().items() for key, f in section.model_fields.items()}
    defaults = {key: field.default for key, field in fields.items() if not field.is_required()}
    for key in sorted(defaults.keys() & (after.keys() ^ before.keys())):
        default = [*defaults[key]] if isinstance(defaults[key], tuple) else defaults[key]
        before.setdefault(key, default)
        after.setdefault(key, default)
    return [
        f"{key}: {shown(before.get(key))} -> {shown(after.get(key))}"
        for key in {**after, **before}
        if key not in may and before.get(key) != after.get(key)
    ]


def changes_at_resume(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """Return the lines of changed_keys in two lists: the changes that a resume refuses, and those that it accepts.

    A resume may increase train.steps if no schedule depends on it. If a change of train.steps is refused, its line
    gives the reason. A resume may neither add nor remove a teacher.
    """
    before, after = flatten(old).get("train.steps"), flatten(new)
    against = {
        "a resume can only add steps": type(before) is not int or after["train.steps"] < before,
        "optim.decay depends on it": after["optim.decay"] != "constant",
        "aqn.schedule depends on it": AqnConfig(schedule=after["aqn.schedule"]).falls,
    }
    reason = next((reason for reason, holds in against.items() if holds), "")
    may = MAY_CHANGE_AT_RESUME if reason else MAY_CHANGE_AT_RESUME | {"train.steps"}
    if flatten(old).get("loss.teacher") is None or after.get("loss.teacher") is None:
        may -= {"loss.teacher"}  # another path to the same teacher is accepted, another method is not
    lines = {line.partition(":")[0]: line for line in changed_keys(old, new)}
    refused = [f"{line} ({reason})" if key == "train.steps" else line for key, line in lines.items() if key not in may]
    return refused, [line for key, line in lines.items() if key in may]
