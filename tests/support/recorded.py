"""Run folders for the tests of report.py: the files of a finished training, with chosen outcomes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from source import ROOT

import run_record
from config import load_config
from lab import tables

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ENVIRONMENT = {
    "python": "3.11.7",
    "packages": {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "numpy": "2.3.5"},
    "platform": "Linux",
    "cpu": "AMD EPYC",
    "cores": 2,
    "cores_usable": 2,
    "memory_gib": 23.5,
    "world_size": 2,
    "variables": {"OMP_NUM_THREADS": "1"},
}


def make_run(
    out: Path,
    name: str,
    seed: int = 0,
    after: float = 0.9,
    before: float = 0.3,
    questions: int = 200,
    overrides: tuple[str, ...] = (),
    steps: int = 4,
    luck: int | None = None,
    checks: dict[str, str] | None = None,
    commit: str = COMMIT,
) -> Path:
    """A finished run of configs/tiny_cpu.yaml, with chosen probabilities of a right answer.

    ``before`` is the probability at the start, ``after`` at the end. ``luck`` seeds the answers; without it, ``seed``
    and ``name`` do.
    """
    from config import config_hash, to_yaml

    folder = out / f"{name}-20300102-030405"
    folder.mkdir(parents=True)
    given = [f"name={name}", f"train.seed={seed}", f"train.steps={steps}", f"eval.num_questions={questions}"]
    cfg = load_config(ROOT / "configs" / "tiny_cpu.yaml", [*given, *overrides])
    generator = np.random.default_rng([seed, *name.encode()] if luck is None else luck)
    command = f"torchrun --nnodes=1 --nproc_per_node=2 train_grpo.py configs/tiny_cpu.yaml {' '.join(given)}\n"
    for file, text in {
        "config.yaml": to_yaml(cfg),
        "command.txt": command,
        "git.patch": "",
        "environment.json": json.dumps(ENVIRONMENT, indent=1) + "\n",
        "inputs.json": json.dumps({"model": {"model.safetensors": "ab" * 32}, "data": {}}, indent=1) + "\n",
        "git.json": json.dumps({"commit": commit, "dirty": False}) + "\n",
        "run.json": json.dumps({"name": name, "config_hash": config_hash(cfg)}) + "\n",
        "log.txt": "",
    }.items():
        (folder / file).write_text(text)
    for step in range(steps):
        reward = before + (after - before) * (step + generator.random()) / steps
        entropy = 1 / (step + 1) if step else 1 + 1e-12 * zlib.crc32(name.encode())  # the same metrics in no other run
        metrics = {"reward/mean": reward, "rollout/logp_gap_mean": 1e-7, "actor/entropy": entropy}
        metrics |= {"actor/loss": reward / 10, "actor/grad_norm": 2 * reward}
        timing = {"timing/generate_s": 0.1, "timing/step_s": 0.5 + step / 10, "perf/tokens_per_s": 2000.0 + step}
        answer = {"question": "1 + 1 <b>?</b>", "gold": "2", "completion": f"</script>#### {step}", "reward": step % 2}
        append(folder / "metrics.jsonl", {"step": step, **metrics})
        append(folder / "timing.jsonl", {"step": step, **timing, "perf/peak_rss_gib": 0.5})
        for tokens in (5, 6):
            append(folder / "completions.jsonl", {"step": step, **answer, "tokens": tokens + step})
    for step, chance in ((0, before), (steps, after)):
        right = (generator.random((questions, 2)) < chance).astype(float)
        summary = {"eval/num_questions": questions, "eval/samples": 1}
        for kind, column in (("greedy", 0), ("sampled", 1)):
            summary[f"eval/{kind}_accuracy"] = right[:, column].mean()
        append(folder / "eval.jsonl", {"step": step, **summary})
        for place, (greedy, sampled) in enumerate(right.tolist()):
            row = {"step": step, "question": place, "gold": str(place), "greedy": greedy, "sampled": [sampled]}
            append(folder / "eval_outcomes.jsonl", row)
    seal(folder, checks)
    return folder


def append(path: Path, row: dict) -> None:
    with open(path, "a") as file:
        file.write(run_record.json_line(row))


def seal(folder: Path, checks: dict[str, str] | None = None) -> None:
    """Write finished.json, with the checksums of the files as they are now."""
    done = {"result": "arithmetic accuracy 30.0 % -> 90.0 %", "checks": checks or {}}
    (folder / "finished.json").write_text(json.dumps(done | {"sha256": run_record.checksums(folder)}))


def rewrite(path: Path, change: Callable[[dict], object], target: Path | None = None) -> None:
    """Change the record in a file of results/ unchecked. ``change`` gets its fields, and its steps as "rows"."""
    (run,) = tables.content_of(path.read_bytes(), path).runs
    record = run.record.model_dump(mode="json") | {"rows": [dict(row) for row in run.rows]}
    change(record)
    rows = record.pop("rows")
    columns: tables.Columns = {"id": [record["id"]] * len(rows)}
    columns |= {tables.ABOUT + name: [value, *[None] * (len(rows) - 1)] for name, value in record.items()}
    columns |= {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    (target or path).write_bytes(tables.encoded(columns))
