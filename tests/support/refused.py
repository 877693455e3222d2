"""Get the message with which a configuration is refused."""

from pathlib import Path

import pytest

from facts.exits import InputError
from inputs.config import load_config


def refusal(path: Path | str, *overrides: str) -> str:
    """The message of one line with which load_config refuses."""
    with pytest.raises(InputError) as caught:
        load_config(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message
    return message
