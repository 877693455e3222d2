"""One or several paths as the value of a key: a text, or a list of texts. Imports nothing of this project."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator


def _checked(value: Any) -> str | tuple[str, ...]:
    """A text as it is, a list of texts as a tuple; ValueError with what is needed for all other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(path, str) and path for path in value):
        return tuple(value)
    raise ValueError("a path or a list of paths")


Paths = Annotated[str | tuple[str, ...], BeforeValidator(_checked)]


def listed(paths: Paths | Path) -> tuple[str, ...]:
    """Each of one or several paths."""
    return paths if isinstance(paths, tuple) else (str(paths),)
