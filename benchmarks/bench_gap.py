"""Where the gap between the log-probs of sampler and trainer comes from: one cause at a time is switched on.

    python benchmarks/bench_gap.py [--json]

Embedded sampler and trainer on one rank, one thread, with a policy some updates away from its base. tiny: 2 layers of
width 64 with 8 experts, 4 of them a token; real: a layer of Qwen3-30B-A3B's shape with 16 experts. `none` is the code
as it is. gap: mean difference of the log-probs, nats a token, with a 95 % interval over the completions; equal: share
of the tokens whose log-probs are equal to the last bit; largest: of one token. Each other row changes one thing, so its
difference from `none` is what that cause adds (or, for replay, takes away). The last row is the control: the update of
one expert does not reach the sampler; found: the expert that the tokens' gaps single out (preflight.py --layers).
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import cases
import torch
import torch.nn.functional as F
from bench_policy import VOCABULARY, fill, make_model
from torch import Tensor

import device as devices
import hf_config
import kernels
import lora_megatron
import model_megatron
import packing
import parallel_setup
import weights_hf
from config import load_config
from engines import torch_cache
from engines.interface import Completion
from engines.torch_decoder import Decoder
from engines.torch_sampler import TorchSampler
from knobs import TinyModelConfig
from parallel_setup import Parallel
from plan.layers_check import by_expert
from routing_replay import RoutingReplay

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 24, 4, 23, 24
UPDATE = {"tiny": 2e-2, "real": 2e-5}  # size of the elements of B: some updates at the learning rate of the shape
LOST = 1  # the expert of the control


def tiny_architecture(folder: Path) -> hf_config.Architecture:
    settings = hf_config.tiny_settings(
        TinyModelConfig(architecture="qwen3_moe", experts_per_token=4, vocab_size=400), row_tokens=128
    )
    (folder / "config.json").write_text(json.dumps(settings))
    return hf_config.read(folder)


class Pair:
    """A trainer with adapters, and a sampler that holds its policy."""

    def __init__(self, shape: str, dtype: str, parallel: Parallel) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if shape == "real":
                make_model(Path(folder), 16)
            self.arch = hf_config.read(folder) if shape == "real" else tiny_architecture(Path(folder))
        self.parallel, self.shape, self.dtype = parallel, shape, devices.DTYPES[dtype]
        self.model = model_megatron.build(self.arch, parallel, dtype=self.dtype, recompute=False)
        fill(self.model, self.arch, parallel)
        lora = load_config(cases.ROOT / "configs" / "qwen3.yaml").lora
        self.adapters = lora_megatron.attach(self.model, lora, parallel, seed=0, merges=dtype == "bf16")
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for adapter in self.adapters.values():
                adapter.B.copy_(UPDATE[shape] * torch.randn(adapter.B.shape, generator=generator).sign())
        self.replay = RoutingReplay(self.model, self.arch, parallel)
        self.sampler = TorchSampler(self.arch, stop_tokens={0}, pad_token=0, dtype=self.dtype)
        self.push()

    def push(self, lost: int | None = None) -> None:
        """Give the policy to the sampler, but not the update of one expert."""
        base = dict(weights_hf.export(self.model, self.arch, self.parallel, merge=False)) if lost is not None else {}
        self.sampler.load_weights(
            (name, base[name] if f".layers.0.mlp.experts.{lost}." in name else tensor)
            for name, tensor in weights_hf.export(self.model, self.arch, self.parallel)
        )

    def sample(self) -> list[tuple[list[int], Completion]]:
        vocabulary = min(VOCABULARY, self.arch.vocab_size)
        prompts = torch.randint(1, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
        answers = self.sampler.sample(
            prompts.tolist(), seeds=list(range(PROMPTS)), num_samples=SAMPLES, max_new_tokens=NEW_TOKENS,
            temperature=1.0, return_routed_experts=True,
        )  # fmt: skip
        return [(prompt, one) for prompt, group in zip(prompts.tolist(), answers, strict=True) for one in group]

    @torch.no_grad()
    def trainer(self, rows: list[tuple[list[int], Completion]], replay: bool = False) -> list[Tensor]:
        """The trainer's log-probs of the sampled tokens of ``rows``, in one packed pass."""
        width = max(len(prompt) + len(one.tokens) for prompt, one in rows)
        tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
        shape = (len(rows), width, sum(self.arch.moe_layers), self.arch.experts_per_token)
        routes, has_route = torch.zeros(shape, dtype=torch.uint8), torch.zeros(len(rows), width, dtype=torch.long)
        for row, (prompt, one) in enumerate(rows):
            end = len(prompt) + len(one.tokens)
            tokens[row, :end] = torch.tensor(prompt + one.tokens)
            mask[row, len(prompt) : end] = 1
            routes[row, : end - 1] = torch.from_numpy(one.routed_experts)
            has_route[row, : end - 1] = 1
        packed = packing.pack(tokens, mask, 1)
        replayed = self.replay.replaying(packed.of_line(routes), packed.of_line(has_route) * packed.rows)
        with replayed if replay else contextlib.nullcontext():
            logp, _ = model_megatron.token_logprobs(self.model, tokens, mask, self.parallel, 1.0, packed)
        return [logp[row][mask[row] == 1] for row in range(len(rows))]


# ------------------------------------------------------------------------------------------------ causes


@contextlib.contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextlib.contextmanager
def factors_apart(pair: Pair) -> Iterator[None]:
    """The trainer adds s B A x to W x, as before it computed with the pushed weights."""
    merges = [adapter.merges for adapter in pair.adapters.values()]
    for adapter in pair.adapters.values():
        adapter.merges = False
    yield
    for adapter, merged in zip(pair.adapters.values(), merges, strict=True):
        adapter.merges = merged


