"""An example of a tool, for models whose chat template has tools, such as Qwen3.

It reads calls in JSON and answers with a tool turn.

data: {chat_template_kwargs: {enable_thinking: false, tools: [{type: function, function: {name: calculate,
       description: Computes an expression., parameters: {type: object, required: [expression],
       properties: {expression: {type: string}}}}}]}}
rollout: {environment: examples/environment_tool.py:tool, max_turns: 4}
"""

import json
import re
from typing import Any

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
EXPRESSION = re.compile(r"[-+*/(). 0-9]{1,64}")


def tool(turns: list[str], row: dict[str, Any]) -> str | None:
    """Return the results of the calls in the policy's last turn, one per line.

    If the turn contains no call, return None, which ends the completion.
    """
    calls = CALL.findall(turns[-1])
    return "\n".join(map(result, calls)) if calls else None


def result(call: str) -> str:
    try:
        expression = json.loads(call)["arguments"]["expression"]
        if not EXPRESSION.fullmatch(expression) or "**" in expression:
            return "error: use only digits, + - * / and brackets"
        return f"{eval(expression, {'__builtins__': {}}):.10g}"  # only digits, signs and brackets
    except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {error}"
