"""Measures accuracy on held-out questions with the engine and reward of training, but without noise on the weights.

The policy answers each question once greedily and k times by sampling. The sampled answers give a mean accuracy and
pass@k. A training run also stores the outcome of every question.

    torchrun --nproc_per_node=N evaluate.py CONFIG [section.key=value ...]     measure model.path without training
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence

# PYTHONSAFEPATH and `python -P` leave the folder of this file out.
sys.path.insert(0, __file__.rpartition("/")[0])

from runlog import progress

if __name__ == "__main__":  # before the other imports, which take seconds
    progress.end_on_signals(lambda: "before the end of the evaluation; the same command starts it again")

import torch

import data_gsm8k
import parallel_setup
import rollout
from data_gsm8k import Question, Questions
from engines import factory
from engines.interface import Completion, Engine
from facts.architectures import tensor_shapes
from facts.seeds import derive_seed
from hardware import device as devices
from hardware import quantisation
from inputs import hf_config
from inputs.config import command, command_line, resolve_config
from inputs.rules import refuse_first, trainer_problems
from knobs import Config, EvalConfig, RolloutConfig
from parallel_setup import Parallel
from runlog.completions import Row
from tasks.environment import Environment
from tasks.scoring import Score, Scorer
from weights import huggingface


def evaluate(
    engine: Engine,
    held_out: Mapping[str, Questions],
    score: Callable[[Sequence[tuple[Question, Completion]]], list[Score]],
    settings: EvalConfig,
    sampling: RolloutConfig,
    parallel: Parallel,
    beat: Callable[[str], None] = lambda done: None,
    environment: Environment | None = None,
) -> tuple[dict, list[dict], list[Row]]:
    """Return a summary (keys eval/...), an outcome per question, and a row per answer. All ranks call this together.

    Every rank gets the same summary and outcomes, but only rank 0 gets the rows. ``held_out`` has the main set under
    the name "", and the sets of eval.sets under their names. The keys of such a set begin with eval/NAME/. Only
    ``tensor`` and ``max_new_tokens`` of ``sampling`` are used. ``beat`` is called before each batch of questions.
    The random draws of an answer depend only on the name of its set and the index of its question. They do not depend
    on the seed or the step of the run, so two evaluations differ only by their policies. The confidence intervals count
    questions rather than samples, because the k samples of a question are not independent.
    """
    summary, outcomes, rows = {}, [], []
    for name, questions in held_out.items():
        results, kept = _results(engine, name, questions, score, settings, sampling, parallel, beat, environment)
        summary |= _summary(results, prefix(name))
        rows += rollout.by_prompt(kept, sampling.tensor, parallel)
        outcomes += [
            ({"set": name} if name else {})
            | {"question": index, "gold": questions[index].gold}
            | {"greedy": row[0, 0].item(), "sampled": row[1:, 0].tolist()}
            for index, row in enumerate(results)
        ]
    return summary, outcomes, rows


def prefix(name: str) -> str:
    """Return the prefix of the summary's keys for the set ``name``. The main set has the name ""."""
    return f"eval/{name}/" if name else "eval/"


