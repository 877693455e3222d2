"""Run folders for the tests of report.py: the files of a finished training run, with chosen outcomes."""

import json
import subprocess
import zlib
from pathlib import Path

import numpy as np
from source import ROOT

from inputs.config import load_config, to_yaml
from knobs import Config
from lab import records
from runlog import completions, run_record

JUDGED = {"parsable": True, "tokens": 5, "finish": "stop", "dropped": False, "parts": {}}
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
    luck: int | None = None,
    commit: str = COMMIT,
) -> Path:
    """A finished run of four steps of configs/tiny_cpu.yaml, with chosen probabilities of a right answer.

    ``before`` is the probability at the start, ``after`` at the end. ``luck`` seeds the answers; without it, ``seed``
    and ``name`` do. A run of an even seed has a key in its config.yaml that is gone since.
    """
    folder = out / f"{name}-20300102-030405"
    folder.mkdir(parents=True)
    given = [f"name={name}", f"train.seed={seed}", "train.steps=4", f"eval.num_questions={questions}"]
    cfg = load_config(ROOT / "configs" / "tiny_cpu.yaml", [*given, *overrides])
    generator = np.random.default_rng([seed, *name.encode()] if luck is None else luck)
    lines: dict[str, list[dict]] = {name: [] for name in ("metrics", "timing", "eval", "eval_outcomes")}
    for step in range(4):
        at = {"step": step + 1}
        reward = before + (after - before) * (step + generator.random()) / 4
        entropy = 1 / (step + 1) if step else 1 + 1e-12 * zlib.crc32(name.encode())  # the same metrics in no other run
        metrics = {"reward/mean": reward, "rollout/logp_gap_mean": 1e-7, "actor/entropy": entropy}
        timing = {"timing/generate_s": 0.1, "timing/step_s": 0.5 + step / 10, "perf/tokens_per_s": 2000.0 + step}
        answer = {"id": "train:7", "sample": 0, "question": "1 + 1 <b>?</b>", "gold": "2", "reward": step % 2}
        rows = [at | answer | JUDGED | {"correct": step % 2 == 1, "completion": f"</pre>#### {step}"}]
        rows.append(at | answer | JUDGED | {"correct": False, "completion": "no"})
        completions.write(folder, "step", step + 1, rows)
        lines["metrics"].append(at | {**metrics, "actor/loss": reward / 10, "actor/grad_norm": 2 * reward})
        lines["timing"].append(at | {**timing, "perf/peak_rss_gib": 0.5})
    for step, chance in ((0, before), (4, after)):
        right = (generator.random((questions, 2)) < chance).astype(float)
        shares = dict(zip(("eval/greedy_accuracy", "eval/sampled_accuracy"), right.mean(0), strict=True))
        lines["eval"].append({"step": step, "eval/num_questions": questions, "eval/samples": 1, **shares})
        lines["eval_outcomes"] += [
            {"step": step, "question": place, "gold": str(place), "greedy": greedy, "sampled": [sampled]}
            for place, (greedy, sampled) in enumerate(right.tolist())
        ]
        answers = [
            {"step": step, "id": f"test:{place}", "sample": i, "question": f"{place} <b>?</b>", "gold": str(place)}
            | JUDGED
            | {"reward": x, "correct": x == 1, "completion": f"answer {x}"}
            for place, row in enumerate(right.tolist())
            for i, x in enumerate(row)
        ]
        completions.write(folder, "eval", step, answers)
    texts = {f"{name}.jsonl": "".join(map(run_record.json_line, rows)) for name, rows in lines.items()}
    texts |= {
        "config.yaml": to_yaml(cfg) if seed % 2 else by_an_older_version(cfg),
        "command.txt": f"torchrun --nproc_per_node=2 train_grpo.py configs/tiny_cpu.yaml {' '.join(given)}\n",
        "git.patch": "",
        "environment.json": json.dumps(ENVIRONMENT, indent=1) + "\n",
        "inputs.json": json.dumps({"model": {"model.safetensors": "ab" * 32}, "data": {}}, indent=1) + "\n",
        "git.json": json.dumps({"commit": commit, "dirty": False}) + "\n",
        "run.json": json.dumps({"name": name}) + "\n",
    }
    for file, text in texts.items():
        (folder / file).write_text(text)
    seal(folder)
    return folder


def by_an_older_version(cfg: Config) -> str:
    """config.yaml as a version wrote it that had one key more, which always had the value of today."""
    return to_yaml(cfg).replace("optim:\n", "optim:\n  eps: 1.0e-08\n")


def seal(folder: Path) -> None:
    """Write finished.json, with the checksums of the files as they are now."""
    done = {"result": "arithmetic accuracy 30.0 % -> 90.0 %", "checks": {"entropy": "step 2: <low>"}}
    (folder / "finished.json").write_text(json.dumps(done | {"sha256": run_record.checksums(folder)}))


def replaced(path: Path, old: str, new: str, count: int = -1) -> None:
    """Replace a text in a file of a run, and seal the run again."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))
    seal(path.parent)


def add_variants(project: Path) -> None:
    """Records of two variants of three seeds in project/results: the second one is better."""
    made = [
        make_run(project.with_name("out"), f"{name}-seed{seed}", seed, after, questions=40, overrides=change)
        for name, after, change in (("base", 0.4, ()), ("better", 0.95, ("lora.rank=8",)))
        for seed in range(3)
    ]
    records.add(made, project / "results", "variants")


# --------------------------------------------------------------------------------------------------------------- git


def git(folder: Path, *arguments: str) -> str:
    """Output of a git command, run as a person who does not exist."""
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit(folder: Path, *how: str) -> str:
    """Commit everything.  -> the name of the commit"""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "A commit", *how)
    return git(folder, "rev-parse", "HEAD").strip()
