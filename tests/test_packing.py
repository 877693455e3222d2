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
from gpu_attention import FORMS, as_on_a_gpu
from tiers import ci
from torch import Tensor

from hardware import kernels
from model import megatron_model, packing

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
    sees = packed.mask[:, 0] == 0  # (8, N, T)
    assert sees.shape == (8, 8, 16) and sees.any(-1).all()
    for row, (prompt, own) in enumerate([(3, 3), (3, 8), (5, 0), (5, 6), (5, 8), (5, 1), (3, 0), (0, 0)]):
        for i in range(own):
            assert sees[row, i].nonzero().flatten().tolist() == list(range(prompt + i + 1))
    assert not packing.pack(tokens, torch.zeros(8, 16), multiple=4).own_index.numel()


@pytest.mark.parametrize("trained", [True, False])
def test_the_sequences_of_a_gpu_are_prompts_own_tokens_and_filler(trained: bool, monkeypatch) -> None:
    """Own tokens that predict another one: 3, 8, 0, 6, 8, 1, 0 and 0; prompts of 3, 5 and 5 tokens."""
    as_on_a_gpu(monkeypatch, "2.11")
    tokens, mask = rows()
    packed = packing.pack(tokens, mask * trained, 4)
    queries, keys = (ends.diff().tolist() for ends in packed.sequences[:2])
    if not trained:  # one token of a prompt, and filler
        assert (queries, keys) == ([1, 3], [1, 3])
        return
    assert queries == [3, 5, 5, 3, 8, 6, 8, 1, 1] and keys == [3, 5, 5, 6, 11, 11, 13, 6, 1]
    assert packed.sequences[2:] == (8, 13) and sum(queries) == len(packed.source) == 40
    taken = tokens.flatten()[packed.source][packed.sequence_keys]
    assert taken[13:19].tolist() == tokens[0, :6].tolist() and taken[19:30].tolist() == tokens[1, :11].tolist()


def both_ways(parallel, path, recompute: bool, form: str) -> tuple[float, float, float]:
    """Largest differences of log-probs, entropies and (relative) gradients of packed and padded rows, on this rank.

    ``form``: of the attention of a GPU, for the packed rows; empty: attention of padded rows.
    """
    tokens, mask = (part.chunk(parallel.data)[parallel.data_rank] for part in rows())
    found = []
    if form:
        as_on_a_gpu(pytest.MonkeyPatch(), form)  # this process ends soon
    for packed in (None, packing.pack(tokens, mask, parallel.tensor)):
        model, _ = adapted.load(path, parallel, recompute=recompute)
        logp, entropy, *_ = megatron_model.token_logprobs(model, tokens, mask, parallel, TEMPERATURE, packed)
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


def of_nothing(parallel, path, form: str) -> float:
    """The largest gradient of rows that train nothing. Every rank still takes part."""
    model, _ = adapted.load(path, parallel)
    tokens, mask = rows()[0], torch.zeros(8, 16)
    if form:
        as_on_a_gpu(pytest.MonkeyPatch(), form)
    packed = packing.pack(tokens, mask, parallel.tensor)
    logp, entropy, *_ = megatron_model.token_logprobs(model, tokens, mask, parallel, TEMPERATURE, packed)
    (logp.sum() + entropy.sum()).backward()
    return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("form", ["", *FORMS])
@pytest.mark.parametrize("recompute", [True, ci(False)])
def test_packed_rows_give_the_numbers_of_padded_rows(tmp_path, recompute: bool, form: str) -> None:
    path = reference.save("qwen3_moe", tmp_path / "model")
    layouts = ["TP2_EP2", "EP2", *(["TP1", "TP2"] if form else [])]
    for layout, by_rank in world.in_layouts(layouts, both_ways, path, recompute, form).items():
        for apart in by_rank:
            assert max(apart) < 1e-5, (layout, apart)
    # rows that train nothing
    assert world.in_layouts(["TP2_EP2"], of_nothing, path, form) == {"TP2_EP2": [0.0, 0.0]}


def test_gradients_of_a_place_that_is_taken_often_are_summed(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda device: True)
    x = torch.randn(3, 2, requires_grad=True)
    kernels.take(x, torch.tensor([0, 2, 0, 0])).backward(torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    assert x.grad.tolist() == [[13, 16], [0, 0], [3, 4]]