def _results(
    engine: Engine,
    name: str,
    questions: Questions,
    score: Callable[[Sequence[tuple[Question, Completion]]], list[Score]],
    settings: EvalConfig,
    sampling: RolloutConfig,
    parallel: Parallel,
    beat: Callable[[str], None],
    environment: Environment | None,
) -> tuple[torch.Tensor, list[Row]]:
    """Return measurements of all answers, equal on every rank, and a row for each answer that this rank sampled.

    Each question has one greedy and k sampled answers. The measurements ``correct``, ``parsable`` and ``length`` of
    all answers form a tensor (questions, 1 + k, 3).
    """
    count = min(settings.num_questions or len(questions), len(questions))
    k, tensor = settings.samples, sampling.tensor
    indices = rollout.own_prompts(count, tensor, parallel)
    num_own = len(range(0, count, parallel.world_size // tensor))
    rows: list[Row] = []
    for start in range(0, num_own, settings.batch_size):  # equally often on every rank: engines may sample in lockstep
        wave = indices[start : start + settings.batch_size]
        beat(f"{start} of {num_own} questions of an evaluation{f' of {name}' * bool(name)}")
        ask = functools.partial(
            engine.sample,
            [questions[index].prompt for index in wave],
            seeds=[derive_seed("evaluation", *([name] * bool(name)), index) for index in wave],
            max_new_tokens=sampling.max_new_tokens,
            turns=environment.turns([questions[index] for index in wave]) if environment else None,
        )
        answers = ask(num_samples=1, temperature=0.0)
        if k:
            sampled = ask(num_samples=k, temperature=settings.temperature)
            answers = [greedy + group for greedy, group in zip(answers, sampled, strict=True)]
        pairs = zip(wave, answers, strict=True)
        numbered = [(index, number, answer) for index, group in pairs for number, answer in enumerate(group)]
        scores = score([(questions[index], answer) for index, _, answer in numbered])
        rows += rollout.rows_of(questions, name or "test", numbered, scores)
    results = torch.zeros(num_own, 3 * (1 + k))  # correct, parsable and length, of the greedy answer and k samples
    numbers = [[row["correct"], row["parsable"], row["tokens"]] for row in rows]
    results[: len(indices)] = torch.tensor(numbers, dtype=torch.float32).view(len(indices), 3 * (1 + k))
    by_rank = parallel.gather_rows(results)
    return rollout.in_prompt_order(by_rank, count, tensor).view(count, 1 + k, 3), rows


def _summary(results: torch.Tensor, key: str) -> dict:
    """Return shares, confidence intervals and counts, by names that begin with ``key``.

    ``results`` is the tensor of measurements that _results returns.
    """
    n, k = len(results), results.shape[1] - 1
    summary: dict = {f"{key}num_questions": n, f"{key}samples": k}
    for kind, part in {"greedy": results[:, :1], "sampled": results[:, 1:]}.items():
        if part.numel():
            accuracy, parsable, length = (part[..., i].double().mean().item() for i in range(3))
            low, high = wilson(accuracy, n)
            summary |= {
                f"{key}{kind}_accuracy": accuracy,
                f"{key}{kind}_low": low,
                f"{key}{kind}_high": high,
                f"{key}{kind}_unparsable": 1 - parsable,
                f"{key}{kind}_length_mean": length,
            }
    if k > 1:
        summary[f"{key}pass@{k}"] = results[:, 1:, 0].amax(dim=1).double().mean().item()
    return summary


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the confidence interval (Wilson, 1927) of ``share``, a share of ``n`` questions.

    The default ``z`` gives the 95 % interval. The interval is inside [0, 1] even if the share is 0 or 1.
    """
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def headline(summary: dict, name: str = "") -> str:
    """Return one line with the accuracies on the set ``name``, by default the main set. For example:

    `sampled 31.2 % (28.5-34.1), greedy 24.0 % (21.5-26.7), n = 1,024`
    """
    parts, key = [], prefix(name)
    for kind in ("sampled", "greedy"):
        if f"{key}{kind}_accuracy" in summary:
            share, low, high = (100 * summary[f"{key}{kind}_{what}"] for what in ("accuracy", "low", "high"))
            parts.append(f"{kind} {share:.1f} % ({low:.1f}-{high:.1f})")
    return ", ".join([*parts, f"n = {summary[f'{key}num_questions']:,}"])


def result_line(before: dict, after: dict, source: str) -> str:
    """Return the line that gives a run's accuracy before and after training. For example:

    `arithmetic accuracy 31.2 % -> 84.0 % (95 % interval 81.6-86.1, sampled, n = 1,024 held-out questions)`
    """
    kind = "sampled" if "eval/sampled_accuracy" in after else "greedy"
    first, last, low, high = (
        100 * summary[f"eval/{kind}_{what}"]
        for summary, what in ((before, "accuracy"), (after, "accuracy"), (after, "low"), (after, "high"))
    )
    return (
        f"{source} accuracy {first:.1f} % -> {last:.1f} % "
        f"(95 % interval {low:.1f}-{high:.1f}, {kind}, n = {after['eval/num_questions']:,} held-out questions)"
    )


# --------------------------------------------------------------------------------------------------------- the command


def measure(cfg: Config) -> dict:
    """Measure cfg.model on the held-out questions and eval.sets, and return the summary on every rank.

    All ranks call this together. The weights are those from which a training run starts: in model.dtype, and quantised
    as model.quantisation says.
    """
    cfg = cfg.changed(rollout={"sync": "merged", "expert_parallel": False})  # no adapter, whole tensors
    scorer = Scorer(cfg.reward, environment=cfg.rollout.environment)  # before the device
    parallel_setup.start_device(cfg.device, cfg.train)  # before the tokenizer imports transformers
    arch, tokenizer = hf_config.read(cfg.model.path), data_gsm8k.load_tokenizer(cfg.model.path)
    ranks = parallel_setup.launched_world_size()
    whole = cfg.changed(parallel={"tensor": 1, "expert": 1})  # every rank has its own questions
    refuse_first(trainer_problems(whole, arch, ranks))
    factory.check_engine(cfg, arch, ranks)
    sets = data_gsm8k.of_sets(cfg.data, cfg.eval.sets)
    held_out = {name: data_gsm8k.load(data, "test", tokenizer, cfg.train.seed) for name, data in sets.items()}
    stop_tokens = data_gsm8k.stop_token_ids(cfg.model.path, tokenizer)
    pad_token = data_gsm8k.pad_token_id(tokenizer, stop_tokens)
    with parallel_setup.open_world(cfg.device, cfg.train, cfg.parallel) as device:
        read = {"the configuration": cfg.model_dump_json(), "config.json of model.path": repr(arch)}
        for name, part in held_out.items():
            read[f"the questions of eval.sets.{name}" if name else "the held-out questions"] = part.as_read()
        parallel_setup.refuse_unequal(read)
        parallel = parallel_setup.open_layout(whole.parallel, device)
        engine = factory.open_engine(cfg, arch, device, stop_tokens, pad_token)
        base, model, dtype = huggingface.read_model(cfg.model.path, arch), cfg.model, devices.DTYPES[cfg.model.dtype]
        engine.load_weights(
            (name, quantisation.frozen(base, name, dtype, model.quantisation)) for name in tensor_shapes(arch)
        )
        summary, *_ = evaluate(
            engine,
            held_out,
            functools.partial(rollout.score_completions, tokenizer=tokenizer, scorer=scorer),
            cfg.eval,
            cfg.rollout,
            parallel,
            environment=data_gsm8k.open_environment(cfg.data, cfg.rollout, tokenizer, stop_tokens, scorer),
        )
        engine.close()
    scorer.close()
    return summary


@command
def main(arguments: list[str]) -> int:
    """Run the command. Returns 0 after measuring, 2 for unusable input, or 3 if the engine gave no usable log-probs."""
    parser = command_line("evaluate.py", "Measure the accuracy of model.path on the held-out questions.")
    args = parser.parse_intermixed_args(arguments)
    rank = parallel_setup.check_launch()
    cfg, notes = resolve_config(args.config, args.overrides)
    summary = measure(cfg)
    if rank == 0:
        print("".join(f"note: {note}\n" for note in notes), end="")
        print(f"{cfg.model.path}: {cfg.data.source} accuracy: {headline(summary)}")
        for name in cfg.eval.sets:
            print(f"{cfg.model.path}: {name} accuracy: {headline(summary, name)}")
    return 0


if __name__ == "__main__":
    parallel_setup.run_command(main, sys.argv[1:])
