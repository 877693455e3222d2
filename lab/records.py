"""What a record of a finished run says, and how its results follow from the rows of its steps.

A record has two parts. `Record` says what ran, on which machine, by which command, and gives the main results. The
rows, one per step, hold metrics, times, evaluations, and which answers were right. lab/store.py keeps both in results/.
"""

import json
import re
import statistics
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config import hash_of
from inputs.files import InputError, shown
from run_record import variant_name, wilson

VERSIONS = ("torch", "megatron", "transformers", "numpy", "vllm", "mind")  # prefixes of packages that results depend on
AXES = ("tensor", "expert", "expert_tensor")
OF_TRAINING = {"reward": "reward/mean", "repeated": "rollout/repeated_frac"}  # kind of outcome -> metric of each step
ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}"
GOLD, MARKS = "eval/gold", {"greedy": "eval/greedy_right", "sampled": "eval/sampled_right"}
RIGHT, WRONG = "+", "-"
KINDS = (*MARKS, "curve", *OF_TRAINING)  # of outcomes, see `scores`
Score = Annotated[float, Field(ge=0, le=1, multiple_of=1)]
Content = TypeVar("Content", bound=BaseModel)


class Part(BaseModel):
    """A part of a stored file. Missing fields, unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Answers(Part):
    """A line of eval_outcomes.jsonl: the scores of the answers to a question, 1 for right and 0 for wrong."""

    model_config = ConfigDict(extra="ignore")
    step: int
    set: str = ""  # of eval.sets; "" for the main one
    question: int
    gold: str
    greedy: Score
    sampled: list[Score]


class Completion(Part):
    """A line of completions.jsonl."""

    model_config = ConfigDict(extra="ignore")
    question: str
    gold: str
    completion: str
    reward: float
    tokens: int


class Share(Part):
    accuracy: float = Field(ge=0, le=1, description="mean score over questions and answers")
    low: float = Field(description="95 % Wilson interval over the questions")
    high: float


class Evaluation(Part):
    step: int = Field(ge=0, description="number of finished steps")
    num_questions: int = Field(ge=1)
    samples: int = Field(ge=0, description="sampled answers per question; 0: greedy only")
    greedy: Share
    sampled: Share | None

    @property
    def kind(self) -> str:
        """sampled or greedy: the accuracy to report, sampled where there is one."""
        return "sampled" if self.sampled else "greedy"


class Inputs(Part):
    model: dict[str, str] = Field(min_length=1, description="file of the model's folder -> sha256")
    data: dict[str, str] = Field(description="train and test -> sha256; empty: generated from the configuration")
    functions: dict[str, str] = Field({}, description="key and file of a function of FILE.py:NAME -> sha256")


class Environment(Part):
    """environment.json, which run_record.py writes, in the order of its keys."""

    model_config = ConfigDict(extra="allow")
    python: str
    packages: dict[str, str]
    platform: str
    cpu: str
    cores: int | None
    cores_usable: int
    memory_gib: float
    world_size: int = Field(ge=1, description="number of ranks")
    variables: dict[str, str] = Field(description="environment variables that change results or speed")

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that results depend on."""
        return {name: version for name, version in self.packages.items() if name.startswith(VERSIONS)}


class Record(Part):
    """What the row of step 0 holds beside the metrics, in the columns record/*."""

    schema_version: int = Field(3, ge=3, le=3)
    id: str = Field(pattern=f"^{ID}$")
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$", description="when the run began")
    command: str = Field(min_length=1)
    result: str = Field(description="the last line that the run printed")
    checks_fired: dict[str, str] = Field(description="check -> its first warning")
    seed: int
    device: str = Field(pattern="^(cpu|cuda|npu)$", description="as the configuration names it; not auto")
    layout: dict[str, int] = Field(description="number of ranks, and the parallel sizes")
    steps: int = Field(ge=1)
    first: Evaluation
    last: Evaluation
    seconds_per_step: float = Field(gt=0, description="median over steps, without evaluations")
    tokens_per_second: float = Field(ge=0, description="median over steps: generated tokens / time of the whole step")
    peak_memory_gib: float = Field(gt=0, description="largest resident memory of rank 0's process")
    first_step: int = Field(0, ge=0, le=1, description="number of the first step in the files; before version 0.2: 0")
    resumed: int = Field(ge=0, description="how often the run was stopped and resumed")
    config_hash: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the settings that change the result, config.py")
    config: dict[str, Any] = Field(description="the complete configuration, as in config.yaml")
    inputs: Inputs
    environment: Environment
    files: dict[str, str] = Field(description="file of the run's folder -> sha256, computed when the run ended")

    @cached_property
    def group(self) -> str:
        """The variant: the id without its seed."""
        return variant_name(self.id)

    @cached_property
    def fault(self) -> str:
        """The fault that was planted into the run on purpose; empty for any other run."""
        return planted_fault(self.command)


