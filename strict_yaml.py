"""YAML text -> plain values, read strictly: a value means what it looks like, and nothing given is dropped.

Used by config.py for the configuration file and for the values of `section.key=value`. Knows nothing of the knobs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from input_files import InputError, read_text, shown

__all__ = ["InputError", "dump_yaml", "parse_override", "parse_yaml", "read_file", "shown"]

LARGEST_MIB = 0.25  # a configuration has some 3 KiB; PyYAML takes 3 s for this
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # no file's name, no token, no UTF-8 can hold these

# YAML 1.2's plain scalars; PyYAML's own (1.1) make False of `no`, a date of `2024-01-01` and text of `1e-6`.
SCALARS = [
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|)$")),
    ("tag:yaml.org,2002:bool", re.compile(r"(true|True|false|False)$")),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$")),
    ("tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")),
]


class StrictLoader(yaml.SafeLoader):
    """SafeLoader with SCALARS' rules, to which a key given twice is an error, and an alias: few lines of aliases of
    aliases stand for more values than any memory holds."""

    yaml_implicit_resolvers = {None: SCALARS}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent) and (event := self.peek_event()).anchor in self.anchors:
            message = f"the alias *{event.anchor}: write its value out instead"
            raise yaml.composer.ComposerError(None, None, message, event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode) and UNUSABLE.search(node.value):
            message = f"found NUL or half a character in {shown(node.value)}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                message = f"key {key_node.value!r} given twice"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


class StrictDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else; lists and texts of several lines take one line."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: SCALARS}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, style='"' if "\n" in value else style)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text under StrictLoader; InputError with its line when it is not YAML."""
    try:
        return yaml.load(text, StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {' '.join((error.problem or str(error)).split())}") from None
    except Exception as error:  # PyYAML's constructors of !!int, !!timestamp and others fail in any way
        raise InputError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def read_file(path: str | Path) -> dict:
    """The mapping in the YAML file at ``path``, unchecked."""
    try:
        text = read_text(path, LARGEST_MIB)
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise InputError(f"{path}: expected a mapping of sections, found {shown(tree)}")
    return tree


def parse_override(item: str) -> tuple[str, Any]:
    """`section.key=value` -> (dotted key, value read as YAML)."""
    key, equals, text = item.partition("=")
    if not equals or not key or key.startswith("-") or UNUSABLE.search(key):
        raise InputError(f"override {shown(item)}: expected section.key=value")
    if " #" in text and text.lstrip()[:1] not in ("'", '"'):
        raise InputError(f"override {key}: YAML would drop what follows ' #' as a comment; put the value in quotes")
    return key, parse_yaml(text, f"override {key}") if text.strip() else ""


def dump_yaml(tree: dict) -> str:
    """The text of a YAML file that parse_yaml reads back to ``tree``, keys in their order."""
    layout = {"sort_keys": False, "allow_unicode": True, "default_flow_style": False, "width": 1000}
    return yaml.dump(tree, Dumper=StrictDumper, **layout)
