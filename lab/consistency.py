"""Whether a record agrees with itself: its parts give the files of the run, whose checksums it holds.

An edited record no longer has its checksums. A record whose checksums were edited, too, counts as another record: only
the history tells that it was not there first (lab/audit.py).
"""

import hashlib
import json
import re
from typing import Any

from config import hash_of
from input_files import dump_yaml
from lab.records import AXES, GOLD, MARKS, RIGHT, Run, file_of
from run_record import json_line


def contradictions(run: Run) -> list[str]:
    """One sentence for each statement of a record that another part of it contradicts."""
    record = run.record
    config, train = record.config, record.config["train"]
    seed = re.search(r"-seed(\d+)$", record.id)
    said: dict[str, tuple[Any, Any]] = {  # field -> what it holds, what follows from the rest of the record
        "config_hash": (record.config_hash, hash_of(config)),
        "seed": (record.seed, train["seed"]),
        "id": (int(seed[1]) if seed else record.seed, record.seed),
        "steps": (record.steps, train["steps"]),
        "device": (record.device, config["device"]),
        "layout": (record.layout, _layout(record.environment.world_size, config["parallel"])),
    }
    faults = [
        f"{field}: found {found}; needed: {needed}, from the configuration"
        for field, (found, needed) in said.items()
        if found != needed
    ]
    texts = {
        "config.yaml": dump_yaml(config),
        "command.txt": record.command + "\n",
        "environment.json": json.dumps(record.environment.model_dump(mode="json"), indent=1) + "\n",
        "inputs.json": json.dumps(record.inputs.model_dump(mode="json"), indent=1) + "\n",
        "git.json": json.dumps({"commit": record.commit, "dirty": False}) + "\n",
        "run.json": json.dumps({"name": config["name"], "config_hash": record.config_hash}) + "\n",
        **unmerged(run.rows),
    }
    for name, text in texts.items():
        if record.files.get(name) != hashlib.sha256(text.encode()).hexdigest():
            faults.append(f"{name}: the record does not give the file whose sha256 it holds")
    data = record.inputs.data
    if "train" in data and data["train"] == data.get("test"):
        faults.append("inputs: the training data are the test data; needed: other questions")
    clean = hashlib.sha256(b"").hexdigest()
    patches = {"git.patch": None} | {name: known for name, known in record.files.items() if name.endswith("git.patch")}
    faults += [
        f"{name}: not the empty patch of a clean source; needed: a run of a commit without changes"
        for name, known in patches.items()
        if known != clean
    ]
    return faults


def _layout(ranks: int, parallel: dict[str, int]) -> dict[str, int]:
    return {"ranks": ranks} | {axis: parallel.get(axis, 1) for axis in AXES}


def unmerged(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The inverse of records.merged: the files of a run's folder that hold numbers, from the rows of its record."""
    texts = dict.fromkeys(("metrics.jsonl", "timing.jsonl", "eval.jsonl", "eval_outcomes.jsonl"), "")
    for row in rows:
        for name in ("metrics.jsonl", "timing.jsonl", "eval.jsonl"):
            line = {key: row[key] for key in row if file_of(key) == name and key not in ("step", "completions")}
            texts[name] += json_line({"step": row["step"], **line}) if line else ""
        greedy, sampled = (row.get(key, "") for key in MARKS.values())
        count = len(sampled) // max(len(greedy), 1)
        for place, answer in enumerate(greedy):
            samples = [float(mark == RIGHT) for mark in sampled[place * count : (place + 1) * count]]
            line = {"step": row["step"], "question": place, "gold": rows[0][GOLD][place]}
            texts["eval_outcomes.jsonl"] += json_line(line | {"greedy": float(answer == RIGHT), "sampled": samples})
    return texts
