"""Prints what the trackers of a run's folder hold, as their own packages read it; runs with these on PYTHONPATH.

python tracked.py RUN        {tracker: [[id, {step: {name: value}}] of each start]}; TensorBoard shows all as one
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from swanlab.proto.swanlab.record.v1.record_pb2 import Record as SwanRecord
from swanlab.sdk.internal.core_python.store import DataStoreReader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord


class Reader(DataStoreReader):
    """Reads wandb's files, too, which differ in the first seven bytes only."""

    def _read_header(self) -> None:
        self._index += len(self._fp.read(7))


def records(kind: type, path: Path) -> Iterator:
    reader = Reader()
    reader.open(path)
    yield from (kind.FromString(data) for data in reader)


def tensorboard(run_dir: Path) -> list:
    shown = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    steps: dict[int, dict] = {}
    for name in shown.Tags()["scalars"]:
        for scalar in shown.Scalars(name):
            assert name not in steps.setdefault(scalar.step, {}), "a value is double"
            steps[scalar.step][name] = scalar.value
    return [[None, steps]]


def wandb(run_dir: Path) -> list:
    starts = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        run, steps = None, {}
        for record in records(WandbRecord, path):
            run = record.run.run_id if record.HasField("run") else run
            if record.HasField("history"):
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                steps[row["_step"]] = {key: value for key, value in row.items() if not key.startswith("_")}
        starts.append([run, steps])
    return starts


def swanlab(run_dir: Path) -> list:
    starts = []
    for path in sorted(run_dir.glob("swanlab/run-*/*.swanlab")):
        run, steps = None, {}
        for record in records(SwanRecord, path):
            run = record.start.id if record.HasField("start") else run
            if record.HasField("scalar"):
                values = steps.setdefault(record.scalar.step, {})
                assert record.scalar.key not in values, "a value is double"
                values[record.scalar.key] = record.scalar.value.number
        starts.append([run, steps])
    return starts


if __name__ == "__main__":
    print(json.dumps({read.__name__: read(Path(sys.argv[1])) for read in (tensorboard, wandb, swanlab)}))
