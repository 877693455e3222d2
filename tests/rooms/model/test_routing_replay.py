"""Routing replay, and the load of the experts."""

import collections
import math
import statistics
from types import SimpleNamespace

import pytest
import reference
import torch
import world
from adapted import load, my_rows
from tiers import ci

from model import megatron_model, packing, routing_replay

# ------------------------------------------------------------------------------------------------------- routing replay
# Routing replay: own routes change nothing, other routes do. The load of the experts is that of transformers.
#
# The gradients are compared with those of the gating formula, computed densely over all experts.

KINDS = ["qwen3_moe", ci("qwen2_moe")]
LAYOUTS = ["TP1", "EP2", "TP2_EP2_DP2"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return reference.save(request.param, tmp_path_factory.mktemp(request.param))


# ------------------------------------------------------------------------------------------------ in every layout


def replays(parallel, path, tokens):
    model, arch = load(path, parallel)
    replay, (mine, mask) = routing_replay.RoutingReplay(model, arch, parallel), my_rows(tokens, parallel)

    def logp(routes=None, replayed=None):
        with torch.no_grad():
            if routes is None:
                return megatron_model.token_logprobs(model, mine, mask, parallel)[0]
            with replay.replaying(routes, replayed, count=True):
                return megatron_model.token_logprobs(model, mine, mask, parallel)[0]

    native = logp()
    with torch.no_grad():
        _, routes = replay.record(lambda: megatron_model.token_logprobs(model, mine, mask, parallel), len(mine))
    everywhere = torch.ones_like(mine, dtype=torch.bool)
    shifted = (routes + 1) % arch.num_experts
    one_row_late = routes.roll(1, dims=1)
    own = logp(routes, everywhere)
    differing_own = replay.differing_share()
    other = logp(shifted, everywhere)
    differing_other = replay.differing_share()
    return {
        "native": native,
        "routes": routes,
        "own": torch.equal(native, own),
        "other": (native - other).abs().max().item(),
        "late": (native - logp(one_row_late, everywhere)).abs().max().item(),
        "nowhere": torch.equal(native, logp(shifted, torch.zeros_like(everywhere))),
        "differing": (differing_own, differing_other),
        "free": replay.routes is None and replay.written is None,
        "load": counted(parallel, path),
    }


@pytest.fixture(scope="module")
def answers(folder):
    return world.in_layouts(LAYOUTS, replays, folder, reference.tokens(rows=4, length=12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_routes_and_none_change_no_bit_and_other_routes_or_routes_one_token_late_do(answers, layout):
    for answer in answers[layout]:
        assert answer["own"] and answer["free"] and answer["nowhere"]
        assert answer["other"] > 1e-2 and answer["late"] > 1e-2
        assert answer["differing"][0] == 0 and answer["differing"][1] > 0.9


def test_every_layout_records_the_same_routes(answers):
    whole = answers["TP1"][0]["routes"]
    for layout in LAYOUTS:
        ranks, tensor, _ = world.LAYOUTS[layout]
        rows = whole.chunk(ranks // tensor)
        assert all(torch.equal(answer["routes"], rows[i // tensor]) for i, answer in enumerate(answers[layout]))


# ------------------------------------------------------------------------------------------------ the load of experts

LENGTHS = [7, 5, 4, 6]  # of rows; two and two share a prompt of 3 tokens, and the last token of a row is not routed


def rows_to_train():
    """(4, 7) tokens and the mask of those that are trained."""
    tokens = reference.tokens(rows=4, length=7)
    tokens[1::2, :3] = tokens[::2, :3]
    places = torch.arange(7)
    return tokens, ((places >= 3) & (places < torch.tensor(LENGTHS)[:, None])).float()


def counted(parallel, path):
    """What RouterLoad counts in one of three passes over this rank's rows, of which the last two are a backward pass
    that routes again and another forward pass; and the most rows of an expert rank / the mean."""
    model, arch = load(path, parallel, recompute=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    load_of = routing_replay.RouterLoad(model, arch, parallel)
    tokens, mask = (rows.chunk(parallel.data)[parallel.data_rank] for rows in rows_to_train())
    tokens, mask = (torch.nn.functional.pad(rows, (0, 1)) for rows in (tokens, mask))  # 8: a multiple of tensor
    packed = packing.pack(tokens, mask, parallel.tensor)

    def logp():
        return megatron_model.token_logprobs(model, tokens, mask, parallel, packing=packed)[0]

    with load_of.counting(SimpleNamespace(packing=packed)):
        found = logp()
    found.sum().backward()
    logp()
    tokens_of = parallel.sum_over_ranks(load_of.sums)[:, :-1].sum(-1).tolist()  # in each layer, four experts a token
    return tokens_of, load_of.metrics(), load_of.by_layer


def load_by_hand(path):
    """The same from the router logits of transformers."""
    model, (tokens, _) = reference.load(path), rows_to_train()
    passes = []
    with torch.no_grad():
        for row, length in zip(tokens, LENGTHS, strict=True):
            passes.append(model(row[None, : length - 1], output_router_logits=True).router_logits)
    by_layer = collections.defaultdict(list)
    for of_rows in zip(*passes, strict=True):
        logits = torch.cat(of_rows).double()  # (tokens, 16)
        assert len(logits) == sum(LENGTHS) - 4
        tokens_of = logits.topk(4).indices.flatten().bincount(minlength=16)
        share = tokens_of / tokens_of.sum()
        by_layer["moe/load_max"].append(16 * share.max().item())
        by_layer["moe/load_entropy"].append(torch.special.entr(share).sum().item() / math.log(16))
        by_layer["moe/unused_frac"].append((tokens_of == 0).double().mean().item())
        by_layer["moe/confidence"].append(logits.softmax(-1).amax(-1).mean().item())
    return dict(by_layer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_load_of_the_experts_is_that_of_transformers_in_every_layout(answers, folder, layout):
    wanted = load_by_hand(folder)
    assert 0 < max(wanted["moe/unused_frac"]) <= 0.5 and min(wanted["moe/load_max"]) > 1.2
    for answer in answers[layout]:
        tokens_of, metrics, by_layer = answer["load"]
        assert set(tokens_of) == {4.0 * (sum(LENGTHS) - 4)}
        assert by_layer.keys() == metrics.keys() == wanted.keys()
        for name, values in wanted.items():
            assert by_layer[name] == pytest.approx(values, abs=6e-5), name
            assert metrics[name] == pytest.approx(statistics.fmean(values), rel=1e-5), name


# ------------------------------------------------------------------------------------------------ the router's gradient


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_weights_and_router_gradient_equal_the_dense_formula(norm_topk_prob):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    chosen = torch.rand(20, 8, generator=generator).argsort(-1)[:, :3]  # not the top ones
    upstream = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    # dense: I_i exp(s_i) / sum_j I_j exp(s_j), or exp(s_i) / sum_j exp(s_j)
    dense = logits.clone().requires_grad_()
    indicator = torch.zeros_like(logits).scatter(1, chosen, 1.0)
    among = indicator if norm_topk_prob else torch.ones_like(indicator)
    gates = indicator * dense.exp() / (among * dense.exp()).sum(-1, keepdim=True)
    (gates.gather(1, chosen) * upstream).sum().backward()
    live = logits.float().requires_grad_()
    weights = routing_replay.routing_weights(live, chosen, norm_topk_prob)
    (weights * upstream).sum().backward()
    torch.testing.assert_close(weights.double(), gates.gather(1, chosen), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(live.grad.double(), dense.grad, rtol=1e-4, atol=1e-6)
    assert (live.grad.abs() > 0).any()
    if norm_topk_prob:  # experts that were not chosen get no gradient; without renormalising, all get one
        assert (live.grad[indicator == 0] == 0).all()
    else:
        assert (live.grad != 0).all()


def passes_that_use_no_record(parallel, path):
    model, arch = load(path, parallel)
    replay = routing_replay.RoutingReplay(model, arch, parallel)
    shape = (1, 4, sum(arch.moe_layers), arch.experts_per_token)
    with replay.replaying(torch.zeros(shape, dtype=torch.uint8), torch.ones(1, 4, dtype=torch.bool)):
        pass


def test_a_record_that_no_layer_reads_stops_the_run(folder):
    with pytest.raises(RuntimeError, match=r"Tripped: routing replay: not every MoE layer .*; reads by layer: \[0"):
        world.in_layouts(["TP1"], passes_that_use_no_record, folder)


# ------------------------------------------------------------------------------------------------ records


def exchanged(sizes, owner, needed_by):
    rank = torch.distributed.get_rank()
    shapes = {s: (size, 2, 3) for s, size in sizes.items()}

    def record(sequence):
        return torch.full(shapes[sequence], sequence, dtype=torch.uint8)

    own = {s: record(s) for s in sizes if owner[s] == rank}
    got = routing_replay.exchange(own, owner, needed_by, shapes, rank)
    return {s: torch.equal(tensor, record(s)) for s, tensor in got.items()}


def test_each_rank_gets_the_records_that_it_trains_and_no_others():
    sizes = {0: 4, 1: 1, 2: 7, 3: 2, 9: 5}
    owner = {0: 0, 1: 3, 2: 1, 3: 0, 9: 2}
    needed_by = {0: [2, 3], 1: [0, 1], 2: [0, 1], 3: [0, 1], 9: [2, 3]}
    results = world.run(4, exchanged, sizes, owner, needed_by)
    for rank, got in enumerate(results):
        assert got == {s: True for s, ranks in needed_by.items() if rank in ranks}
