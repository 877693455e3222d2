"""A trainer with adapters and a sampler that holds its policy, for bench_gap.py.

tiny: 2 layers of width 64 with 8 experts, 4 of them a token; real: a layer of Qwen3-30B-A3B's shape with 16 experts.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import cases
import torch
from torch import Tensor

import device as devices
import hf_config
import lora_megatron
import model_megatron
import packing
import weights_hf
from config import load_config
from engines.interface import Completion, Engine
from engines.torch_sampler import TorchSampler
from engines.vllm_engine import VllmEngine
from knobs import TinyModelConfig
from parallel_setup import Parallel
from plan import layers_check
from routing_replay import RoutingReplay

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 24, 4, 23, 24
LONG_PROMPTS, LONG = 12, 150  # more tokens than a block of vLLM's prefix cache has, which is 128 on a CPU
UPDATE = {"tiny": 2e-2, "real": 2e-5}  # size of the elements of B: some updates at the learning rate of the shape
VOCABULARY = 4096  # of the real shape
CACHE_MIB = 256  # of vLLM
Row = tuple[list[int], Completion]  # a prompt and one answer to it


def write_settings(shape: str, folder: Path) -> None:
    """config.json of the model. vLLM on a CPU needs a head_dim of 32 or more."""
    if shape == "real":
        settings = json.loads((cases.ROOT / "configs" / "Qwen3-30B-A3B-Instruct-2507.config.json").read_text())
        settings |= {"num_hidden_layers": 1, "num_experts": 16, "vocab_size": VOCABULARY}
        (folder / "config.json").write_text(json.dumps(settings))
        return
    tiny = TinyModelConfig(architecture="qwen3_moe", experts_per_token=4, head_dim=32, vocab_size=400)
    (folder / "config.json").write_text(json.dumps(hf_config.tiny_settings(tiny, row_tokens=LONG + NEW_TOKENS)))


@torch.no_grad()
def fill(model: torch.nn.Module, arch: hf_config.Architecture, parallel: Parallel) -> None:
    """Random weights of the size that trained weights have."""
    generator = torch.Generator().manual_seed(0)
    for slot in weights_hf.slots(model, arch, parallel):
        weight, name = slot.weight, slot.names[0]
        std = 0.1 if weight.dim() == 1 else 0.08 if name == "lm_head.weight" else 0.02
        weight.copy_((weight.dim() == 1) + std * torch.randn(weight.shape, generator=generator))


class Pair:
    """``engine``: embedded or vllm; ``shape``: tiny or real; ``dtype``: fp32 or bf16."""

    def __init__(self, engine: str, shape: str, dtype: str, parallel: Parallel) -> None:
        self.engine, self.shape, self.dtype = engine, shape, devices.DTYPES[dtype]
        self.parallel = parallel
        with tempfile.TemporaryDirectory() as folder:
            write_settings(shape, Path(folder))
            self.arch = hf_config.read(folder)
            # The model is built first, as in a run: at its start vLLM replaces torch.cuda.Stream, which Megatron uses.
            self.model = model_megatron.build(self.arch, parallel, dtype=self.dtype, recompute=False)
            self.sampler = self._start(Path(folder))
        fill(self.model, self.arch, parallel)
        lora = load_config(cases.ROOT / "configs" / "qwen3.yaml").lora
        self.adapters = lora_megatron.attach(self.model, lora, parallel, seed=0, merges=dtype == "bf16")
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for adapter in self.adapters.values():
                adapter.B.copy_(UPDATE[shape] * torch.randn(adapter.B.shape, generator=generator).sign())
        self.replay = RoutingReplay(self.model, self.arch, parallel)
        self.push()

    def _start(self, folder: Path) -> Engine:
        if self.engine == "embedded":
            return TorchSampler(self.arch, stop_tokens={0}, pad_token=0, dtype=self.dtype)
        return VllmEngine(
            self.arch, folder, stop_tokens={0}, max_tokens=LONG + NEW_TOKENS, dtype=self.dtype,
            kv_cache_mib=CACHE_MIB, routed_experts=True,
        )  # fmt: skip

    def enlarge(self) -> None:
        """Make the update of each matrix as large as the matrix, as preflight.py --layers does."""
        layers_check.enlarge_(self.adapters, self.arch, self.parallel, seed=0)

    def policy(self, lost: int | None = None) -> Iterable[tuple[str, Tensor]]:
        """The merged weights, but those of expert ``lost`` of layer 0 without their update."""
        base = dict(weights_hf.export(self.model, self.arch, self.parallel, merge=False)) if lost is not None else {}
        for name, tensor in weights_hf.export(self.model, self.arch, self.parallel):
            yield name, base[name] if f".layers.0.mlp.experts.{lost}." in name else tensor

    def push(self, lost: int | None = None) -> None:
        self.sampler.load_weights(self.policy(lost))

    def sample(self, *, long: bool = False, together: bool = True) -> list[Row]:
        """Answers to prompts in one call, or with a call for each prompt."""
        shape = (LONG_PROMPTS, LONG) if long else (PROMPTS, PROMPT_TOKENS)
        vocabulary, generator = min(VOCABULARY, self.arch.vocab_size), torch.Generator().manual_seed(1)
        prompts = torch.randint(1, vocabulary, shape, generator=generator).tolist()
        rows, at_once = [], len(prompts) if together else 1
        for start in range(0, len(prompts), at_once):
            asked = prompts[start : start + at_once]
            answers = self.sampler.sample(
                asked, seeds=list(range(start, start + at_once)), num_samples=SAMPLES, max_new_tokens=NEW_TOKENS,
                temperature=1.0, return_routed_experts=True,
            )  # fmt: skip
            rows += [(prompt, one) for prompt, group in zip(asked, answers, strict=True) for one in group]
        return rows

    def sample_with_stale_prompts(self) -> list[Row]:
        """vLLM's answers with keys and values of the prompts that it computed with other weights."""
        self.sampler.load_weights((name, 1.5 * tensor) for name, tensor in self.policy())
        self.sample(long=True)
        forget, self.sampler._forget = self.sampler._forget, lambda where: None
        self.push()
        rows = self.sample(long=True)
        self.sampler._forget = forget
        self.push()
        return rows

    @torch.no_grad()
    def trainer(self, rows: list[Row], replay: bool = False) -> list[Tensor]:
        """The trainer's log-probs of the sampled tokens of ``rows``, in one packed pass."""
        width = max(len(prompt) + len(one.tokens) for prompt, one in rows)
        tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
        for row, (prompt, one) in enumerate(rows):
            end = len(prompt) + len(one.tokens)
            tokens[row, :end] = torch.tensor(prompt + one.tokens)
            mask[row, len(prompt) : end] = 1
        packed = packing.pack(tokens, mask, 1)
        with self._replaying(rows, width, packed) if replay else contextlib.nullcontext():
            logp, *_ = model_megatron.token_logprobs(self.model, tokens, mask, self.parallel, 1.0, packed)
        return [logp[row][mask[row] == 1] for row in range(len(rows))]

    def _replaying(self, rows: list[Row], width: int, packed: packing.Packing) -> contextlib.AbstractContextManager:
        shape = (len(rows), width, sum(self.arch.moe_layers), self.arch.experts_per_token)
        routes, has_route = torch.zeros(shape, dtype=torch.uint8), torch.zeros(len(rows), width, dtype=torch.long)
        for row, (_, one) in enumerate(rows):
            routes[row, : len(one.routed_experts)] = torch.from_numpy(one.routed_experts)
            has_route[row, : len(one.routed_experts)] = 1
        return self.replay.replaying(packed.of_line(routes), packed.of_line(has_route) * packed.rows)
