"""Run configuration: one YAML file read strictly into the knobs of knobs.py, `section.key=value` on the command line.

    python config.py configs/tiny_cpu.yaml optim.lr=2e-3        prints the resolved configuration, exit 2 on an error

An unknown key, a wrong type, values that cannot work together (config_rules.py), or a key that the run would not read
stops it before any weight is read. Imports no torch.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from config_rules import LAYOUT_RULES, OTHER_RULES, Rules, idle_keys, problems
from input_files import BAD_INPUT, InputError, dump_yaml, parse_override, read_file, refused, shown
from knobs import ChecksConfig, Config, ParallelConfig, Section

# ------------------------------------------------------------------------------------------------------------ loading


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    notes: list[str] | None = None,
    rules: Rules = LAYOUT_RULES + OTHER_RULES,
) -> Config:
    """The file at ``path`` with ``section.key=value`` overrides applied, every value checked; InputError otherwise.

    The file must be right on its own. A key of the file that only the overrides made idle takes its default again and
    is reported in ``notes`` (appended to); an idle key in the file itself or among the overrides is an error.
    """
    notes = [] if notes is None else notes
    file_tree = read_file(path)
    file_cfg = _typed(file_tree, f"{path}: ")
    _refuse_idle(flatten(file_tree), file_cfg, f"{path}: ")

    tree = copy.deepcopy(file_tree)
    overridden = _apply_overrides_(tree, overrides, notes)
    cfg = _typed(tree, "override ")
    _refuse_idle(overridden, cfg, "override ")
    for key, reason in idle_keys(cfg).items():
        section, name = key.split(".")
        if name in (tree.get(section) or {}):
            del tree[section][name]
            notes.append(f"{key}: not read, {reason}")
    cfg = _typed(tree, "")
    if found := problems(cfg, rules):
        raise InputError("; ".join(found))
    return cfg


def flatten(tree: dict) -> dict[str, Any]:
    """{section: {key: value}} -> {"section.key": value}; values outside a section keep their name."""
    flat = {}
    for name, value in tree.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _apply_overrides_(tree: dict, overrides: Sequence[str], notes: list[str]) -> list[str]:
    """Sets each override in ``tree``; returns the dotted keys that were given."""
    given: list[str] = []
    for item in overrides:
        key, value = parse_override(item)
        section, dot, name = key.partition(".")
        if key in given:
            notes.append(f"{key}: given twice on the command line, the last one counts")
        given.append(key)
        if key == "tiny_model" and value is None:
            tree[key] = None
        elif not dot and key in _sections():
            raise InputError(f"override {key}: this is a section; expected {key}.key=value")
        elif not dot:
            tree[key] = value
        elif isinstance(tree.setdefault(section, {}), dict | None):
            tree[section] = {**(tree[section] or {}), name: value}
        else:
            raise InputError(f"override {key}: unknown key; {section} is a single value")
    return given


def _refuse_idle(keys: Iterable[str], cfg: Config, where: str) -> None:
    if idle := [f"{where}{key}: not read, {reason}" for key, reason in idle_keys(cfg).items() if key in keys]:
        raise InputError("; ".join(idle))


# what pydantic calls it -> what is needed
NEEDED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (in quotes, if it looks like something else)",
    "string_too_short": "text",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text like {pattern}",
    "literal_error": "{expected}",
    "tuple_type": "a list: [a, b]",
    "too_short": "at least {min_length} members",
    "too_long": "at most {max_length} members",
    "model_type": "a mapping of keys",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}


def _typed(tree: dict, where: str) -> Config:
    """The Config of a raw tree; InputError with the first few faults in one line, each led by ``where``."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        faults = [_sentence(fault) for fault in error.errors(include_url=False)]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    raise InputError("; ".join(where + fault for fault in faults[:3]) + more)


