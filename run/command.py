"""The command line of train_grpo.py, its exit codes, and the lines that it prints for an error."""

import functools
import traceback
from collections.abc import Callable

import parallel_setup
from facts.exits import InputError, Tripped
from inputs.config import command, command_line, resolve_config
from inputs.files import MOST_RANKS, of_the_user, one_line, report
from knobs import Config
from plan import doctor
from run import input_check
from runlog import trackers


def read(arguments: list[str], manual: str) -> Config | None:
    """Return the configuration of the run, or None after `--check`, whose result this function prints.

    ``manual`` is the text of `--help`.
    """
    parser = command_line("train_grpo.py", manual)
    parser.add_argument("--check", action="store_true", help="check the input, print the result and stop")
    parser.add_argument("--ranks", type=int, help="with --check: the number of ranks that the run will have")
    args = parser.parse_intermixed_args(arguments)
    rank = parallel_setup.check_launch()
    cfg, notes = resolve_config(args.config, args.overrides)
    if rank == 0:
        print("".join(f"note: {note}\n" for note in notes), end="", flush=True)
        trackers.refuse_missing(cfg.train.trackers)
    if args.ranks is not None and not (args.check and 1 <= args.ranks <= MOST_RANKS):
        raise InputError(
            f"--ranks: {args.ranks} cannot be used; give 1 or more, together with --check (torchrun starts ranks)"
        )
    if not args.check:
        return cfg
    if args.ranks is None:
        parallel_setup.refuse_one_rank(cfg.parallel, "give --check --ranks {}")
    answer = input_check.report(cfg, args.ranks or parallel_setup.launched_world_size())
    doctor.quick(cfg)  # after everything that could end the command
    print(answer, flush=True)
    return None


def exits(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Wrap ``main`` so that the command ends with the exit codes of a training run.

    The code is 2 for unusable input (after one line), 3 after the message of a tripwire, and 1 for any other error. A
    rank that makes no progress ends itself with 4. After a signal, the code is 128 + the number of the signal
    (runlog/progress.py).
    """

    @command
    @functools.wraps(main)
    def called(arguments: list[str]) -> int:
        try:
            return main(arguments)
        except (InputError, Tripped):  # one line, which `command` prints
            raise
        except Exception as error:
            if of_the_user(error):  # after the input was read, a library's file may be wrong; the traceback shows it
                passed = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
                cause = "" if read.__code__ in passed else traceback.format_exc()
                report(f"{cause}error: {one_line(error)}")
                return InputError.exit_code
            lost = lost_others(error)
            hint = (
                "another rank may have ended, and its message says why; the traceback of this rank:\n" if lost else ""
            )
            report(hint + traceback.format_exc(), late=lost)
            return 1

    return called


def lost_others(error: BaseException) -> bool:
    """Return whether ``error`` comes from a collective, so that another rank may have ended.

    gloo and HCCL raise a plain RuntimeError with different texts, so only the module that raised it shows this.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, RuntimeError) and frame.f_globals["__name__"].startswith("torch.distributed")
