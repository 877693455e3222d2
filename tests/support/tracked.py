"""Print what the trackers of a run's folder contain, as their own packages read it; PYTHONPATH must have these.

python tracked.py RUN        {tracker: [[id, {step: {name: value}}] of each start]}; TensorBoard shows all as one
"""

import json
import sys
from collections import defaultdict
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
    sizes = {"scalars": 0, "tensors": 0}
    shown = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=sizes).Reload()
    steps: dict[int, dict] = defaultdict(dict)
    for name in shown.Tags()["scalars"]:
        for scalar in shown.Scalars(name):
            assert name not in steps[scalar.step], "a value is double"
            steps[scalar.step][name] = scalar.value
    for text in shown.Tensors("completions"):
        steps[text.step]["completions"] = text.tensor_proto.string_val[0].decode()
    return [[None, steps]]


def wandb(run_dir: Path) -> list:
    starts = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        run, steps = None, {}
        for record in records(WandbRecord, path):
            run = record.run.run_id if record.HasField("run") else run
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
                values = {key: value for key, value in row.items() if key[0] != "_" and "completions" not in key}
                values["completions"] = (path.parent / "files" / row["completions.path"]).read_text()
                steps[row["_step"]] = values
        starts.append([run, steps])
    return starts


def swanlab(run_dir: Path) -> list:
    starts = []
    for path in sorted(run_dir.glob("swanlab/run-*/*.swanlab")):
        run, steps = None, defaultdict(dict)
        for record in records(SwanRecord, path):
            run = record.start.id if record.HasField("start") else run
            if record.HasField("scalar"):
                steps[record.scalar.step][record.scalar.key] = record.scalar.value.number
        for step in steps:
            (text,) = path.parent.glob(f"media/html/{step:03d}-*")
            steps[step]["completions"] = text.read_text()
        starts.append([run, steps])
    return starts


if __name__ == "__main__":
    print(json.dumps({read.__name__: read(Path(sys.argv[1])) for read in (tensorboard, wandb, swanlab)}))