def _sentence(fault: Any) -> str:
    """One of pydantic's faults in this project's words: key, what was found, what is needed."""
    section, *rest = fault["loc"]
    key = str(section) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    if fault["type"] in ("extra_forbidden", "invalid_key"):
        return f"{key}: unknown key; {_suggestion(*fault['loc'])}"
    if fault["type"] == "missing":
        return f"{key}: missing; needed: {_description(*fault['loc'][:2])}"
    needed = NEEDED.get(fault["type"], fault["msg"]).format(**fault.get("ctx", {}))
    return f"{key}: expected {needed}, found {shown(fault['input'])}"


def _sections() -> dict[str, type[Section]]:
    """Section name -> its model."""
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in Config.model_fields.items()}
    return {n: k for n, options in kinds.items() for k in options if isinstance(k, type) and issubclass(k, Section)}


def _description(section: str, key: str = "") -> str:
    fields = _sections()[section].model_fields if key else Config.model_fields
    return fields[key or section].description or ""


def _suggestion(*loc: Any) -> str:
    """What the writer of an unknown key may have meant: its section, or the nearest known key."""
    sections, name = _sections(), str(loc[-1])
    known = list(sections[loc[0]].model_fields if len(loc) > 1 else Config.model_fields)
    if elsewhere := [f"{section}.{name}" for section, model in sections.items() if name in model.model_fields]:
        return f"did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"


# ------------------------------------------------------------------------------------------------- the run's own record


# A resumed run may change these: where it writes, how it is laid out and batched, not what it computes.
MAY_CHANGE = frozenset(
    {"name", "device", "model.recompute", "optim.tokens_per_micro_batch", "eval.batch_size"}
    | {f"parallel.{key}" for key in ParallelConfig.model_fields}
    | {"rollout.tensor", "rollout.expert_parallel", "rollout.kv_cache_mib"}
    | {"train.out_dir", "train.checkpoint_every", "train.keep_last", "train.resume", "train.changed_inputs"}
    | {"train.completions_logged", "train.tensorboard", "train.stall_seconds"}
    | {f"checks.{key}" for key in ChecksConfig.model_fields}
)


def to_dict(cfg: Config) -> dict[str, Any]:
    """Every key that the run reads, in field order, as plain values; load_config accepts it back."""
    idle = idle_keys(cfg)
    tree = {}
    for name, value in cfg.model_dump(mode="json", exclude_none=True).items():
        is_section = isinstance(value, dict)
        tree[name] = {k: v for k, v in value.items() if f"{name}.{k}" not in idle} if is_section else value
    return tree


def to_yaml(cfg: Config) -> str:
    """to_dict as the text of a configuration file."""
    return dump_yaml(to_dict(cfg))


def config_hash(cfg: Config) -> str:
    """sha256 (hex) of what the run computes: all keys that it reads but MAY_CHANGE."""
    fixed = {key: value for key, value in flatten(to_dict(cfg)).items() if key not in MAY_CHANGE}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def changed_keys(old: dict, new: Config) -> list[str]:
    """One "section.key: old -> new" for each key outside MAY_CHANGE that differs; ``old`` is an earlier to_dict."""
    before, after = flatten(old), flatten(to_dict(new))
    keys = [key for key in {**after, **before} if key not in MAY_CHANGE and before.get(key) != after.get(key)]
    return [f"{key}: {shown(before.get(key))} -> {shown(after.get(key))}" for key in keys]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the resolved configuration; notes and errors go to stderr. Returns the exit code, 2 on an InputError."""
    parser = argparse.ArgumentParser(description="Print the resolved configuration.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    notes: list[str] = []
    try:
        cfg = load_config(args.config, args.overrides, notes)
    except BAD_INPUT as error:
        return refused(error)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(to_yaml(cfg), end="")
    return 0


# --------------------------------------------------------------------------------------------------------- random draws


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from ``key``: the same on every machine and Python, unlike hash()."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


if __name__ == "__main__":
    sys.exit(main())
