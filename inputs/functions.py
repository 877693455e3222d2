"""Functions that a configuration names as FILE.py:NAME: a reward, an environment, an advantage, a loss per token.

Only the named file and the files that it imports are run, never a file that the data or a model's folder names.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from modulefinder import ModuleFinder
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from facts.exits import InputError
from inputs.files import one_line, read_text

if TYPE_CHECKING:
    from torch import Tensor

    from knobs import LossConfig, RewardConfig, RolloutConfig

NEEDED = "give FILE.py:NAME, a Python file and a function in it"
# Names of metrics actor/NAME that the trainer itself measures for every loss.
MEASURED = {"policy_loss", "loss", "kl_loss", "teacher_kl", "entropy", "grad_norm", "lr"}
FINITE = "NaN or infinity; return finite numbers"


def load(key: str, named: str, *arguments: str) -> Callable[..., Any]:
    """Return the function named FILE.py:NAME. The file can import other modules from its folder.

    Raises InputError if the file does not exist, cannot be imported or lacks the function, or if the function does not
    take ``arguments``. The message begins with ``key``, the key of the configuration.
    """
    file, _, name = named.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise InputError(f"{key}: {file} does not exist; {NEEDED}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that none of its files replaces another module
    spec = importlib.util.spec_from_file_location(f"function_of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks up its module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{key}: {path}{line_of(error.__traceback__, path)}: {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise InputError(f"{key}: {path} has no function {name}; its functions are: {', '.join(defined) or 'none'}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InputError(f"{key}: {named}: {error}; define it as {name}({', '.join(arguments)})") from None
    return function


def line_of(trace: TracebackType | None, path: Path) -> str:
    """Return `, line N` for the last line of the file ``path`` in a traceback, or "" if the file is not in it."""
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if Path(frame.filename) == path]
    return f", line {lines[-1]}" if lines else ""


def files(reward: RewardConfig, loss: LossConfig, rollout: RolloutConfig) -> list[tuple[str, str, Path]]:
    """Return the existing files of all named functions, and the files that they import.

    For each file, return the key that names the function, the path relative to the folder of the named file, and the
    full path.
    """
    named = {
        "reward.function": reward.function,
        "loss.advantage": loss.advantage,
        "loss.kind": loss.kind,
        "rollout.environment": rollout.environment,
    }
    there = {key: Path(value.rpartition(":")[0]).resolve() for key, value in named.items() if value and ":" in value}
    return [
        (key, os.path.relpath(each, path.parent), each)
        for key, path in there.items()
        if path.is_file()
        for each in with_imports(path)
    ]


def with_imports(path: Path) -> list[Path]:
    """Return a Python file and all files that it imports, directly or not, from its folder or from PYTHONPATH.

    An import at any place in a file counts. Files in site-packages are left out, because environment.json already lists
    the packages that pip has installed. Raises InputError if the file is not valid Python.
    """
    folders = [str(path.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    finder = ModuleFinder(path=folders)
    try:
        compile(read_text(path), path, "exec")
        finder.run_script(str(path))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path}: {one_line(error)}; {NEEDED}") from None
    found = {Path(module.__file__).resolve() for module in finder.modules.values() if module.__file__}  # type: ignore[attr-defined]
    return sorted(each for each in found if "site-packages" not in each.parts)


# ---------------------------------------------------------------------------------------- what a function returns


@functools.cache
def advantage(value: str) -> str | Callable[[Tensor], Tensor]:
    """Return ``value``, which is loss.advantage, if it names a formula. Otherwise return the function that it names.

    The returned function raises InputError in place of any other error. P is the number of prompts, and G of
    completions per prompt.

    (P, G) -> (P, G)
    """
    return _checked("loss.advantage", value, "rewards", _check_advantages) if ":" in value else value


@functools.cache
def token_loss(value: str) -> str | Callable[[Any], tuple[Tensor, dict[str, Tensor]]]:
    """Return ``value``, which is loss.kind, if it names a formula. Otherwise return the function that it names.

    The returned function takes grpo.LossInputs, and raises InputError in place of any other error.
    """
    return _checked("loss.kind", value, "inputs", _check_losses) if ":" in value else value


def _checked(key: str, named: str, argument: str, check: Callable[[Any, Any], str]) -> Callable[[Any], Any]:
    """Load a function and wrap it to raise InputError for its exceptions and for results that ``check`` refuses."""
    function = load(key, named, argument)

    def called(given: Any) -> Any:
        try:
            result = function(given)
        except Exception as error:
            sys.stderr.write(traceback.format_exc())
            where = line_of(error.__traceback__, Path(named.rpartition(":")[0]))
            raise InputError(f"{key}: {named}{where}: {type(error).__name__}: {one_line(error)}") from error
        if fault := check(given, result):
            raise InputError(f"{key}: {named} returned {fault}")
        return result

    return called


def try_out(loss: LossConfig, rollout: RolloutConfig) -> None:
    """Call the user's advantage and loss functions once, with small tensors. Raises InputError as the run would.

    InputError is also raised if the losses are not finite, or give the log-probs no gradient.
    """
    of_rewards, of_tokens = advantage(loss.advantage), token_loss(loss.kind)
    if not (callable(of_rewards) or callable(of_tokens)):
        return
    import torch

    generator = torch.Generator().manual_seed(0)
    if callable(of_rewards):
        rewards = torch.rand(rollout.prompts_per_step, rollout.group_size, generator=generator)
        rewards[0] = 1.0  # most runs have groups whose rewards are equal
        of_rewards(rewards)
    if callable(of_tokens):
        from grpo import LossInputs

        logp, noise = -torch.rand(2, 2, 8, generator=generator)
        better = torch.tensor([[1.0], [-1.0]]).expand(2, 8)
        clip = loss.clip_low, loss.clip_high, loss.dual_clip
        given = LossInputs(logp.requires_grad_(), logp.detach() + 0.1 * (noise + 0.5), better, torch.ones(2, 8), *clip)
        losses, _ = of_tokens(given)
        if fault := _gradient_fault(losses, logp):
            raise InputError(f"loss.kind: {loss.kind} returned {fault}")


def _gradient_fault(losses: Tensor, logp: Tensor) -> str:
    """Describe a fault of the losses or of their gradient with respect to ``logp``. Return "" if there is none."""
    import torch

    if not losses.isfinite().all():
        return FINITE
    if not losses.requires_grad:
        return "losses without a gradient; compute them from logp, and do not detach them"
    (gradient,) = torch.autograd.grad(losses.sum(), logp, allow_unused=True)
    if gradient is None or not gradient.any():
        return "losses whose gradient by logp is 0; compute them from logp, and do not detach it"
    return "" if gradient.isfinite().all() else "losses whose gradient by logp is NaN or infinite"


def compare_orders(loss: LossConfig) -> None:
    """Raise InputError unless the user's advantage and loss functions are reproducible and independent of row order.

    Each row must get the same result in any order of the rows. For an advantage, the same holds for the order of the
    completions of a question. For a loss, each row must get the same result with fewer other rows, because the number
    of ranks and the size of micro-batches decide which rows come together.
    """
    import torch

    from grpo import LossInputs

    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(4).roll(1), torch.arange(6).roll(1)
    of_rewards, of_tokens = advantage(loss.advantage), token_loss(loss.kind)
    if callable(of_rewards):
        rewards = torch.randint(0, 3, (4, 6), generator=generator) / 2
        plain, again = of_rewards(rewards), of_rewards(rewards)
        turned = of_rewards(rewards[rows][:, columns])
        alike = plain.equal(again) and turned.allclose(plain[rows][:, columns], atol=1e-5)
        _require(alike, "loss.advantage", loss.advantage)
    if callable(of_tokens):
        mask = (torch.arange(6) < torch.tensor([[6], [3], [1], [5]])).float()
        logp, old_logp, better = (torch.randn(4, 6, generator=generator) * mask for _ in range(3))
        clip = loss.clip_low, loss.clip_high, loss.dual_clip

        def losses(order: Tensor) -> Tensor:
            given = LossInputs(logp[order], old_logp[order], better[order], mask[order], *clip)
            return of_tokens(given)[0] * mask[order]

        plain, again = losses(torch.arange(4)), losses(torch.arange(4))
        if not plain.isfinite().all():
            raise InputError(f"loss.kind: {loss.kind} returned {FINITE}")
        alike = plain.equal(again) and losses(rows).allclose(plain[rows], atol=1e-5)
        _require(alike, "loss.kind", loss.kind)
        if not losses(torch.arange(2)).allclose(plain[:2], atol=1e-5):
            raise InputError(
                f"loss.kind: {loss.kind} depends on the other rows of its micro-batch; return the same result for each "
                "row with any other rows, because loss.aggregate divides by the tokens of the whole update"
            )


def _require(alike: bool, key: str, named: str) -> None:
    if not alike:
        raise InputError(
            f"{key}: {named} depends on the order of its rows, or on chance; return the same result for each row in "
            "any order"
        )


def _shape(result: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the name of the type of any other value."""
    import torch

    return tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__


def _check_advantages(rewards: Tensor, result: Any) -> str:
    found = _shape(result)
    if found != tuple(rewards.shape):
        return f"{found} for the advantages; return a tensor of shape {tuple(rewards.shape)}"
    return "" if result.isfinite().all() else f"{FINITE}, also for a group whose rewards are equal"


def _check_losses(inputs: Any, result: Any) -> str:
    shape = tuple(inputs.logp.shape)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        return f"{_shape(result)}; return the losses {shape} and a dictionary of metrics {shape}"
    if own := MEASURED & result[1].keys():
        return f"the metric {min(own)}, which the trainer measures itself; give it another name"
    for name, found in {"the losses": result[0], **result[1]}.items():
        if _shape(found) != shape:
            return f"{_shape(found)} for {name}; return a tensor of shape {shape}"
    return ""