def planted_fault(command: str) -> str:
    """The fault with which a command trains on purpose (benchmarks/planted_fault.py); empty for any other command."""
    found = re.search(r"\bplanted_fault\.py (\w+)", command)
    return found[1] if found else ""


class Benchmark(Part):
    """A file that benchmarks/bench_cases.py writes."""

    place: int = Field(0, ge=0, description="number of benchmarks that were there when it was added")
    about: str = Field(min_length=1, description="what was measured, a sentence")
    command: str = Field(min_length=1)
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    dirty: bool = Field(description="whether the tree had changes that are in no commit")
    machine: dict[str, Any]
    table: list[dict[str, str | int | float]] = Field(min_length=1, description="rows of equal keys, as printed")
    measured: dict[str, Any] = Field(description="the measurements behind the table")


@dataclass(frozen=True)
class Run:
    """A finished run: its record and its steps, read from results/ or from the run's own folder."""

    record: Record
    rows: list[dict[str, Any]]  # one per step, as merged() describes them

    @cached_property
    def steps(self) -> Any:
        """The rows as a pandas.DataFrame, indexed by step."""
        import pandas

        return pandas.DataFrame(self.rows).set_index("step")


# --------------------------------------------------------------------------------------------------- the rows of a run


@cache
def file_of(key: str) -> str:
    """The file of a run's folder that holds this key of a row."""
    if key.startswith("eval/") and "eval/" + key.rpartition("/")[2] in (GOLD, *MARKS.values()):
        return "eval_outcomes.jsonl"
    section = key.split("/")[0]
    return {**dict.fromkeys(("timing", "perf", "samplers"), "timing.jsonl"), "eval": "eval.jsonl"}.get(
        section, "metrics.jsonl"
    )


def of_set(key: str, name: str) -> str:
    """The key of a set of eval.sets for that of the main set, whose ``name`` is ""."""
    return f"eval/{name}/{key.removeprefix('eval/')}" if name else key


def unmerged(rows: list[dict[str, Any]], first: int) -> dict[str, str]:
    """The inverse of merged: the files of a run's folder with its numbers. ``first``: the number of the first step."""
    texts = dict.fromkeys(("metrics.jsonl", "timing.jsonl", "eval.jsonl", "eval_outcomes.jsonl"), "")
    for row in rows:
        for name in ("metrics.jsonl", "timing.jsonl", "eval.jsonl"):
            line = {key: row[key] for key in row if file_of(key) == name and key not in ("step", "completions")}
            step = row["step"] + (0 if name == "eval.jsonl" else first)
            texts[name] += json.dumps({"step": step, **line}) + "\n" if line else ""
        greedy_key = MARKS["greedy"].removeprefix("eval")
        for name in [key[len("eval") : -len(greedy_key)].lstrip("/") for key in row if key.endswith(greedy_key)]:
            greedy, sampled = (row[of_set(key, name)] for key in MARKS.values())
            count = len(sampled) // max(len(greedy), 1)
            for place, answer in enumerate(greedy):
                samples = [float(mark == RIGHT) for mark in sampled[place * count : (place + 1) * count]]
                line = {"step": row["step"], **({"set": name} if name else {})}
                line |= {"question": place, "gold": rows[0][of_set(GOLD, name)][place]}
                line |= {"greedy": float(answer == RIGHT), "sampled": samples}
                texts["eval_outcomes.jsonl"] += json.dumps(line) + "\n"
    return texts


