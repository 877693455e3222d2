"""The calculator of GSM8K's annotations, as an environment: the policy writes `<<48/2=`, and `24>>` follows.

rollout: {environment: examples/environment_calculator.py:calculator, stop: ["="]}
"""

import re
from typing import Any

CALL = re.compile(r"<<([-+*/(). 0-9]{1,64})=\Z")


def calculator(turns: list[str], row: dict[str, Any]) -> str | None:
    """The result of the call that the policy's turn ends with; "" after another `=`, where the policy goes on."""
    if not turns[-1].endswith("="):  # an end token ends the completion
        return None
    call = CALL.search(turns[-1])
    if call is None or "**" in call[1] or "//" in call[1]:
        return ""
    try:
        return f"{eval(call[1], {'__builtins__': {}}):.10g}>>"  # digits, signs and brackets alone
    except (ArithmeticError, SyntaxError, TypeError):
        return ""
