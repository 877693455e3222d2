"""Makes the tiny Hugging Face model of a CPU run: random weights, then a supervised warm start on Megatron.

The warm start teaches addition and subtraction with drills that have no words. It teaches the form of an answer with
the answers of a teacher who often chooses the wrong operation. GRPO can then teach the model to choose the right
operation.
b is the number of rows, and T the number of tokens per row.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

import data_gsm8k
import parallel_setup
from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from facts.seeds import derive_seed
from inputs import hf_config
from inputs.config import flatten
from inputs.files import aside, disk_errors, read_object, whole_folder
from knobs import DataConfig, ParallelConfig, TinyModelConfig
from model import megatron_model
from parallel_setup import Parallel
from runlog.run_record import lock_file
from tasks import arithmetic
from tasks.arithmetic import Line, Problem
from weights import huggingface

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerBase

RECORD = "tiny_model.json"  # how the model was made; this file is written last
AUX_LOSS = 1e-2  # load balancing in the warm start; without it a few experts get every token
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM, WARMUP_STEPS, LAST_LR_SHARE = (0.9, 0.98), 0.01, 1.0, 50, 0.05
WARM_START_LR = 3e-3  # peak; with 6e-3 the model did not learn
WORDS_PER_BATCH = 64  # word problems in every other batch of all ranks
MOST_MISTAKES = 50  # number of draws of one operation of the teacher; after them the teacher gives the right answer

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2: padding, start of a turn, EOS
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def recipe(tiny: TinyModelConfig, data: DataConfig, row_tokens: int) -> dict:
    """Return all settings that determine the weights of the model, except the number of ranks that make it.

    The model has positions for ``row_tokens`` tokens. Its tokenizer and warm start learn the arithmetic of ``data``.
    """
    settings = tiny.model_dump(mode="json")
    return {
        "tiny_model": {key: value for key, value in settings.items() if key != "teacher_calls" or value},
        "config": hf_config.tiny_settings(tiny, row_tokens),
        "operands": [arithmetic.LOWEST_OPERAND, data.operand_high],
    } | ({"operations": [1, data.operations_high]} if data.operations_high > 1 else {})


def exists(folder: Path, wanted: dict) -> bool:
    """Return whether ``folder`` already contains the model that the recipe ``wanted`` describes.

    Raises InputError if it contains anything else.
    """
    if not folder.exists():
        return False
    try:
        old = flatten(read_object(folder / RECORD, tuple(wanted)))
    except InputError:
        raise InputError(
            f"model.path: {folder} exists and has no readable {RECORD}, so it is not a model made here; "
            "give another path, or remove the tiny_model section"
        ) from None
    if changed := [key for key, value in flatten(wanted).items() if key not in old or old[key] != value]:
        raise InputError(
            f"model.path: {folder} was made with another {', '.join(f'{key} ({old.get(key)})' for key in changed)}; "
            f"give another model.path, or delete {folder}"
        )
    return True


def make(
    path: str,
    tiny: TinyModelConfig,
    data: DataConfig,
    row_tokens: int,
    device: torch.device,
    beat: Callable[[str], None] = lambda done: None,
) -> None:
    """Make the model of these settings in the folder ``path``, unless it is there. All ranks call this together.

    In the warm start, all ranks are data-parallel replicas, regardless of the section parallel. ``beat`` is called at
    every step, so that the watcher of stalled ranks sees progress.
    """
    folder, wanted = Path(path), recipe(tiny, data, row_tokens)
    with disk_errors(f"model.path: {folder}", SafetensorError), ExitStack() as locks:
        for attempt in itertools.count():
            # Rank 0 decides for all ranks: another run may finish the model between the checks of two ranks.
            answer = [_next_action(folder, wanted, locks) if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(answer)
            if answer[0] != "wait":
                break
            if attempt == 0 and dist.get_rank() == 0:
                print(f"waiting: another process is making {folder}", flush=True)
            beat("waiting for the process that makes the model")
            time.sleep(1)  # short waits, because the collectives of the other ranks have a timeout
        if answer[0] == "make":
            _make(folder, tiny, data, wanted, device, beat)


def _next_action(folder: Path, wanted: dict, locks: ExitStack) -> str:
    """Return "done" if the model exists, "make" if this process may make it, or "wait" if another process is making it.

    This process may make the model if it gets the lock on a file next to the model's folder. ``locks`` then contains
    the lock, which is released at the latest when the process ends. If the file system refuses the lock, this process
    prints a message and may make the model without it.
    """
    if exists(folder, wanted):
        return "done"
    path = folder.with_name(f".making-{folder.name}.lock")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        locks.enter_context(lock_file(path))
    except BlockingIOError:
        return "wait"
    except OSError as error:
        print(f"{path}: {error.strerror}; make sure that only one process makes {folder}", flush=True)
    return "done" if exists(folder, wanted) else "make"


def _make(
    folder: Path,
    tiny: TinyModelConfig,
    data: DataConfig,
    wanted: dict,
    device: torch.device,
    beat: Callable[[str], None],
) -> None:
    parallel = parallel_setup.open_layout(ParallelConfig(), device)
    unfinished = aside(folder)
    with whole_folder(folder) if parallel.rank == 0 else nullcontext():
        if parallel.rank == 0:
            print(
                f"making {folder}: {tiny.warm_start_steps} supervised steps, which are saved only when all are done",
                flush=True,
            )
            write_random_model(unfinished, tiny, data, wanted["config"])
        dist.barrier()
        if tiny.warm_start_steps:
            arch = hf_config.read(unfinished)
            model = megatron_model.build(arch, parallel, dtype=torch.float32, recompute=False, aux_loss=AUX_LOSS)
            huggingface.load(model, arch, parallel, unfinished)
            _warm_start(model, tiny, data, parallel, data_gsm8k.load_tokenizer(unfinished), beat)
            if parallel.rank == 0:
                huggingface.save_model(huggingface.export(model, arch, parallel), unfinished)
        if parallel.rank == 0:
            record = wanted | {"made_by_ranks": parallel.world_size}
            (unfinished / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    parallel_setup.close_layout()


def write_random_model(folder: Path, tiny: TinyModelConfig, data: DataConfig, config: dict) -> None:
    """Write config.json, generation_config.json, a tokenizer and random weights to an empty ``folder``.

    ``config`` is the content of config.json.
    """
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}) + "\n")
    rng, low, high = random.Random(1), arithmetic.LOWEST_OPERAND, data.operand_high
    problems = (arithmetic.problem(rng, low, high, False, data.operations_high) for _ in range(2000))
    texts = (f"user\n{problem.question}\nassistant\n{arithmetic.solution(problem.lines)}" for problem in problems)
    build_tokenizer(texts, tiny.vocab_size, folder)
    huggingface.save_model(random_weights(hf_config.read(folder), tiny.seed), folder)


def random_weights(arch: Architecture, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name.

    Norms are 1 and biases are 0. The std of a matrix is 0.5 / sqrt(inputs), but 0.02 for routers and for the gates of
    shared experts. For matrices that write to the residual stream, it is divided by sqrt(2 x layers).
    """
    for name, shape in tensor_shapes(arch).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        elif name.endswith(".bias"):
            yield name, torch.zeros(shape)
        else:
            std = 0.5 / math.sqrt(shape[-1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * arch.num_layers)
            if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
                std = 0.02
            generator = torch.Generator().manual_seed(derive_seed(seed, "weights", name))
            yield name, torch.empty(shape).normal_(0, std, generator=generator)


# ------------------------------------------------------------------------------------------------ warm start


def _warm_start(
    model: torch.nn.Module,
    tiny: TinyModelConfig,
    data: DataConfig,
    parallel: Parallel,
    tokenizer: PreTrainedTokenizerBase,
    beat: Callable[[str], None],
) -> None:
    """Train all weights in place with supervised AdamW steps. Batches of word problems and of drills alternate."""
    low, high = arithmetic.LOWEST_OPERAND, data.operand_high
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=WARM_START_LR, betas=BETAS)
    rng = random.Random(tiny.seed * 1000 + parallel.rank)
    steps = tqdm(range(tiny.warm_start_steps), desc="warm start", disable=None if parallel.rank == 0 else True)
    for step in steps:
        beat(f"step {step} of the warm start")
        # The rate is constant for half of the steps, then falls linearly.
        decay = 1 - (1 - LAST_LR_SHARE) * max(0.0, 2 * (step / tiny.warm_start_steps) - 1)
        for group in optimizer.param_groups:
            group["lr"] = WARM_START_LR * min(1.0, (step + 1) / WARMUP_STEPS) * decay
        num_examples = tiny.drills_per_batch if step % 2 else WORDS_PER_BATCH
        examples = [
            drill(rng, low, high, data.operations_high) if step % 2 else _word_problem(tiny, data, rng, tokenizer)
            for _ in range(-(-num_examples // parallel.world_size))
        ]
        tokens, mask = (rows.to(parallel.device) for rows in _padded(examples, tokenizer))
        num_tokens = parallel.sum_over_data(mask.sum())
        labels = tokens.roll(-1, dims=1)  # position t predicts token t + 1; the last column is never trained
        losses = model(tokens, None, None, labels=labels)  # (b, T); RoPE needs no position ids
        loss = (losses * mask.roll(-1, dims=1)).sum() / num_tokens
        loss.backward()
        parallel_setup.sum_gradients_(parameters, parallel.data_group)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            steps.set_postfix(loss=f"{parallel.sum_over_data(loss).item():.3f}")


def _word_problem(
    tiny: TinyModelConfig, data: DataConfig, rng: random.Random, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, str]:
    """Draw a word problem of the training set, and return its prompt and the teacher's answer (`sloppy_solution`).

    With probability tiny_model.teacher_calls, the answer contains calls to a calculator.
    """
    problem = arithmetic.problem(rng, arithmetic.LOWEST_OPERAND, data.operand_high, False, data.operations_high)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=False
    )
    answer = sloppy_solution(problem, rng, tiny.teacher_right, tiny.teacher_wrong_operation)
    calls = tiny.teacher_calls and rng.random() < tiny.teacher_calls
    return prompt, arithmetic.annotated(answer) if calls else answer


def sloppy_solution(problem: Problem, rng: random.Random, right: float, wrong_operation: float) -> str:
    """Return the answer of a teacher who makes mistakes and continues from the wrong results.

    Each operation is right with probability ``right``. With probability ``wrong_operation``, + becomes - and - becomes
    +. Otherwise the result is off by one or ten, but never below 0. If the next operation would then have a held-out
    pair of numbers, the operation is drawn again. After MOST_MISTAKES draws of an operation, the right answer to the
    whole problem is returned.

    A model that learns from such answers knows their form and how to calculate, but often chooses the wrong operation.
    """
    x, lines = problem.lines[0][0], []
    for (_, sign, operand, _), following in itertools.zip_longest(problem.lines, problem.lines[1:]):
        for _ in range(MOST_MISTAKES):
            line = _sloppy_line(sign, x, operand, rng, right, wrong_operation)
            if following is None or not arithmetic.held_out(line[3], following[2]):
                break
        else:
            return arithmetic.solution(problem.lines)
        x = line[3]
        lines.append(line)
    return arithmetic.solution(lines)


def _sloppy_line(sign: str, x: int, y: int, rng: random.Random, right: float, wrong_operation: float) -> Line:
    """Draw one operation of the teacher's answer, with its result."""
    draw = rng.random()
    if right <= draw < right + wrong_operation:
        return arithmetic.line("-" if sign == "+" else "+", x, y)
    first, sign, second, result = arithmetic.line(sign, x, y)
    if draw < right:
        return first, sign, second, result
    if rng.choice(["one", "ten"]) == "one":
        return first, sign, second, max(0, result + rng.choice([-1, 1]))
    return first, sign, second, result + (10 if result < 10 else rng.choice([-10, 10]))


def drill(rng: random.Random, low: int, high: int, most_operations: int = 1) -> tuple[str, str]:
    """Draw a drill as (text, completion), such as ("37 + 25", " = 62").

    A drill is a correct addition or subtraction of two numbers that are not a held-out pair. If problems have several
    operations, half of the drills begin with a random number up to the largest result that a problem may have.
    """
    if most_operations > 1 and rng.random() < 0.5:
        most = arithmetic.largest(high)
        line = (0, "+", 0, most + 1)
        while line[3] > most or arithmetic.held_out(line[0], line[2]):
            line = arithmetic.line(rng.choice(["+", "-"]), rng.randint(0, most), rng.randint(low, high))
    else:
        (line,) = arithmetic.draw_lines(rng, low, high, heldout=False)
    x, sign, y, result = line
    return f"{x} {sign} {y}", f" = {result}"


def _padded(examples: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return the tokens of (prompt, answer) rows, padded on the right, and a mask of the answers.  -> (b, T), (b, T)"""
    prompts, answers = (
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        for texts in zip(*examples, strict=True)
    )
    rows = [torch.tensor(p + a + [tokenizer.eos_token_id]) for p, a in zip(prompts, answers, strict=True)]
    masks = [torch.arange(len(row)) >= len(p) for row, p in zip(rows, prompts, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id), pad(masks, batch_first=True).float()


# -------------------------------------------------------------------------------------------------------- its tokenizer


def build_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a tokenizer on ``texts`` and write its files to ``folder``. The same texts always give the same bytes."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = digit_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    save_tokenizer(tokenizer, folder, {"pad_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2]}, CHAT_TEMPLATE)


def digit_tokenizer(model: BPE) -> Tokenizer:
    """Return a byte-level BPE tokenizer in which each digit is a token. So a model can calculate digit by digit."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, special: dict[str, str], chat_template: str) -> None:
    """Write tokenizer.json and tokenizer_config.json to ``folder``, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
