"""The device memory of each phase, on a device that counts it. The fullest phase of the fullest rank is logged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from saved import config_in

from hardware import device as devices
from run import opening
from runlog.log import RunLog
from runlog.progress import Heartbeat, StepTimer


def test_memory_in_use_is_torchs_peak_plus_memory_outside_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = []
    module = SimpleNamespace(
        mem_get_info=lambda: (40 * 2**30, 61 * 2**30),  # 21 GiB are taken, 16 of them by torch's pool
        memory_reserved=lambda: 16 * 2**30,
        max_memory_allocated=lambda: 12 * 2**30,
        reset_peak_memory_stats=lambda: reset.append(1),
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    assert devices.peak_memory_gib(SimpleNamespace(type="npu")) == 17.0 and reset == [1]
    assert devices.peak_memory_gib(torch.device("cpu")) is None


def test_a_step_has_the_peak_of_its_fullest_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([3.0, 1.0, 4.0, 5.5, 2.0])
    monkeypatch.setattr(devices, "peak_memory_gib", lambda device: next(peaks))
    monkeypatch.setattr(devices, "moment", lambda device: 0.0)
    heartbeat = Heartbeat(0, RunLog(config_in(tmp_path), 0))
    timer = StepTimer(heartbeat, 0, torch.device("meta"))
    for phase in ("sync", "generate", "update", "update"):
        timer.end_phase(phase)
    heartbeat.stop()
    assert timer.peaks == {"between_steps": 3.0, "sync": 1.0, "generate": 4.0, "update": 5.5}
    assert timer.peak() == (5.5, "update")
    assert opening.device_memory((5.5, "update")) == {"perf/peak_device_gib": 5.5, "perf/peak_device_phase": "update"}
    monkeypatch.undo()
    assert StepTimer(heartbeat, 0, torch.device("cpu")).peak() == () and opening.device_memory(()) == {}


def test_a_phase_ends_when_the_device_has_done_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is done at once; the device ends its work after 1, 3, 6 and 10 s, and the step after 15 s."""
    times = iter([0.0, 1e3, 3e3, 6e3, 10e3, 15e3])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = next(times)

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: Event) -> float:
            return later.time - self.time

    monkeypatch.setattr(torch, "npu", SimpleNamespace(Event=Event), raising=False)
    monkeypatch.setattr(devices, "peak_memory_gib", lambda device: None)
    timer = StepTimer(Heartbeat(0, RunLog(config_in(tmp_path), 0)), 0, SimpleNamespace(type="npu"))
    for phase in ("sync", "reference", "update", "reference"):
        timer.end_phase(phase)
    timing = timer.timing(new_tokens=30)
    seconds = {"timing/sync_s": 1, "timing/reference_s": 2 + 4, "timing/update_s": 3, "timing/step_s": 15}
    assert timing == seconds | {"perf/tokens_per_s": 2}
