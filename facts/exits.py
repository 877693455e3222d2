"""The errors that end a command with their own exit codes; docs/checks.md says what to do."""

STALLED = 4  # the exit code of a rank without progress (runlog/progress.py); any other error ends with 1


class InputError(ValueError):
    """Raised if something that the user gave (configuration, data, weights, checkpoint, layout) cannot be used.

    The message is one line: where, what was found, and what to do.
    """

    exit_code = 2


class Tripped(RuntimeError):
    """Raised if the run would be silently wrong. The message says what was found and what to look at."""

    exit_code = 3


class AqnError(Tripped):
    """Raised if the noise differs from the noise that the configuration requests."""
