"""What accompanies a run from before its device is started: the log, the heartbeat, the processes of the reward."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import parallel_setup
from facts.architectures import Architecture
from facts.exits import Tripped
from inputs.files import one_line
from knobs import Config
from plan import doctor
from run import check
from run.check import Inputs
from runlog import progress
from runlog.log import RunLog
from runlog.progress import Heartbeat
from tasks.scoring import Scorer
from weights import tiny_model


@dataclass
class Start:
    """What a run needs of its start, and the checks of the input, each at its time."""

    cfg: Config
    log: RunLog  # which has no folder yet, and only prints
    heartbeat: Heartbeat
    scorer: Scorer
    arch: Architecture | None = None  # after check_settings

    def check_settings(self) -> None:
        """Judge the settings, the reward and this machine, when the device is started. InputError, see run/check.py."""
        cfg = self.cfg
        self.heartbeat.beat("the start of the device")
        self.arch = check.check_settings(cfg, parallel_setup.launched_world_size())
        check.check_answers(cfg.reward, cfg.data, cfg.eval, self.scorer)
        doctor.quick(cfg)
        self.heartbeat.beat("the checks of the settings")

    def make_tiny_model(self, device: torch.device) -> None:
        """Make the model of cfg.tiny_model, if it is asked for and absent, in the world of all ranks. Collective."""
        cfg = self.cfg
        if cfg.tiny_model is not None:
            tiny_model.make(cfg.model.path, cfg.tiny_model, cfg.data, cfg.row_tokens, device, self.heartbeat.beat)

    def read_inputs(self) -> Inputs:
        """The tokenizer and the questions, when all ranks have met."""
        self.heartbeat.beat("the meeting of all ranks")
        return check.read_inputs(self.cfg, self.arch, self.scorer, self.heartbeat.beat)


@contextlib.contextmanager
def started(cfg: Config) -> Iterator[Start]:
    """A `Start` that notes the error that ends the run, and closes what it has opened."""
    log = RunLog(cfg, parallel_setup.launched_rank())
    heartbeat = Heartbeat(cfg.train.stall_seconds, log)
    progress.end_on_signals(log.reached, log.note)
    scorer = Scorer(cfg.reward, heartbeat.beat)  # its processes begin before the device does
    try:
        yield Start(cfg, log, heartbeat, scorer)
    except Exception as error:
        log.note(f"{'stopped' if isinstance(error, Tripped) else 'error'}: {one_line(error)}")
        raise
    finally:
        scorer.close()
        heartbeat.stop()
        log.close()
