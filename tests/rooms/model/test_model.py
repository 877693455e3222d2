"""The model in Megatron beside transformers, and packed rows beside padded ones."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import adapted
import pytest
import reference
import torch
import torch.distributed as dist
import world
from adapted import load
from gpu_attention import as_on_a_gpu
from measured import log_probs
from tiers import asked, ci, nightly
from torch import Tensor

from hardware import kernels
from model import megatron_model, packing
from parallel_setup import Parallel

# ---------------------------------------------------------------------------------------------------------------- model
# The sharded model's log-probs, entropy and logits against transformers in fp32, at every layout of 1 to 16 ranks.
#
# transformers is the independent reference: random weights, no norm, bias or router at its identity. One forked world
# for each number of ranks computes everything (the fixtures). Each test reads one property.
# b rows, T tokens, N completion tokens, h hidden size, V vocabulary.

TOLERANCE = 1e-5  # of a log-prob near -5; measured 1e-6. The project promises 1e-4
TEMPERATURE = 0.7
TWO_LAYOUTS = ["TP2_EP2", ci("TP1")]
MODELS = {  # name: (kind, what differs from reference.SIZES)
    "qwen3": ("qwen3_moe", {}),  # one dense layer between two MoE layers, head_dim 24 != 64 / 8, own rope theta
    "qwen2": ("qwen2_moe", {}),
    "olmoe": ("olmoe", {}),
    "olmoe_2_of_8_kv_heads": ("olmoe", {"num_key_value_heads": 2}),
    "qwen3_tied_head": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_2_of_8_kv_heads": ("qwen3_moe", {"num_key_value_heads": 2}),
    "qwen2_2_of_8_kv_heads": ("qwen2_moe", {"num_key_value_heads": 2}),
    "qwen3_sparse_step_2": ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
    "qwen3_all_moe": ("qwen3_moe", {"mlp_only_layers": []}),
    "qwen3_all_dense": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen3_softmax_over_all": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2_softmax_over_chosen": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2_no_qkv_bias": ("qwen2_moe", {"qkv_bias": False}),
    "qwen2_top_1": ("qwen2_moe", {"num_experts_per_tok": 1}),
    "qwen3_other_rope": (
        "qwen3_moe",
        {"head_dim": 16, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rms_norm_eps": 1e-3},
    ),
}
KINDS = ["qwen3", "qwen2", "olmoe"]


def after_first(tokens: Tensor) -> Tensor:
    """The mask that scores every token but the first.  (b, T) -> (b, T)"""
    mask = torch.ones_like(tokens)
    mask[:, 0] = 0
    return mask


# ------------------------------------------------------------------------------------------------ what a rank computes


def other_forwards(parallel: Parallel, path: Path, tokens: Tensor) -> dict[str, object]:
    """Padded rows, small chunks, an empty mask, recompute and bf16."""
    model, mask = load(path, parallel)[0], after_first(tokens)
    answers: dict[str, object] = {}

    def stats(rows: Tensor, scored: Tensor, temperature: float = 1.0) -> megatron_model.TokenStats:
        return megatron_model.token_logprobs(model, rows, scored, parallel, temperature)

    def gradients(scored: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        logp, entropy, *_ = stats(tokens, scored, TEMPERATURE)
        (logp.sum() + entropy.sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with torch.no_grad():
        answers["all"] = stats(tokens, mask)
        short = tokens[:, :8]
        answers["short"] = stats(short, after_first(short)).logp
        padded = torch.cat([short, torch.zeros_like(short)], 1)
        answers["padded"] = stats(padded, after_first(padded)).logp
        some = mask * (tokens % 3 == 0)
        answers["some"] = some, stats(tokens, some)
        nothing = stats(tokens, torch.zeros_like(mask))
        answers["of_nothing"] = float((nothing.logp.abs() + nothing.entropy.abs()).sum())
    plain = gradients(mask)
    answers["num_gradients"] = len(plain)
    # A rank with padding only still takes part in every collective.
    answers["gradient_of_nothing"] = max(float(grad.abs().max()) for grad in gradients(torch.zeros_like(mask)).values())

    model, _ = load(path, parallel, recompute=True)
    head = model.embedding.word_embeddings if model.share_embeddings_and_output_weights else model.output_layer
    rows = 16 * len(head.weight)  # 16 of the 120 rows at a time
    with mock.patch.object(megatron_model, "logits_per_chunk", lambda device: rows):
        answers["chunk_gap"] = largest_gap(gradients(mask), plain)

    model, _ = load(path, parallel, dtype=torch.bfloat16)
    with torch.no_grad():
        answers["bf16"] = stats(tokens, mask).logp
    return answers


def largest_gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def sharded_gradient(parallel: Parallel, hidden: Tensor, weight: Tensor, chosen: Tensor, signs: Tensor) -> Tensor:
    """d (signs . logp + 0.3 signs . entropy) / d hidden, summed over the tensor ranks."""
    state = hidden.clone().requires_grad_()
    shard = weight.chunk(parallel.tensor)[parallel.tensor_rank]
    logp, entropy = megatron_model._VocabularyLogProbs.apply(state, shard, chosen, TEMPERATURE, parallel)
    (signs @ logp + 0.3 * signs @ entropy).backward()
    if parallel.tensor > 1:
        torch.distributed.all_reduce(state.grad, group=parallel.tensor_group)
    return state.grad


# ------------------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: reference.save(kind, folder / name, **more) for name, (kind, more) in MODELS.items()}


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return reference.tokens(rows=8, length=16)


@pytest.fixture(scope="module")
def true_logits(paths, tokens) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: reference.load(path)(tokens).logits for name, path in paths.items()}


@pytest.fixture(scope="module")
def everywhere(paths, tokens) -> dict[str, list]:
    """The base models in every layout."""
    return world.in_layouts(asked(world.TESTED), log_probs, {name: paths[name] for name in KINDS}, tokens, TEMPERATURE)


@pytest.fixture(scope="module")
def variants(paths, tokens) -> list:
    return world.in_layouts(["TP2_EP2"], log_probs, paths, tokens, TEMPERATURE)["TP2_EP2"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=TWO_LAYOUTS)
def layout(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def by_kind(paths, tokens) -> dict[str, dict[str, list]]:
    return {kind: world.in_layouts(asked(TWO_LAYOUTS), other_forwards, paths[kind], tokens) for kind in KINDS}


@pytest.fixture(scope="module")
def forwards(by_kind, kind, layout) -> dict[str, object]:
    """The results of rank 0 of a layout."""
    return by_kind[kind][layout][0]


# ------------------------------------------------------------------------------------------------ against transformers


def assert_as_transformers(by_rank: list, name: str, logits: Tensor, tokens: Tensor) -> None:
    expected = reference.distribution(logits, tokens, TEMPERATURE)
    shares = len({answers[name][0] for answers in by_rank})
    for answers in by_rank:
        share, stats = answers[name]
        for found, values in zip(stats[:2], expected, strict=True):
            torch.testing.assert_close(found[:, 1:], values.chunk(shares)[share], rtol=0, atol=TOLERANCE)
            assert not found[:, 0].any()


@pytest.mark.parametrize("name", world.TESTED)
def test_every_layout_gives_the_distribution_of_transformers(name, kind, everywhere, true_logits, tokens):
    assert_as_transformers(everywhere[name], kind, true_logits[kind], tokens)


@pytest.mark.parametrize("name", list(MODELS))
def test_every_architecture_option_is_computed_as_transformers_does(name, variants, true_logits, tokens):
    assert_as_transformers(variants, name, true_logits[name], tokens)


def test_all_ranks_of_a_tensor_group_hold_the_same_bits(everywhere, kind):
    for first, second, third, fourth in [everywhere["TP2_EP2_DP2"]]:
        for one, other in ((first, second), (third, fourth)):
            assert all(map(torch.equal, one[kind][1][:2], other[kind][1][:2]))


# ------------------------------------------------------------------------------------------------ rows, chunks, memory


def test_padding_and_positions_outside_the_mask_change_no_log_prob(forwards):
    torch.testing.assert_close(forwards["padded"][:, :8], forwards["short"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(forwards["short"], forwards["all"].logp[:, :8], rtol=0, atol=TOLERANCE)
    mask, some = forwards["some"]
    assert 0 < mask.sum() < mask.numel() / 2
    for found, values in zip(some[:2], forwards["all"][:2], strict=True):
        torch.testing.assert_close(found, values * mask, rtol=0, atol=TOLERANCE)
    assert forwards["of_nothing"] == forwards["gradient_of_nothing"] == 0.0  # a batch without completion tokens


def test_the_size_of_the_parts_of_the_logits_changes_no_gradient(forwards):
    """Nor does recompute, with which it is tried. That no more of them exist at once is what test_dry_run.py and
    rooms/plan/test_estimates.py find."""
    assert forwards["num_gradients"] > 25
    assert forwards["chunk_gap"] < 1e-5


def test_bf16_stays_near_fp32(forwards, kind, layout):
    gap = (forwards["bf16"] - forwards["all"].logp).abs()
    print(f"bf16 against fp32, {kind} {layout}: log-prob gap mean {gap.mean():.4f}, largest {gap.max():.4f}")
    assert 0 < gap.mean() < 0.05


# ------------------------------------------------------------------------------------------------ the vocabulary layer


def vocabulary_problem(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(50, 16, generator=generator) * scale
    weight = torch.randn(96, 16, generator=generator)
    return hidden, weight, torch.randint(0, 96, (50,), generator=generator), torch.randn(50, generator=generator)


@pytest.mark.parametrize("where", ["TP2", ci("TP1"), nightly("TP4_EP4")])
def test_gradient_of_log_prob_and_entropy_is_that_of_the_plain_formula(where):
    hidden, weight, chosen, signs = vocabulary_problem()
    state = hidden.clone().requires_grad_()
    log_p = torch.log_softmax(state @ weight.t() / TEMPERATURE, -1)
    logp, entropy = log_p.gather(1, chosen[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (signs @ logp + 0.3 * signs @ entropy).backward()
    for found in world.in_layouts([where], sharded_gradient, hidden, weight, chosen, signs)[where]:
        assert (found - state.grad).abs().max() / state.grad.abs().max() < 1e-5


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_log_probs_and_entropy_stay_exact_for_large_logits(scale):
    """Logits of 1e4 in fp32 have steps of 1e-3: entropy must not be the difference of two such numbers."""
    hidden, weight, chosen, _ = vocabulary_problem(scale)
    one_rank = SimpleNamespace(tensor=1, tensor_rank=0)
    logp, entropy = megatron_model._VocabularyLogProbs.apply(hidden, weight, chosen, 1.0, one_rank)
    exact = torch.log_softmax((hidden @ weight.t()).double(), -1)
    entropy_gap = (entropy - -(exact.exp() * exact).sum(-1)).abs().max()
    assert entropy_gap < 1e-5 and entropy.min() >= -1e-6
    expected = exact.gather(1, chosen[:, None])[:, 0]
    assert ((logp - expected).abs() / expected.abs().clamp(1)).max() < 1e-6


# -------------------------------------------------------------------------------------------------------------- packing
# Packed rows give the same numbers as padded rows: log-probs, entropies, and every gradient.
#
# Covered: prompts that several rows share, rows of many lengths, rows that train nothing, masks with holes, layouts.


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


@pytest.mark.parametrize("form", ["", "2.12", ci("2.11")])
@pytest.mark.parametrize("recompute", [True, ci(False)])
def test_packed_rows_give_the_numbers_of_padded_rows(tmp_path, recompute: bool, form: str) -> None:
    path = reference.save("qwen3_moe", tmp_path / "model")
    layouts = asked(["TP2_EP2", ci("EP2"), *([ci("TP1"), nightly("TP2")] if form else [])])
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
