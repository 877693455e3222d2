"""Makes the tiny Hugging Face model of a CPU run: random weights, then a supervised warm start on Megatron.

The warm start teaches sums with bare drills, and the answer's form with a sloppy teacher who often takes the wrong
operation. The result knows how to compute and what an answer looks like, and chooses badly: what is left for
reinforcement learning is to choose. b rows, T tokens.
"""

from __future__ import annotations

import fcntl
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

import data_gsm8k
import hf_config
import model_megatron
import parallel_setup
import weights_hf
from config import derive_seed
from input_files import InputError, finish_folder, fresh_folder, read_object
from knobs import Config, ParallelConfig
from parallel_setup import Parallel

RECORD = "tiny_model.json"  # how the model was made; the last file to be written
AUX_LOSS = 1e-2  # load balancing, warm start only: without it a few experts take every token
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM, WARMUP_STEPS, LAST_LR_SHARE = (0.9, 0.98), 0.01, 1.0, 50, 0.05


def recipe(cfg: Config) -> dict:
    """What decides the model's weights, but for the number of ranks; made again only under another path."""
    return {
        "tiny_model": cfg.tiny_model.model_dump(mode="json"),
        "config": hf_config.tiny_settings(cfg),
        "operands": [cfg.data.operand_low, cfg.data.operand_high],
    }


def exists(cfg: Config) -> bool:
    """Whether cfg.model.path already holds this very model. InputError if it holds anything else."""
    folder = Path(cfg.model.path)
    if not folder.exists():
        return False
    wanted = recipe(cfg)
    try:
        record = read_object(folder / RECORD, tuple(wanted))
        found = {part: record[part] for part in wanted}
    except InputError:
        raise InputError(
            f"model.path: {folder} exists and has no readable {RECORD}, so it is not a model made here; "
            "needed: another path, or no tiny_model section"
        ) from None
    for part in wanted:
        old, new = found[part], wanted[part]
        if old != new:
            keys = [k for k in new if isinstance(old, dict) and old.get(k) != new[k]] if isinstance(new, dict) else []
            raise InputError(
                f"model.path: {folder} was made with another {part} ({', '.join(keys) or old}); "
                f"needed: another model.path, or delete {folder}"
            )
    return True


def make(cfg: Config, device: torch.device, beat: Callable[[str], None] = lambda place: None) -> None:
    """Write the model that cfg.tiny_model describes to cfg.model.path, if it is not there. Collective.

    All ranks share the warm start as data-parallel replicas, whatever cfg.parallel says. ``beat`` hears of every step,
    for the watcher of ranks that stand still.
    """
    folder = Path(cfg.model.path)
    with _only_maker(folder) as may_make:
        while True:
            answer = ["wait"]  # rank 0's: another run may finish the model between two ranks' looks
            if dist.get_rank() == 0:
                if exists(cfg):
                    answer = ["done"]
                elif may_make():
                    answer = ["done" if exists(cfg) else "make"]
            dist.broadcast_object_list(answer)
            if answer[0] != "wait":
                break
            beat("waiting for the process that makes the model")
            time.sleep(1)  # not one long wait: the other ranks' collectives have a timeout
        if answer[0] == "make":
            _make(cfg, device, folder, beat)


def _make(cfg: Config, device: torch.device, folder: Path, beat: Callable[[str], None]) -> None:
    parallel = parallel_setup.open_layout(ParallelConfig(), device)
    aside = folder.with_name(f".making-{folder.name}")
    if parallel.rank == 0:
        print(f"making {folder}: {cfg.tiny_model.warm_start_steps} supervised steps", flush=True)
        with _writing(folder):
            _write_random_model(cfg, aside)
    dist.barrier()
    if cfg.tiny_model.warm_start_steps:
        arch = hf_config.read(aside)
        model = model_megatron.build(arch, parallel, dtype=torch.float32, recompute=False, aux_loss=AUX_LOSS)
        weights_hf.load(model, arch, parallel, aside)
        _warm_start(model, cfg, parallel, data_gsm8k.load_tokenizer(aside), beat)
        if parallel.rank == 0:
            with _writing(folder):
                weights_hf.save_model(weights_hf.export(model, arch, parallel), aside)
    if parallel.rank == 0:
        with _writing(folder):
            record = recipe(cfg) | {"made_by_ranks": parallel.world_size}
            (aside / RECORD).write_text(json.dumps(record, indent=1) + "\n")
            finish_folder(aside, folder)
    dist.barrier()
    parallel_setup.close_layout()


