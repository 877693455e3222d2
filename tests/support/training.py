"""Short training runs for tests: a random tiny model, a reward that it can earn, and forked worlds of any layout.

The model has 8 heads and 16 experts, so it fits every layout of world.py. It has 32 stop tokens, so its answers have
many lengths.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import world
from planting import Plant

import parallel_setup
import reward_gsm8k
import train_grpo
from facts.exits import InputError, Tripped
from inputs.files import read_tensors
from knobs import Config
from lab import curves
from run import input_check
from run.start import Start
from runlog import completions as kept
from runlog import log, run_record
from runlog.log import RunLog
from runlog.progress import Heartbeat
from tasks.scoring import Scorer
from weights import tiny_model

SIZES = dict(
    vocab_size=304,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    num_experts=16,
    experts_per_token=2,
    expert_width=16,
    warm_start_steps=0,
)
STOP_TOKENS = list(range(2, 34))  # about one of nine tokens of a random model ends its answer
real_score = reward_gsm8k.score


def config(model: Path, out_dir: Path, **changes: object) -> Config:
    """A run that takes seconds: 6 prompts x 4, three steps. ``changes``: section__key=value."""
    tree = {
        "name": "tiny",
        "device": "cpu",
        "model": {"path": str(model), "dtype": "fp32"},
        "parallel": {"timeout_seconds": 120},
        "data": {
            "source": "arithmetic",
            "max_prompt_tokens": 96,
            "num_train": 40,
            "num_test": 9,
            "operand_high": 20,
        },
        "rollout": {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 12},
        "lora": {"rank": 4, "alpha": 8.0, "expert_rank": 4},
        "loss": {"kl_coef": 0.05},
        "optim": {"lr": 1e-2, "warmup_steps": 1, "prompts_per_update": 6, "tokens_per_micro_batch": 1024},
        "eval": {"samples": 1, "batch_size": 9},
        "train": {"steps": 3, "out_dir": str(out_dir), "checkpoint_every": 0},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def make_tiny_model(cfg: Config, beat: Callable[[str], None] = lambda done: None) -> None:
    """The model of ``cfg.tiny_model`` at its path. Collective."""
    tiny_model.make(cfg.model.path, cfg.tiny_model, cfg.data, cfg.row_tokens, torch.device("cpu"), beat)


def make_model(folder: Path, architecture: str = "qwen3_moe", **sizes: int) -> Path:
    """Make a random tiny model in ``folder``, in a forked process."""
    tiny = {f"tiny_model__{key}": value for key, value in (SIZES | sizes).items()}
    cfg = config(folder, folder, tiny_model__architecture=architecture, **tiny)
    in_world("TP1", make_tiny_model, cfg)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP_TOKENS}))
    return folder


def lenient_score(response: str, gold: str, method: str = "strict") -> float:
    """The true reward, but 1 for every second wrong answer too, so that a random model earns rewards."""
    return max(real_score(response, gold, method), float(sum(response.encode()) % 2))


def run_all(jobs: dict[str, tuple[str, Config]]) -> dict[str, Path]:
    """Train every (layout, configuration) and return the run folders. There is one forked world per number of ranks."""
    placed = [(layout, in_layout(cfg, layout)) for layout, cfg in jobs.values()]
    for ranks in sorted({world.LAYOUTS[layout][0] for layout, _ in placed}):
        chosen = [job for job in placed if world.LAYOUTS[job[0]][0] == ranks]
        in_world(chosen[0][0], train_each, chosen)
    return {label: only_run(cfg) for label, (_, cfg) in jobs.items()}


def in_layout(cfg: Config, layout: str) -> Config:
    """The configuration with the sizes of one of world.LAYOUTS."""
    _, tensor, expert = world.LAYOUTS[layout]
    sizes = {"tensor": tensor, "expert": expert}
    return cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update=sizes)})


def in_world(layout: str, function: Callable, *args) -> list:
    """Run ``function(*args)`` on every rank of a forked world of the layout's size, and return the results."""
    import_before_the_fork()
    return world.run(world.LAYOUTS[layout][0], function, *args)


def import_before_the_fork() -> None:
    """Import here, once, the slow packages that every rank would import."""
    import torch._dynamo  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401


def train_each(jobs: list[tuple[str, Config]], lenient: bool = True) -> None:
    """Run the jobs one after the other; called on every rank of a world."""
    lighten(lenient)
    for layout, cfg in jobs:
        start(cfg, layout)
        parallel_setup.close_layout()


def start(cfg: Config, layout: str) -> None:
    """A training in the world of this process, which is open."""
    with contextlib.closing(Scorer(cfg.reward, environment=cfg.rollout.environment)) as scorer:
        arch = input_check.check_settings(cfg, world.LAYOUTS[layout][0])
        input_check.check_answers(cfg.reward, cfg.data, cfg.eval, scorer)
        parallel = world.open_layout(layout)
        with contextlib.closing(RunLog(cfg, parallel.rank)) as log_of_run:  # the next run may resume this one
            start = Start(cfg, log_of_run, Heartbeat(0, log_of_run), scorer)
            train_grpo.train(*train_grpo.wire(start, arch, parallel))


