"""Sampling alone: the embedded sampler, transformers' generate and vLLM, at several batch sizes and lengths.

    python benchmarks/bench_rollout.py [--sizes 64x64 64x128 256x64] [--rounds 5] [--vllm] [--json]

All engines run in one process with one thread in fp32, and take turns. The figures are medians of CPU seconds; those of
vLLM include its own threads. Groups of 8 completions share a prompt, and no token ends an answer. The log-probs that a
sampler reports must agree with those of transformers for the same tokens, to 1e-5.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import bench_cases as cases
import torch
from bench_step import ready_peer

from engines.torch_sampler import TorchSampler
from inputs import hf_config

BARS = {"64x64": 1.8, "64x128": 2.2, "256x64": 2.2}  # smallest accepted speed-up of the embedded sampler
LOGP_BOUND = 1e-5


def generate(model, prompts: list[list[int]], new_tokens: int) -> torch.Tensor:
    """transformers' generate with cases.GROUP completions of every prompt.  -> (R, N)"""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts]).repeat_interleave(cases.GROUP, 0)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).repeat_interleave(cases.GROUP, 0)
    out = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
        min_new_tokens=new_tokens, max_new_tokens=new_tokens,
    )  # fmt: skip
    return out[:, longest:]


@torch.no_grad()
def logp_gap(model, prompts: list[list[int]], groups: list) -> float:
    """Largest difference (nats) between a sampler's log-probs and those of transformers for the same tokens."""
    worst = 0.0
    for prompt, answers in zip(prompts, groups, strict=True):
        rows = torch.tensor([prompt + answer.tokens for answer in answers])
        logp = model(input_ids=rows).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        found = logp.gather(2, rows[:, len(prompt) :, None])[..., 0]
        worst = max(worst, (found - torch.tensor([answer.logp for answer in answers])).abs().max().item())
    return worst


def compare(size: str, rounds: int, engines: dict[str, Callable], model, pool: list[list[int]]) -> dict:
    """All engines in turn on ``size``, which is rows x tokens."""
    rows, new_tokens = map(int, size.split("x"))
    prompts = pool[: rows // cases.GROUP]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, list] = {}  # those of the last round
    for _ in range(rounds + 1):
        for name, sample in engines.items():
            before = time.process_time()
            answers[name] = sample(prompts, new_tokens)
            seconds[name].append(time.process_time() - before)
    lengths = {len(row) for row in answers.pop("transformers")}
    lengths |= {len(answer.tokens) for groups in answers.values() for group in groups for answer in group}
    assert lengths == {new_tokens}, lengths
    gap = max(logp_gap(model, prompts, groups) for groups in answers.values())
    assert gap < LOGP_BOUND, gap
    seconds = {name: spent[1:] for name, spent in seconds.items()}  # the first round warms up
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    pairs = [theirs / ours for theirs, ours in zip(seconds["transformers"], seconds["embedded"], strict=True)]
    return {
        "size": size, "speedup": medians["transformers"] / medians["embedded"], "bar": BARS.get(size, 0.0),
        "pairs": [min(pairs), statistics.median(pairs), max(pairs)], "logp_gap": gap, "cpu_s": medians,
        "cpu_s_min": {name: min(spent) for name, spent in seconds.items()},
        "ms_per_token_step": {name: 1e3 * median / new_tokens for name, median in medians.items()},
        "tokens_per_cpu_s": {name: rows * new_tokens / median for name, median in medians.items()},
    }  # fmt: skip


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(BARS), metavar="ROWSxTOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM (requirements/cpu-vllm.txt)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model_dir = work / "model"
        peer, ready = ready_peer("attention_r8_64", work, data__num_train=64)  # it makes the model and the prompts
        peer.close()
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        own = {"embedded": TorchSampler(hf_config.read(model_dir), stop_tokens=set(), pad_token=0)}
        if args.vllm:
            own["vllm"] = vllm(model_dir, max(int(size.split("x")[1]) for size in args.sizes))
        weights = [pair for path in sorted(model_dir.glob("*.safetensors")) for pair in load_file(path).items()]
        for engine in own.values():
            engine.load_weights(weights)
        engines: dict[str, Callable] = {
            name: lambda prompts, new_tokens, engine=engine: engine.sample(
                prompts, seeds=list(range(len(prompts))), num_samples=cases.GROUP, max_new_tokens=new_tokens,
                temperature=1.0,
            )
            for name, engine in own.items()
        }  # fmt: skip
        engines["transformers"] = lambda prompts, new_tokens: generate(model, prompts, new_tokens)
        result = {"sizes": [compare(size, args.rounds, engines, model, ready["prompts"]) for size in args.sizes]}
        for engine in own.values():
            engine.close()
    rows = [
        {"rows x tokens": case["size"], "speed-up": case["speedup"], "bar": case["bar"],
         "pairs": f"{case['pairs'][0]:.2f}-{case['pairs'][-1]:.2f}", "log-prob gap": case["logp_gap"],
         **{f"{name} ms/step": ms for name, ms in case["ms_per_token_step"].items()},
         **{f"{name} tok/s": rate for name, rate in case["tokens_per_cpu_s"].items()}}
        for case in result["sizes"]
    ]  # fmt: skip
    cases.report(args, __doc__, rows, result)


def vllm(model_dir: Path, new_tokens: int):
    """vLLM's engine, in this process."""
    import torch.distributed as dist

    from engines.vllm_engine import VllmEngine

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return VllmEngine(
        hf_config.read(model_dir), str(model_dir), stop_tokens=set(), max_tokens=64 + new_tokens, dtype=torch.float32,
        device=torch.device("cpu"), tensor=1, enforce_eager=True, kv_cache_mib=256, routed_experts=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
