"""An example of an environment: the calculator of GSM8K's annotations.

If the policy writes `<<48/2=`, the environment adds `24>>`.

rollout: {environment: examples/environment_calculator.py:calculator, stop: ["="]}
"""

import re
from typing import Any

CALL = re.compile(r"<<([-+*/(). 0-9]{1,64})=\Z")


def calculator(turns: list[str], row: dict[str, Any]) -> str | None:
    """Return the result of the calculator call that ends the policy's turn.

    If the turn ends with an `=` that belongs to no valid call, return "", so that the policy continues. If the turn
    ends with an end token, return None.
    """
    if not turns[-1].endswith("="):  # an end token has ended the turn, so the completion ends
        return None
    call = CALL.search(turns[-1])
    if call is None or "**" in call[1] or "//" in call[1]:
        return ""
    try:
        return f"{eval(call[1], {'__builtins__': {}}):.10g}>>"  # only digits, signs and brackets
    except (ArithmeticError, SyntaxError, TypeError):
        return ""