def lighten(lenient: bool = True) -> None:
    """Make runs cheaper in this forked process: no figures, only the inputs recorded, a lenient reward if asked."""
    if lenient:
        reward_gsm8k.score = lenient_score
    curves.draw_curves, log.write_records = lambda *args: None, record_inputs


def record_inputs(folder: Path, cfg: Config, *_: object) -> None:
    """Record the checksums that a resumed start compares."""
    (folder / "inputs.json").write_text(json.dumps(run_record.inputs(run_record.input_files(cfg))))


def raised(plant: Plant, cfg: Config, layout: str = "TP1", lenient: bool = True) -> list[tuple[type, str]]:
    """For every rank, the error that ended a run with the fault of ``plant``; InputError and "" if none did."""
    return raised_each({"": (plant, cfg, layout)}, lenient)[""]


def raised_each(jobs: dict[str, tuple[Plant, Config, str]], lenient: bool = True) -> dict[str, list[tuple[type, str]]]:
    """The same of several runs, one after the other in one forked world: their layouts have equally many ranks."""
    placed = {name: (plant, in_layout(cfg, layout), layout) for name, (plant, cfg, layout) in jobs.items()}
    by_rank = in_world(next(iter(jobs.values()))[2], run_each_planted, placed, lenient)
    return {name: [answers[name] for answers in by_rank] for name in jobs}


def run_each_planted(jobs: dict[str, tuple[Plant, Config, str]], lenient: bool) -> dict[str, tuple[type, str]]:
    """The part of ``raised_each`` that runs on every rank."""
    lighten(lenient)
    return {name: run_planted(*job) for name, job in jobs.items()}


def run_planted(plant: Plant, cfg: Config, layout: str) -> tuple[type, str]:
    """The error that ends this run with the fault of ``plant``, which is removed afterwards."""
    patch = pytest.MonkeyPatch()
    try:
        plant(patch)
        start(cfg, layout)
    except (Tripped, InputError) as error:
        return type(error), str(error)
    finally:
        patch.undo()
        parallel_setup.close_layout()
    return InputError, ""


def rewound(run_dir: Path, folder: Path, steps: int) -> Path:
    """A copy of a finished run in the state of a run that was killed after its checkpoint of ``steps`` steps."""
    copy = shutil.copytree(run_dir, folder / run_dir.name)
    (copy / "finished.json").unlink()
    for path in (copy / "checkpoints").iterdir():
        if path.name != f"step-{steps:06d}":
            shutil.rmtree(path)
    return copy


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def whole(run: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    """The whole tensors of a kind of file in the checkpoint after ``step`` steps."""
    return dict(read_tensors(checkpoint_of(run, step) / f"{kind}.safetensors"))


def only_run(cfg: Config) -> Path:
    """The only run folder in out_dir."""
    (folder,) = Path(cfg.train.out_dir).glob(f"{cfg.name}-*")
    return folder


def metrics(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_metrics(found: Path, expected: Path, relative: float = 1e-4) -> None:
    """Every number of metrics.jsonl agrees, most to ``relative``; counts, samples and evaluations agree exactly."""
    rows, wanted = metrics(found), metrics(expected)
    assert len(rows) == len(wanted)
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys()
        gaps = {key: abs(row[key] - want[key]) for key in want}
        wrong = {key: (row[key], want[key]) for key, gap in gaps.items() if not gap <= 1e-6 + relative * abs(want[key])}
        assert not wrong, (row["step"], wrong)
    for name in ("eval.jsonl", "eval_outcomes.jsonl"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    for kind in ("step", "eval"):
        assert completions(found, kind) == completions(expected, kind) != []


def completions(run_dir: Path, kind: str = "step") -> list[dict]:
    """The rows of completions/, without what is computed from log-probs, which layouts round differently."""
    rows = [row for path in kept.files(run_dir, kind).values() for row in kept.read(path)]
    return [{key: value for key, value in row.items() if key not in ("logp", "teacher_kl")} for row in rows]


RECORDS = ("metrics.jsonl", "moe.jsonl", "eval.jsonl", "eval_outcomes.jsonl")


def assert_same_bytes(found: Path, expected: Path, records: Iterable[str] = RECORDS) -> None:
    """These files of two runs have the same bytes, and some."""
    for name in records:
        assert (found / name).read_bytes() == (expected / name).read_bytes() != b"", name
    files = [{path.name: path.read_bytes() for path in run.glob("completions/*.gz")} for run in (found, expected)]
    assert files[0] == files[1] != {}