@contextmanager
def _only_maker(folder: Path) -> Iterator[Callable[[], bool]]:
    """A question to ask until the answer is yes: may this process make ``folder``? Yes to one process at a time.

    The lock is on a file beside the folder and ends with the process, however that ends.
    """
    lock: BinaryIO | None = None

    def may_make() -> bool:
        nonlocal lock
        first = lock is None
        if lock is None:
            with _writing(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                lock = open(folder.with_name(f".making-{folder.name}.lock"), "ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if first:
                print(f"waiting: another process is making {folder}", flush=True)
            return False
        except OSError as error:
            if first:
                print(f"{lock.name}: {error.strerror}: make sure yourself that one process makes {folder}", flush=True)
        return True

    try:
        yield may_make
    finally:
        if lock is not None:
            lock.close()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A full disk or a folder that cannot be made is the user's to mend: one line, not a traceback."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"model.path: {folder} cannot be made: {reason}; needed: a place to write") from None


def _write_random_model(cfg: Config, folder: Path) -> None:
    """config.json, tokenizer and random weights in a fresh ``folder``."""
    fresh_folder(folder)
    (folder / "config.json").write_text(json.dumps(hf_config.tiny_settings(cfg), indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}) + "\n")
    rng, texts = random.Random(1), []
    for _ in range(2000):
        problem = data_gsm8k.problem(rng, cfg.data.operand_low, cfg.data.operand_high, False)
        texts.append(f"user\n{problem.question}\nassistant\n{data_gsm8k.solution(problem)}")
    build_tokenizer(texts, cfg.tiny_model.vocab_size, folder)
    arch = hf_config.read(folder)
    weights_hf.save_model(random_weights(arch, cfg.tiny_model.seed), folder)


def random_weights(arch: hf_config.Architecture, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Normal weights of std 0.5 / sqrt(inputs), less towards the residual stream; routers 0.02, norms 1, biases 0."""
    for name, shape in weights_hf.tensor_shapes(arch).items():
        if name.endswith("norm.weight") or name.endswith("layernorm.weight"):
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
    model: torch.nn.Module, cfg: Config, parallel: Parallel, tokenizer, beat: Callable[[str], None]
) -> None:
    """Supervised AdamW steps on every weight, in place; word problems and drills take turns."""
    tiny = cfg.tiny_model
    parameters = list(model.parameters())
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=tiny.warm_start_lr,
        betas=BETAS,
    )
    rng = random.Random(tiny.seed * 1000 + parallel.rank)
    steps = tqdm(range(tiny.warm_start_steps), desc="warm start", disable=None if parallel.rank == 0 else True)
    for step in steps:
        beat(f"step {step} of the warm start")
        share = step / tiny.warm_start_steps
        decay = 1 - (1 - LAST_LR_SHARE) * max(0.0, 2 * share - 1)  # flat for half of the steps, then linear
        for group in optimizer.param_groups:
            group["lr"] = tiny.warm_start_lr * min(1.0, (step + 1) / WARMUP_STEPS) * decay
        tokens, mask = _batch(cfg, rng, parallel, tokenizer, drills=step % 2 == 1)
        count = parallel.sum_over_data(mask.sum())
        labels = tokens.roll(-1, dims=1)  # position t predicts token t + 1; the last column is never trained
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        losses = model(tokens, positions, None, labels=labels)  # (b, T)
        trained = mask.roll(-1, dims=1)
        loss = (losses * trained).sum() / count
        loss.backward()
        parallel_setup.sum_gradients_(parameters, parallel.data_group)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            steps.set_postfix(loss=f"{parallel.sum_over_data(loss).item():.3f}")


def _batch(cfg: Config, rng: random.Random, parallel: Parallel, tokenizer, drills: bool) -> tuple[Tensor, Tensor]:
    """This rank's share of a batch, padded on the right, and where its answers are.  -> (b, T), (b, T)"""
    tiny, low, high = cfg.tiny_model, cfg.data.operand_low, cfg.data.operand_high
    prompts, answers = [], []
    total = tiny.drills_per_batch if drills else tiny.words_per_batch
    for _ in range(-(-total // parallel.world_size)):
        if drills:
            prompt, answer = data_gsm8k.drill(rng, low, high)
        else:
            problem = data_gsm8k.problem(rng, low, high, False)
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=False
            )
            answer = data_gsm8k.sloppy_solution(problem, rng, tiny.teacher_right, tiny.teacher_wrong_operation)
        prompts.append(prompt)
        answers.append(answer)
    asked = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answered = tokenizer(answers, add_special_tokens=False)["input_ids"]
    rows = [(a, b + [tokenizer.eos_token_id]) for a, b in zip(asked, answered, strict=True)]
    longest = max(len(a) + len(b) for a, b in rows)
    tokens = torch.full((len(rows), longest), tokenizer.pad_token_id)
    mask = torch.zeros(len(rows), longest)
    for i, (prompt, answer) in enumerate(rows):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[i, len(prompt) : len(prompt) + len(answer)] = 1
    return tokens, mask


# -------------------------------------------------------------------------------------------------------- its tokenizer

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2: padding, start of a turn, EOS
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | Path) -> int:
    """Train on `texts`, write the tokenizer's files into `out_dir`; returns the number of ids in use, <= vocab_size.

    The same texts give the same files byte for byte.  Digits stay single tokens, so that sums can
    be learned digit by digit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise InputError(f"tiny_model.vocab_size: found {vocab_size}; needed: at least {smallest}, for single bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)

    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()
