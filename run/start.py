"""The start of a run, before its device: the log, the heartbeat, the processes of the reward, and the signals."""

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
from run import input_check
from run.input_check import Inputs
from runlog import progress
from runlog.log import RunLog
from runlog.progress import Heartbeat
from tasks.scoring import Scorer
from weights import tiny_model


@dataclass
class Start:
    """The parts of a run that exist before the device is started. The methods check the input; call them in order."""

    cfg: Config
    log: RunLog  # it has no folder yet, so it only prints
    heartbeat: Heartbeat
    scorer: Scorer

    def check_settings(self) -> Architecture:
        """Check the settings, the reward and this machine after the device has started.

        Returns the architecture of the model. Raises InputError as run/input_check.py does.
        """
        cfg = self.cfg
        self.heartbeat.beat("the start of the device")
        parallel_setup.refuse_one_rank(self.cfg.parallel)
        arch = input_check.check_settings(cfg, parallel_setup.launched_world_size())
        input_check.check_answers(cfg.reward, cfg.data, cfg.eval, self.scorer)
        doctor.quick(cfg)
        self.heartbeat.beat("the checks of the settings")
        return arch

    def make_tiny_model(self, device: torch.device) -> None:
        """Create the model of cfg.tiny_model if it is set and does not exist. All ranks call this together."""
        cfg = self.cfg
        if cfg.tiny_model is not None:
            tiny_model.make(cfg.model.path, cfg.tiny_model, cfg.data, cfg.row_tokens, device, self.heartbeat.beat)

    def read_inputs(self, arch: Architecture) -> Inputs:
        """Read the tokenizer and the questions after all ranks have connected."""
        self.heartbeat.beat("the meeting of all ranks")
        return input_check.read_inputs(self.cfg, arch, self.scorer, self.heartbeat.beat, self.heartbeat.waiting)


@contextlib.contextmanager
def started(cfg: Config) -> Iterator[Start]:
    """Make a `Start` in this block. At the end of the block, log the run's error, if any, and close all parts."""
    log = RunLog(cfg, parallel_setup.launched_rank())
    heartbeat = Heartbeat(cfg.train.stall_seconds, log)
    progress.end_on_signals(log.reached, log.note)
    scorer = Scorer(cfg.reward, heartbeat.beat, cfg.rollout.environment)  # its processes start before the device
    try:
        yield Start(cfg, log, heartbeat, scorer)
    except Exception as error:
        log.note(f"{'stopped' if isinstance(error, Tripped) else 'error'}: {one_line(error)}")
        raise
    finally:
        scorer.close()
        heartbeat.stop()
        log.close()