def weighted_last(self: Decoder, layer: int, x: Tensor, routes: list[Tensor]) -> Tensor:
    """Decoder._mlp with experts that are weighted after their second product."""
    arch, weights = self.arch, self.layers[layer]
    h = kernels.rms_norm(x, weights["mlp_norm"], arch.rms_norm_eps)
    score, experts = F.linear(h.float(), weights["router"].float()).topk(arch.experts_per_token, dim=-1)
    routes.append(experts)
    in_order, pair = experts.view(-1).sort(stable=True)
    counts = torch.bincount(in_order, minlength=arch.num_experts)
    out = h.index_select(0, pair.div(arch.experts_per_token, rounding_mode="floor"))
    out = kernels.swiglu(kernels.grouped_mm(out, weights["expert_gate_up"], counts))
    out = kernels.grouped_mm(out, weights["expert_down"], counts)
    out = torch.empty_like(out).index_copy_(0, pair, out).view(*experts.shape, -1)
    return x + (out * score.softmax(-1).to(x.dtype).unsqueeze(-1)).sum(1)


def low_precision_router(real: Callable) -> Callable:
    """Decoder._mlp with router logits in the dtype of the model, as vLLM computes them."""

    def mlp(self: Decoder, layer: int, x: Tensor, routes: list[Tensor]) -> Tensor:
        linear = F.linear
        narrow = lambda a, b, *more: linear(a.to(self.dtype), b.to(self.dtype), *more).float()  # noqa: E731
        with patched(F, "linear", narrow):
            return real(self, layer, x, routes)

    return mlp


def high_precision_head(self: Decoder, hidden: Tensor) -> Tensor:
    """Decoder.logits in fp32."""
    return F.linear(kernels.rms_norm(hidden, self.final_norm, self.arch.rms_norm_eps).float(), self.head.float())


def causes(pair: Pair) -> dict[str, tuple[contextlib.AbstractContextManager, Callable]]:
    """Name -> a context for sampling and for the trainer, and how the trainer computes."""
    none, mlp, trainer, decoder = contextlib.nullcontext(), Decoder._mlp, pair.trainer, pair.sampler.decoder
    other = {torch_cache.LineCache: torch_cache.RowCache, torch_cache.RowCache: torch_cache.LineCache}
    return {
        "none": (none, trainer),
        "trainer with factors apart": (factors_apart(pair), trainer),
        "experts weighted last": (patched(Decoder, "_mlp", weighted_last), trainer),
        "the other cache's attention": (patched(decoder, "cache", other[decoder.cache]), trainer),
        "router in the model's dtype": (patched(Decoder, "_mlp", low_precision_router(mlp)), trainer),
        "head in fp32": (patched(Decoder, "logits", high_precision_head), trainer),
        "trainer row by row": (none, lambda rows: [trainer([row])[0] for row in rows]),
        "routes replayed": (none, lambda rows: trainer(rows, replay=True)),
    }


# ------------------------------------------------------------------------------------------------ measuring


def figures(rows: list, logp: list[Tensor]) -> dict:
    """Gap with its interval, share of equal tokens, largest gap."""
    by_row = [(mine - torch.tensor(one.logp)).abs() for mine, (_, one) in zip(logp, rows, strict=True)]
    gaps, means = torch.cat(by_row).double(), torch.stack([gaps.double().mean() for gaps in by_row])
    half = 1.96 * (means.std() / len(means) ** 0.5).item()
    return {
        "gap": gaps.mean().item(),
        "low": gaps.mean().item() - half,
        "high": gaps.mean().item() + half,
        "equal": (gaps == 0).double().mean().item(),
        "largest": gaps.max().item(),
    }


def lost_expert(pair: Pair) -> dict:
    """The control: figures without the update of expert LOST, and the expert that stands out."""
    pair.push(lost=LOST)
    rows = pair.sample()
    pair.push()
    logp = pair.trainer(rows)
    gaps = [(mine - torch.tensor(one.logp)).abs() for mine, (_, one) in zip(logp, rows, strict=True)]
    routes = [torch.from_numpy(one.routed_experts)[-len(one.tokens) :].long() for _, one in rows]
    flat = torch.cat(gaps)[None], torch.ones(1, sum(map(len, gaps)), dtype=torch.bool), torch.cat(routes)[None]
    worst = by_expert(*flat, pair.arch)[0]
    return figures(rows, logp) | {"found": f"expert {worst['expert']} of layer {worst['layer']}"}


def main() -> None:
    args = cases.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    cfg = load_config(cases.ROOT / "configs" / "tiny_cpu.yaml", ["parallel.expert=1"])
    table = []
    with parallel_setup.open_world(cfg) as device:
        parallel = parallel_setup.open_layout(cfg.parallel, device)
        for shape in ("tiny", "real"):
            for dtype in ("fp32", "bf16"):
                pair, at = Pair(shape, dtype, parallel), {"shape": shape, "dtype": dtype}
                for name, (context, trainer) in causes(pair).items():
                    with context:
                        rows = pair.sample()
                        table.append(at | {"cause": name} | figures(rows, trainer(rows)) | {"found": ""})
                    print(f"{shape} {dtype} {name}: {table[-1]['gap']:.2g}", file=sys.stderr, flush=True)
                table.append(at | {"cause": "an expert's update lost"} | lost_expert(pair))
    cases.report(args, __doc__, table, {"causes": table})


if __name__ == "__main__":
    main()