def evaluation(rows: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """The row with the evaluation after ``step`` steps; InputError when there is none."""
    for row in rows:
        if row["step"] == step and "eval/num_questions" in row:
            return row
    raise InputError(f"eval.jsonl: 0 evaluations after step {step}; needed: one")


def scores(run: Run, kind: str, step: int | None = None) -> np.ndarray:
    """Score of each question after ``step`` steps (the last by default), the mean of its answers.  -> (n,)

    ``kind`` curve: the mean of the sampled score over all evaluations after the first step.  -> (n,)
    ``kind`` reward, repeated: the mean over all steps of the training reward, or of the share of completions that
    repeat an earlier one of their group.  -> (1,)
    """
    if metric := OF_TRAINING.get(kind):
        if metric not in run.steps:
            raise InputError(f"{run.record.id}: no {metric}, which was not measured yet; needed: newer runs")
        return np.array([run.steps[metric].mean()])
    if kind == "curve":
        return np.mean([scores(run, "sampled", each) for each in evaluated(run)], axis=0)
    row = evaluation(run.rows, run.record.steps if step is None else step)
    if not row[MARKS[kind]]:
        raise InputError(f"{run.record.id}: no {kind} answers (eval.samples is 0); there are: greedy")
    return shares_right(row[MARKS[kind]], len(row[MARKS["greedy"]]))


def evaluated(run: Run) -> list[int]:
    """The numbers of steps after which the run was evaluated, without the evaluation before the first."""
    return [row["step"] for row in run.rows if row["step"] > 0 and "eval/num_questions" in row]


def shares_right(marks: str, questions: int) -> np.ndarray:
    """Share of right answers of each question, from the marks of all answers.  -> (questions,)"""
    return np.array([mark == RIGHT for mark in marks], dtype=float).reshape(questions, -1).mean(1)


def _evaluation(rows: list[dict[str, Any]], step: int) -> Evaluation:
    """The evaluation after ``step`` steps; InputError if its summary and the marks of its answers disagree."""
    row = evaluation(rows, step)
    n, samples = row["eval/num_questions"], row["eval/samples"]
    shares: dict[str, Share | None] = {"sampled": None}
    for kind, answers in (("greedy", n), ("sampled", n * samples)):
        marks, stated = row[MARKS[kind]], row.get(f"eval/{kind}_accuracy", 0.0)
        accuracy = marks.count(RIGHT) / max(len(marks), 1)
        if len(marks) != answers or abs(accuracy - stated) > 1e-6:
            raise InputError(
                f"eval.jsonl: step {step}: {kind} accuracy {stated} of {n} questions, "
                f"but the outcomes give {accuracy} of {len(marks)}"
            )
        if answers:
            low, high = wilson(accuracy, n)
            shares[kind] = Share(accuracy=accuracy, low=low, high=high)
    return Evaluation(step=step, num_questions=n, samples=samples, **shares)


def summary(rows: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The fields of a record that follow from its rows."""
    for name, key in (("metrics", "reward/mean"), ("timing", "timing/step_s")):
        if (found := [row["step"] for row in rows if key in row]) != list(range(steps)):
            raise InputError(f"{name}.jsonl: {len(found)} steps; needed: {steps}, one line each")
    return {
        "first": _evaluation(rows, 0),
        "last": _evaluation(rows, steps),
        "seconds_per_step": statistics.median(row["timing/step_s"] for row in rows[:steps]),
        "tokens_per_second": statistics.median(row["perf/tokens_per_s"] for row in rows[:steps]),
        "peak_memory_gib": max(row["perf/peak_rss_gib"] for row in rows[:steps]),
    }


def stated(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The fields of a record that follow from its configuration and the number of ranks."""
    return {
        "config_hash": hash_of(config),
        "seed": config["train"]["seed"],
        "device": config["device"],
        "layout": {"ranks": ranks} | {axis: config["parallel"].get(axis, 1) for axis in AXES},
        "steps": config["train"]["steps"],
    }


def validated(model: type[Content], content: Any, where: str | Path) -> Content:
    """``content`` of the file ``where`` as a pydantic model; InputError that names the first fault."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "all of it"
        raise InputError(f"{where}: {place}: {fault['msg']}, found {shown(fault['input'])}") from None
