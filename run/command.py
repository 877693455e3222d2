"""How train_grpo.py starts and ends: the order of a start, its exit codes, and what an error prints."""

import contextlib
import traceback
from collections.abc import Callable

import parallel_setup
from facts.exits import InputError, Tripped
from inputs.config import command, command_line, resolve_config
from inputs.files import MOST_RANKS, of_the_user, one_line, report
from inputs.rules import side_of
from knobs import Config
from plan import doctor
from run import check, opening, sampling_ranks
from run.bridge import Bridge
from run.opening import Run
from runlog import progress, trackers
from runlog.log import RunLog
from runlog.progress import Heartbeat
from tasks.scoring import Scorer
from weights import tiny_model


def start(cfg: Config, train: Callable[[Run], None]) -> None:
    """Check the input, start the device, join the other ranks, and ``train``."""
    ranks, rank = parallel_setup.launched_world_size(), parallel_setup.launched_rank()
    log = RunLog(cfg, rank)
    side = side_of(cfg, ranks, rank) if cfg.rollout.ranks else None
    bridge = Bridge(side, cfg.train, cfg.parallel) if side else None
    heartbeat = Heartbeat(cfg.train.stall_seconds, log, bridge.note_progress if bridge else lambda: None)
    progress.end_on_signals(log.reached, log.note)
    scorer = Scorer(cfg.reward, heartbeat.beat)  # its processes begin before the device does
    try:
        parallel_setup.start_device(cfg.device, cfg.train)
        heartbeat.beat("the start of the device")
        arch = check.check_settings(cfg, ranks)
        check.check_answers(cfg.reward, cfg.data, cfg.eval, scorer)
        doctor.quick(cfg)
        heartbeat.beat("the checks of the settings")
        samples = bridge is not None and bridge.samples
        with contextlib.ExitStack() as world:
            with heartbeat.waiting():
                device = world.enter_context(parallel_setup.open_world(cfg.device, cfg.train, cfg.parallel, side))
            if cfg.tiny_model is not None and not samples:
                tiny_model.make(cfg.model.path, cfg.tiny_model, cfg.data, cfg.row_tokens, device, heartbeat.beat)
            if bridge:
                with heartbeat.waiting():
                    bridge.open(heartbeat)
            parallel = parallel_setup.open_layout((side.cfg if side else cfg).parallel, device)
            heartbeat.beat("the meeting of all ranks")
            inputs = check.read_inputs(cfg, arch, scorer, heartbeat.beat)
            if bridge and samples:
                sampling_ranks.open_samplers(cfg, parallel, heartbeat, inputs, bridge).serve()
            else:
                train(opening.open_run(cfg, parallel, heartbeat, inputs, bridge))
    except Exception as error:
        log.note(f"{'stopped' if isinstance(error, Tripped) else 'error'}: {one_line(error)}")
        raise
    finally:
        scorer.close()
        heartbeat.stop()
        log.close()


@command
def main(arguments: list[str], train: Callable[[Run], None], manual: str) -> int:
    """Train, or check the input, as the ``arguments`` of train_grpo.py say.

    Exit code 0: done; 2: input that cannot be used, in one line; 3: a tripwire's message; 1: any other error.

    A rank that stands still ends itself with 4, and a signal ends it with 128 + its number (runlog/progress.py).
    """
    parser = command_line("train_grpo.py", manual)
    parser.add_argument("--check", action="store_true", help="check the input and stop")
    parser.add_argument("--ranks", type=int, help="with --check: the number of ranks of the run")
    args = parser.parse_intermixed_args(arguments)
    trains = False
    try:
        rank = parallel_setup.check_launch()
        cfg, notes = resolve_config(args.config, args.overrides)
        if rank == 0:
            print("".join(f"note: {note}\n" for note in notes), end="", flush=True)
            trackers.refuse_missing(cfg.train.trackers)
        if args.ranks is not None and not (args.check and 1 <= args.ranks <= MOST_RANKS):
            raise InputError(f"--ranks: found {args.ranks}; needed: 1 or more, and --check: torchrun starts the ranks")
        if args.check:
            said = check.report(cfg, args.ranks or parallel_setup.launched_world_size())
            doctor.quick(cfg)  # after what would end the command
            print(said, flush=True)
        else:
            trains = True
            start(cfg, train)
    except (InputError, Tripped):  # one line, which `command` prints
        raise
    except Exception as error:
        if of_the_user(error):
            cause = traceback.format_exc() if trains else ""
            report(f"{cause}error: {one_line(error)}")
            return InputError.exit_code
        lost = lost_others(error)
        hint = "perhaps another rank ended, and its message says why; the traceback of this one:\n" if lost else ""
        report(hint + traceback.format_exc(), late=lost)
        return 1
    return 0


def lost_others(error: BaseException) -> bool:
    """Whether ``error`` comes from a collective, so that perhaps another rank has ended.

    gloo and HCCL raise a plain RuntimeError, in words of their own; so only the place where it was raised tells.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    collectives = "torch.distributed", "run.bridge"  # which has groups of its own
    return isinstance(error, RuntimeError) and frame.f_globals["__name__"].startswith(collectives)
