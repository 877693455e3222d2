"""What holds for the samples of every engine, with transformers as the reference: log-probs, greedy tokens, routes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import reference
import torch
from safetensors.torch import load_file, save_file

import hf_config

BAD_CALLS = [  # (what is changed in a call of five prompts for a vocabulary of 128 tokens, the message)
    (dict(prompts=[[]], seeds=[1]), "prompt 0 is empty"),
    (dict(prompts=[[1], [128]], seeds=[1, 2]), "prompt 1 has a token outside"),
    (dict(prompts=[[-1]], seeds=[1]), "prompt 0 has a token outside"),
    (dict(seeds=[1]), "5 prompts but 1 seeds"),
    (dict(max_new_tokens=0), "max_new_tokens 0"),
    (dict(num_samples=0), "num_samples 0"),
    (dict(temperature=-0.1), "temperature"),
    (dict(temperature=math.nan), "temperature"),
]


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
    def logp(self, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """The log-prob of each of ``tokens`` after ``prompt`` and the tokens before it (teacher forcing)."""
        logits = self.hf(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

    @torch.no_grad()
    def next_probs(self, prompt: list[int], temperature: float) -> torch.Tensor:
        """The probability of every next token.  -> (V,)"""
        return torch.softmax(self.hf(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)

    def gaps(self, prompts: list[list[int]], answers: list, temperature: float = 1.0) -> torch.Tensor:
        """The error of every log-prob of the answers."""
        rows = [(prompt, one) for prompt, group in zip(prompts, answers, strict=True) for one in group]
        return torch.cat(
            [(self.logp(prompt, one.tokens, temperature) - torch.tensor(one.logp)).abs() for prompt, one in rows]
        )

    @torch.no_grad()
    def routes(self, text: list[int]) -> np.ndarray:
        """The experts of every token in each MoE layer, in ascending order.  -> (T, layers, experts a token)"""
        logits = self.hf(torch.tensor([text]), output_router_logits=True).router_logits
        return torch.stack([one.view(len(text), -1).topk(4).indices.sort(-1).values for one in logits], 1).numpy()


def flat(answers: list) -> list[tuple]:
    """Tokens, log-probs and reasons of all answers, to be compared bit for bit."""
    return [(one.tokens, one.logp, one.finish_reason) for group in answers for one in group]


def assert_greedy(model: Model, engine, prompts: list[list[int]], stops: set[int]) -> None:
    """At temperature 0 the tokens are those of transformers' generate; truncation changes nothing."""
    settings = dict(num_samples=1, max_new_tokens=12, temperature=0, top_p=0.5, top_k=3)
    answers = engine.sample(prompts, seeds=[0] * len(prompts), **settings)
    for prompt, (one,) in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        rule = dict(max_new_tokens=12, do_sample=False, eos_token_id=sorted(stops), pad_token_id=0)
        expected = model.hf.generate(ids, attention_mask=torch.ones_like(ids), **rule)
        assert one.tokens == expected[0, len(prompt) :].tolist()
    assert model.gaps(prompts, answers).max() <= 1e-5


def assert_routes(model: Model, prompts: list[list[int]], answers: list) -> None:
    """The recorded routes are those of transformers for every token but the last, which was never run."""
    for prompt, group in zip(prompts, answers, strict=True):
        for one in group:
            assert one.routed_experts.dtype == np.uint8
            assert np.array_equal(np.sort(one.routed_experts, -1), model.routes(prompt + one.tokens[:-1]))


def assert_stops(free: list, cut: list, stops: set[int]) -> None:
    """``cut`` are the answers ``free`` up to the first of the tokens ``stops``."""
    for whole, one in zip(sum(free, []), sum(cut, []), strict=True):
        end = next((i + 1 for i, token in enumerate(whole.tokens) if token in stops), None)
        assert one.tokens == whole.tokens[:end] and np.allclose(one.logp, whole.logp[:end], rtol=0, atol=1e-5)
        assert one.finish_reason == ("stop" if end else "length") and whole.finish_reason == "length"
    assert {one.finish_reason for group in cut for one in group} == {"stop", "length"}


def assert_frequencies(group: list, probs: torch.Tensor) -> None:
    """Pearson's chi-square of the first tokens against ``probs``, at five standard deviations."""
    sampled = torch.tensor([one.tokens[0] for one in group])
    expected, counts = probs * len(sampled), torch.bincount(sampled, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    rare = expected < 10  # pooled, because the test needs several counts in every bin
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected, counts = expected[expected > 1], counts[expected > 1]
    degrees = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert degrees >= 1 and statistic < degrees + 5 * math.sqrt(2 * degrees), (statistic, degrees)
