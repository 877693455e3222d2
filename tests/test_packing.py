"""Packed rows give the same numbers as padded rows: log-probs, entropies, and every gradient.

Covered: prompts that several rows share, rows of many lengths, rows that train nothing, masks with holes, layouts.
"""

from __future__ import annotations

import adapted
import pytest
import reference
import torch
import torch.distributed as dist
import world
from scope import cases
from torch import Tensor

import model_megatron
import packing
from architecture import Rounding

TEMPERATURE = 0.7


def rows() -> tuple[Tensor, Tensor]:
    """Eight rows on three prompts of 3, 5 and 5 tokens; own tokens: 1 to 9; the last row trains nothing."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 128, (8, 16), generator=generator)
    mask = torch.zeros(8, 16)
    for row, (prompt, length, own) in enumerate(
        [(0, 3, 4), (0, 3, 9), (1, 5, 1), (1, 5, 7), (1, 5, 9), (2, 5, 2), (0, 3, 1), (2, 5, 0)]
    ):
        tokens[row, :length] = 40 + 10 * prompt + torch.arange(length)
        mask[row, length : length + own] = 1
    mask[4, 8] = 0
    return tokens, mask


def test_line_holds_each_prompt_once_and_no_token_that_predicts_nothing() -> None:
    packed = packing.pack(*rows(), multiple=1)
    # The prompts have 3 + 5 + 5 tokens. The last token of a row predicts nothing: 3 + 8 + 0 + 6 + 8 + 1 + 0.
    assert len(packed.source) == 13 + 26
    tokens = rows()[0].flatten()[packed.source]
    assert tokens[:13].tolist() == [40, 41, 42, 50, 51, 52, 53, 54, 60, 61, 62, 63, 64]
    assert len(packing.pack(*rows(), multiple=4).source) == 40


def test_every_query_sees_a_key_and_none_after_itself() -> None:
    """Also the places of padding: a kernel's result for a query without keys is undefined, and could be NaN."""
    tokens, mask = rows()
    packed = packing.pack(tokens, mask, multiple=1)
    (mask,) = packed.masks
    sees = mask[:, 0] == 0  # (8, N, T)
    assert packed.calls == [(8, 8, 16)] and sees.shape == (8, 8, 16) and sees.any(-1).all()
    for row, (prompt, own) in enumerate([(3, 3), (3, 8), (5, 0), (5, 6), (5, 8), (5, 1), (3, 0), (0, 0)]):
        for i in range(own):
            assert sees[row, i].nonzero().flatten().tolist() == list(range(prompt + i + 1))
    assert not packing.pack(tokens, torch.zeros(8, 16), multiple=4).calls


@pytest.mark.parametrize("trained", [True, False])
def test_few_shapes_add_padding_inside_of_attention_alone(trained: bool) -> None:
    """So neither the loss nor the routers see it: the line is the same. Calls take rows by length, longest first.

    Own tokens that predict another one: 3, 8, 0, 6, 8, 1, 0 and 0; prompts of 3 and 5 tokens.
    """
    tokens, mask = rows()
    exact, few = (packing.pack(tokens, mask * trained, 4, rounding) for rounding in (None, Rounding(2, 5, 4)))
    for name in ("source", "position", "rows", "line"):
        assert torch.equal(getattr(exact, name), getattr(few, name)), name
    assert few.prompts.shape == ((4, 8) if trained else (2, 4))
    assert few.calls == ([(2, 10, 18), (2, 10, 18), (2, 5, 13)] if trained else [])
    assert [mask.shape for mask in few.masks] == [(r, 1, n, k) for r, n, k in few.calls]
    assert all((mask == 0).any(-1).all() for mask in few.masks)  # a query without keys could become NaN


def both_ways(parallel, path, recompute: bool, rounding: Rounding | None) -> tuple[float, float, float]:
    """Largest differences of log-probs, entropies and (relative) gradients of packed and padded rows, on this rank."""
    tokens, mask = (part.chunk(parallel.data)[parallel.data_rank] for part in rows())
    found = []
    for packed in (None, packing.pack(tokens, mask, parallel.tensor, rounding)):
        model, _ = adapted.load(path, parallel, recompute=recompute)
        logp, entropy, *_ = model_megatron.token_logprobs(model, tokens, mask, parallel, TEMPERATURE, packed)
        (logp * torch.arange(16) + 0.3 * entropy).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for (
            gradient
        ) in gradients:  # a tensor rank has only a share of a norm's gradient: that of its part of the sequence
            dist.all_reduce(gradient, group=parallel.tensor_group)
        found.append((logp.detach(), entropy.detach(), gradients))
    (logp, entropy, gradients), (packed_logp, packed_entropy, packed_gradients) = found
    assert len(gradients) == len(packed_gradients) > 10
    scale = max(gradient.abs().max() for gradient in gradients)
    apart = max((a - b).abs().max() / scale for a, b in zip(gradients, packed_gradients, strict=True))
    return (logp - packed_logp).abs().max().item(), (entropy - packed_entropy).abs().max().item(), apart.item()


def of_nothing(parallel, path, rounding: Rounding | None) -> float:
    """The largest gradient of rows that train nothing. Every rank still takes part."""
    model, _ = adapted.load(path, parallel)
    tokens, mask = rows()[0], torch.zeros(8, 16)
    packed = packing.pack(tokens, mask, parallel.tensor, rounding)
    logp, entropy, *_ = model_megatron.token_logprobs(model, tokens, mask, parallel, TEMPERATURE, packed)
    (logp.sum() + entropy.sum()).backward()
    return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("rounding", [None, Rounding(2, 5, 4)])
@pytest.mark.parametrize("recompute", cases([True], [False]))
def test_packed_rows_give_the_numbers_of_padded_rows(tmp_path, recompute: bool, rounding: Rounding | None) -> None:
    path = reference.save("qwen3_moe", tmp_path / "model")
    layouts = ["TP2_EP2", "EP2", *(["TP1", "TP2"] if rounding else [])]
    for layout, by_rank in world.in_layouts(layouts, both_ways, path, recompute, rounding).items():
        for apart in by_rank:
            assert max(apart) < 1e-5, (layout, apart)
    # rows that train nothing
    assert world.in_layouts(["TP2_EP2"], of_nothing, path, rounding) == {"TP2_EP2": [0.0, 0.0]}
