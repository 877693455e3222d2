"""Models, and checks of samples that several test files use, with transformers as the reference."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import reference
import torch
from safetensors.torch import load_file, save_file

from engines.torch_sampler import TorchSampler
from inputs import hf_config

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=384)
MODELS = {
    "qwen3": ("qwen3_moe", HEADS),  # a dense layer in the middle
    # Biases, a shared expert, a tied head, and a vocabulary and widths that vLLM pads.
    "qwen2": (
        "qwen2_moe",
        HEADS
        | dict(
            hidden_size=128,
            vocab_size=131,
            moe_intermediate_size=40,
            mlp_only_layers=[],
            shared_expert_intermediate_size=56,
            tie_word_embeddings=True,
        ),
    ),
    "olmoe": ("olmoe", HEADS | dict(hidden_size=128)),
    "qwen2_no_qkv_bias": ("qwen2_moe", HEADS | dict(hidden_size=128, qkv_bias=False)),
    "qwen3_odd_widths": ("qwen3_moe", HEADS | dict(hidden_size=30, moe_intermediate_size=7)),
}
DENSE = HEADS | dict(hidden_size=128, vocab_size=131, mlp_only_layers=[0, 1, 2])  # a qwen2_moe without experts
FREE = dict(num_samples=2, max_new_tokens=12, temperature=1.0)


class Model:
    """A model of transformers, its architecture, and its tensors as saved."""

    def __init__(self, path: Path) -> None:
        self.path, self.arch = path, hf_config.read(path)
        self.tensors = load_file(path / "model.safetensors")
        self.hf = reference.load(path)
        self.hf.set_experts_implementation("eager")  # its grouped kernel does not take every width

    def changed(self, tensors: dict[str, torch.Tensor], folder: Path) -> Model:
        """The model with other tensors, made in ``folder``."""
        folder.mkdir()
        shutil.copy(self.path / "config.json", folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return Model(folder)

    @torch.no_grad()
    def next_probs(self, prompt: list[int], temperature: float) -> torch.Tensor:
        """The probability of every next token.  -> (V,)"""
        return torch.softmax(self.hf(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)

    def gaps(self, prompts: list[list[int]], answers: list, temperature: float = 1.0) -> torch.Tensor:
        """The error of every log-prob of the answers."""
        rows = [(prompt, one) for prompt, group in zip(prompts, answers, strict=True) for one in group]
        return torch.cat(
            [
                (reference.logp(self.hf, prompt, one.tokens, temperature) - torch.tensor(one.logp)).abs()
                for prompt, one in rows
            ]
        )

    @torch.no_grad()
    def routes(self, text: list[int]) -> np.ndarray:
        """The experts of every token in each MoE layer, in ascending order.  -> (T, layers, experts a token)"""
        logits = self.hf(torch.tensor([text]), output_router_logits=True).router_logits
        return torch.stack([one.view(len(text), -1).topk(4).indices.sort(-1).values for one in logits], 1).numpy()


def embedded(model: Model | SimpleNamespace, stops: Iterable[int] = (), **options) -> TorchSampler:
    """The embedded sampler with the weights of a model."""
    engine = TorchSampler(model.arch, stop_tokens=set(stops), pad_token=0, **options)
    engine.load_weights(model.tensors.items())
    return engine


def flat(answers: list) -> list[tuple]:
    """Tokens, log-probs and reasons of all answers, to be compared bit for bit."""
    return [(one.tokens, one.logp, one.finish_reason) for group in answers for one in group]


def assert_alike(answers: list, expected: list) -> None:
    """The same tokens; log-probs may differ by rounding."""
    for one, other in zip(sum(answers, []), sum(expected, []), strict=True):
        assert one.tokens == other.tokens and np.allclose(one.logp, other.logp, rtol=0, atol=1e-5)


def assert_routes(model: Model, prompts: list[list[int]], answers: list) -> None:
    """The recorded routes are those of transformers for every token but the last, which was never run."""
    for prompt, group in zip(prompts, answers, strict=True):
        for one in group:
            assert one.routed_experts.dtype == np.uint8
            assert np.array_equal(np.sort(one.routed_experts, -1), model.routes(prompt + one.tokens[:-1]))


def assert_frequencies(group: list, probs: torch.Tensor) -> None:
    """The first tokens have the probabilities ``probs``."""
    assert_drawn(torch.tensor([one.tokens[0] for one in group]), probs)


def assert_drawn(sampled: torch.Tensor, probs: torch.Tensor) -> None:
    """Pearson's chi-square of the tokens against ``probs``, at five standard deviations."""
    expected, counts = probs * len(sampled), torch.bincount(sampled, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    rare = expected < 10  # pooled, because the test needs several counts in every bin
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected, counts = expected[expected > 1], counts[expected > 1]
    degrees = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert degrees >= 1 and statistic < degrees + 5 * math.sqrt(2 * degrees), (statistic, degrees)
