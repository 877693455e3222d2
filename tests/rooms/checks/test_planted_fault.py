"""Each planted fault of the benchmark does what it says."""

import json
import math
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import adapted
import agents
import pytest
import reference
import torch
import training
import world
from planting import instead
from sampled import FREE, Model, assert_alike, embedded
from torch import Tensor
from vllm_ranks import PROMPTS, SEEDS

import parallel_setup
from checks import planted_fault
from checks.planted_fault import named_faults
from engines import torch_sampler
from engines.torch_sampler import TorchSampler
from facts.exits import InputError
from lab import curves, records
from model import megatron_model
from parallel_setup import Parallel
from weight_sync import way_of
from weights import huggingface
from weights.policy import Policy

LAYOUTS = ["TP1", "TP2_EP2"]
ROUNDED = tuple(f"{letter}_proj.weight" for letter in ("q", "k", "v", "o", "gate", "up", "down"))


def right_and_wrong(name: str) -> tuple[Callable, Callable]:
    """The function of the method, and what the fault puts in its place."""
    ((place, fault),) = named_faults(name)
    right = pkgutil.resolve_name(place)
    return right, fault(right)


# ------------------------------------------------------------------------------------------------ faults of the method


def test_inverted_weights_are_the_reciprocals() -> None:
    old, sampled = torch.tensor([[0.2, 0.3]]).log(), torch.tensor([[0.1, 0.6]]).log()
    given = old, sampled, torch.ones(1, 2), "token", 1e3
    ratios = [rollout_weights(*given)[0].tolist() for rollout_weights in right_and_wrong("inverted_weights")]
    assert ratios == [pytest.approx([2.0, 0.5]), pytest.approx([0.5, 2.0])]


def test_a_permuted_teacher_has_the_adapters_of_the_other_layer() -> None:
    names = [f"model.layers.{layer}.{module}.{factor}" for layer in (0, 1) for module in "pq" for factor in "AB"]
    with mock.patch("weights.teacher.read", lambda cfg, arch: iter((name, name) for name in names)):
        right, wrong = (dict(read(None, None)) for read in right_and_wrong("permuted_teacher"))
    assert list(right.values()) == names and set(wrong) == set(names)
    for name, factor in wrong.items():
        assert factor == name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")


def test_a_reversed_clip_stops_what_should_pass_and_passes_what_should_be_stopped() -> None:
    """Ratios 1.5, limit 1.2. PPO has the losses 1.5 for A = -1, and -1.2 for A = 1, where a limit has no gradient."""
    found = []
    for policy_loss in right_and_wrong("reversed_clip"):
        logp = torch.tensor([[0.5], [0.5]]).log().requires_grad_()
        old = logp.detach() - torch.tensor(1.5).log()
        loss, measured = policy_loss(logp, old, torch.tensor([-1.0, 1.0]), torch.ones(2, 1), num_tokens=1)
        loss.backward()
        assert measured["policy_loss"] == loss and measured["clip_frac"] == 1
        found.append([loss.item(), *logp.grad.flatten().tolist()])
    assert found == [pytest.approx([1.5 - 1.2, 1.5, 0.0]), pytest.approx([1.2 - 1.5, 0.0, -1.5])]


def test_foreign_routes_are_those_of_the_token_before() -> None:
    routes, found = torch.arange(2 * 3).view(2, 3, 1, 1), []  # 2 rows of 3 tokens
    for replaying in right_and_wrong("foreign_routes"):
        replay = SimpleNamespace(
            uses=[], parallel=SimpleNamespace(tensor=1, tensor_rank=0)
        )  # of a model without layers
        with replaying(replay, routes, torch.ones(2, 3)):
            found.append(replay.routes.view(3, 2).t().tolist())  # time-major
    assert found == [[[0, 1, 2], [3, 4, 5]], [[2, 0, 1], [5, 3, 4]]]


# ------------------------------------------------------------------------------------------------ faults of the sampler


def test_rounded_weights_by_hand() -> None:
    """3 bits have -3 to 3. The scales are 3 / 3 = 1 and 0.6 / 3 = 0.2, then 0 (a group of zeros) and 9 / 3 = 3."""
    rounded = planted_fault.rounded_weights
    weight = torch.tensor([[3.0, -1.4, 0.6, 0.29], [0.0, 0.0, 4.6, -9.0]])
    expected = torch.tensor([[3.0, -1.0, 0.6, 0.2], [0.0, 0.0, 6.0, -9.0]])
    torch.testing.assert_close(rounded(weight, 3, 2), expected)
    # One scale of 1 for the first three inputs; the last one has its own, which keeps it.
    torch.testing.assert_close(rounded(weight[:1], 3, 3), torch.tensor([[3.0, -1.0, 1.0, 0.29]]))
    # 4 bits: the scale is 7 / 7 = 1. 8 bits: 127 / 127 = 1.
    assert rounded(torch.tensor([[7.0, 2.4, -6.6]]), 4).tolist() == [[7.0, 2.0, -7.0]]
    assert rounded(torch.tensor([[127.0, 2.4, -99.6]]), 8).tolist() == [[127.0, 2.0, -100.0]]
    assert rounded(weight.bfloat16(), 3, 2).dtype == torch.bfloat16


def test_weights_that_are_rounded_down_are_never_larger() -> None:
    """With 3 bits the largest weight of a group is 3 scales, so the scales of the two groups are 1 and 2."""
    weight = torch.tensor([[3.0, 1.4, 1.6, -0.2, -6.0, 3.2]])
    assert planted_fault.rounded_weights(weight, 3, 4).tolist() == [[3.0, 1.0, 2.0, 0.0, -6.0, 4.0]]
    assert planted_fault.rounded_weights(weight, 3, 4, down=True).tolist() == [[3.0, 1.0, 1.0, -1.0, -6.0, 2.0]]


def held(engine: TorchSampler) -> dict[str, Tensor]:
    """A copy of every tensor in the engine."""
    return {name: slot.clone() for name, slot in engine.decoder.slots.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def loaded(arch, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a new engine that got only this stream."""
    engine = TorchSampler(arch, stop_tokens=set(), pad_token=0)
    engine.load_weights(stream)
    return held(engine)


def pushes(parallel: Parallel, path: Path) -> list[dict[str, bool]]:
    """Two updates, each pushed with 4 bits and then clean: which properties hold. LoRA is on the attention alone."""
    cfg = training.config(path, path, lora__targets=("linear_qkv", "linear_proj"))
    model, arch = adapted.load(path, parallel)
    policy = Policy.on(cfg, arch, parallel, model)
    engine = TorchSampler(arch, stop_tokens=set(), pad_token=0)
    _, rounding_push = right_and_wrong("rounded=4")
    push = rounding_push(way_of(adapted.placed(cfg, parallel), policy), engine)
    trained = {id(factor) for factor in policy.factors.values()}
    base = [tensor for tensor in model.parameters() if id(tensor) not in trained]
    before, found = [tensor.clone() for tensor in base], []
    for step in range(2):
        adapted.move(policy.adapters, arch, parallel, step)
        clean = loaded(arch, huggingface.export(model, arch, parallel))
        exported = huggingface.export(model, arch, parallel)
        rounded = ((name, planted_fault.rounded_weights(x, 4) if name.endswith(ROUNDED) else x) for name, x in exported)
        expected = loaded(arch, rounded)
        first, pushed = push(step, [5, 6, 7, 8]), held(engine)
        again, twice = push(step, [5, 6, 7, 8]), held(engine)
        push.clean()
        found.append(
            {
                "the matrices are rounded, and nothing else": same(pushed, expected) and not same(pushed, clean),
                "no drift": same(pushed, twice) and first == again,
                "clean again": same(held(engine), clean),
                "the metrics are those of the clean push": abs(first["sync/update_share"] - 1) < 1e-4,
                "the trainer has not moved": len(base) > 20 and all(map(torch.equal, base, before)),
            }
        )
    return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_a_rounded_push_changes_the_matrices_of_the_sampler_and_a_clean_one_restores_them(kind, tmp_path) -> None:
    path = reference.save(kind, tmp_path)
    for layout, answers in world.in_layouts(LAYOUTS, pushes, path).items():
        for steps in answers:
            assert all(all(step.values()) for step in steps), (layout, steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aqn__schedule": "constant"}, "aqn.schedule: constant; needed with a fault that rounds weights: off"),
        ({"rollout__sync": "adapter"}, "rollout.sync: adapter; needed with a fault that rounds weights: merged"),
    ],
)
def test_what_does_not_go_with_rounded_weights_is_refused(changes, message: str, tmp_path: Path) -> None:
    _, rounding_push = right_and_wrong("rounded=3")
    with pytest.raises(InputError, match=message):
        rounding_push(SimpleNamespace(cfg=training.config(tmp_path, tmp_path, **changes), policy=None), None)


def test_a_merge_on_a_grid_by_hand() -> None:
    """With one binary place the numbers from 1 to 2 are 0.5 apart, and those from 2 to 4 are 1 apart."""
    weight = torch.tensor([1.0, 1.5, -3.0, 0.75, 0.0])
    merged = torch.tensor([1.3, 1.7, -3.6, 0.9, 0.1])
    nearest = planted_fault.on_grid(weight, merged, 1, 0.5)
    torch.testing.assert_close(nearest, torch.tensor([1.5, 1.5, -4.0, 1.0, 0.1]))
    down = planted_fault.on_grid(weight, merged, 1, 0.0)
    torch.testing.assert_close(down, torch.tensor([1.0, 1.5, -4.0, 0.75, 0.1]))
    coarser = planted_fault.on_grid(weight, weight + torch.tensor([0.9, 1.1, -1.9, 0.6, 0.1]), -1, 0.5)
    torch.testing.assert_close(coarser, torch.tensor([1.0, 3.5, -3.0, 1.75, 0.1]))


@pytest.mark.parametrize(("size", "equal"), [(1e-6, 0.99981), (1e-5, 0.9982), (1e-4, 0.9855)])
def test_a_grid_of_seven_places_is_the_merge_of_bf16_unless_the_exponent_changes(size: float, equal: float) -> None:
    """The two can only differ where W + U has another exponent than W, and in ties. The shares: a pilot's, W ~ 0.02."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(10**6, generator=generator)).bfloat16().float()
    merged = weight + size * torch.randn(10**6, generator=generator)
    rounded = merged.bfloat16().float()
    same = planted_fault.on_grid(weight, merged, 7, 0.5) == rounded
    assert same.float().mean().item() == pytest.approx(equal, abs=5e-4)
    exponents = [one.frexp().exponent for one in (weight, merged, rounded)]
    stays = (exponents[0] == exponents[1]) & (exponents[0] == exponents[2])
    assert same[stays].float().mean() > 0.9999 and stays.float().mean() > 0.95


@pytest.mark.parametrize("part", [-2.8, -0.3, 0.01, 0.3, 0.5, 0.9, 1.7])
def test_the_mean_of_a_million_stochastic_merges_is_the_update(part: float) -> None:
    """U is ``part`` times the distance d = 0.5, so C is one of the two multiples of d around it."""
    offsets = planted_fault.uniform(3, 5, "name", torch.empty(10**6))
    kept = (planted_fault.on_grid(torch.tensor(1.0), torch.tensor(1 + part / 2), 1, offsets) - 1) / 0.5
    down = math.floor(part)
    assert set(kept.tolist()) == {down, down + 1}
    chance = part - down
    assert abs(kept.double().mean().item() - part) < 5 * math.sqrt(chance * (1 - chance) / 10**6)


def test_the_random_numbers_of_a_merge_differ_by_seed_by_step_and_by_name_and_repeat() -> None:
    keys = [(1, 1, "q"), (2, 1, "q"), (1, 2, "q"), (1, 1, "k")]
    draws = [planted_fault.uniform(*key, torch.empty(2, 3)) for key in keys]
    assert len({tuple(one.flatten().tolist()) for one in draws}) == 4
    for key, one in zip(keys, draws, strict=True):
        torch.rand(3)
        assert torch.equal(planted_fault.uniform(*key, torch.empty(2, 3)), one)


def test_squared_random_numbers_make_a_biased_merge() -> None:
    """P(0.3 + r^2 >= 1) is 1 - sqrt(0.7) for a uniform r."""
    fault = planted_fault.FAULTS["coarse_biased"].wrong
    offsets = fault.keywords["offsets"](3, 5, "name", torch.empty(10**6))
    kept = planted_fault.on_grid(torch.tensor(1.0), torch.tensor(1.15), 1, offsets)
    assert (kept > 1).double().mean().item() == pytest.approx(1 - math.sqrt(0.7), abs=0.002)


def same_numbers(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The share of equal numbers in the adapted matrices of two engines."""
    pairs = [(tensor, other[name]) for name, tensor in one.items() if tensor.dim() > 1]
    return sum((a == b).sum().item() for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def coarse_pushes(parallel: Parallel, path: Path) -> tuple[dict[str, list[bool]], dict[str, dict[str, Tensor]]]:
    """Pushes on the grid of one binary place: which properties hold, by fault, and what the engine has after step 0."""
    found, kept = {}, {}
    for fault in ("coarse", "coarse_stochastic", "coarse_fixed"):
        cfg = training.config(path, path, model__recompute=False, lora__targets=("linear_qkv", "linear_fc1"))
        model, arch = adapted.load(path, parallel)
        policy = Policy.on(cfg, arch, parallel, model)
        engine = TorchSampler(arch, stop_tokens=set(), pad_token=0)
        _, coarse_push = right_and_wrong(f"{fault}=1")
        push = coarse_push(way_of(adapted.placed(cfg, parallel), policy), engine)
        base = held(engine)
        first = push(0, [5, 6, 7, 8])
        unchanged = same(held(engine), base)
        adapted.move(policy.adapters, arch, parallel, 0)
        clean = loaded(arch, huggingface.export(model, arch, parallel))
        metrics = push(0, [5, 6, 7, 8])
        pushed = held(engine)
        again = push(0, [5, 6, 7, 8]), held(engine)
        push(1, [5, 6, 7, 8])
        later = held(engine)
        push.clean()
        weight = torch.cat([tensor.flatten() for tensor in base.values()]).double()
        update = torch.cat([tensor.flatten() for tensor in clean.values()]) - weight
        change = torch.cat([tensor.flatten() for tensor in pushed.values()]) - weight
        spacing = 2.0 ** (weight.abs().clamp(min=1e-12).log2().floor() - 1)
        most = spacing * (0.5 if fault == "coarse" else 1)
        share = (change @ update / (update @ update)).item()
        found[fault] = [
            unchanged and first["fault/update_share"] == 1 and first["fault/update_error"] == 0,
            bool(((change / spacing).round() * spacing - change).abs().max() < 1e-6),
            bool(((change - update).abs() < most + 1e-6).all()) and not same(pushed, clean),
            abs(metrics["fault/update_share"] - share) < 1e-4,
            abs(metrics["fault/update_error"] - ((change - update).norm() / update.norm()).item()) < 1e-4,
            again[0] == metrics and same(again[1], pushed),
            same(later, pushed) == (fault != "coarse_stochastic"),
            same(held(engine), clean) and abs(metrics["sync/update_share"] - 1) < 1e-4,
        ]
        kept[fault] = pushed
    return found, kept


def test_a_coarse_push_has_multiples_of_the_grid_that_depend_on_seed_step_and_name_alone(tmp_path) -> None:
    """In another layout the products of LoRA are rounded otherwise, which moves few weights to another multiple."""
    path = reference.save("qwen3_moe", tmp_path)
    layouts = world.in_layouts(LAYOUTS, coarse_pushes, path)
    (_, alone), *_ = layouts["TP1"]
    for layout, answers in layouts.items():
        for found, kept in answers:
            assert all(all(properties) for properties in found.values()), (layout, found)
            for fault, pushed in kept.items():
                assert same_numbers(pushed, alone[fault]) > 0.9999, (layout, fault)
                assert same(pushed, answers[0][1][fault])


def coarse_log_probs(parallel: Parallel, path: Path, folder: Path) -> dict[str, Tensor]:
    """Log-probs of a trainer without and with coarse passes, and of a model that holds the weights on the grid."""
    cfg = training.config(path, path, model__recompute=False, lora__targets=("linear_proj", "linear_fc2"))
    model, arch = adapted.load(path, parallel)
    policy = Policy.on(cfg, arch, parallel, model)
    adapted.move(policy.adapters, arch, parallel, 0)
    base = dict(huggingface.export(model, arch, parallel, merge=False))
    merged = huggingface.export(model, arch, parallel)
    on_grid = [(name, planted_fault.on_grid(base[name], x, 1, 0.5).contiguous()) for name, x in merged]
    if parallel.rank == 0:
        huggingface.save_model(iter(on_grid), folder)
    torch.distributed.barrier()
    plain, _ = adapted.load(folder, parallel)
    tokens, mask = adapted.my_rows(reference.tokens(), parallel)
    micro = SimpleNamespace(tokens=tokens, mask=mask, packing=None)
    right, wrong = right_and_wrong("coarse_passes=1")
    return {
        "right": right(policy, micro)[0].detach(),
        "coarse": wrong(policy, micro)[0].detach(),
        "on the grid": megatron_model.token_logprobs(plain, tokens, mask, parallel)[0].detach(),
    }


def test_coarse_passes_compute_with_the_weights_of_a_coarse_push(tmp_path: Path) -> None:
    path, folder = reference.save("qwen3_moe", tmp_path / "model"), tmp_path / "on_grid"
    folder.mkdir()
    shutil.copy(path / "config.json", folder)
    for layout, answers in world.in_layouts(LAYOUTS, coarse_log_probs, path, folder).items():
        for logp in answers:
            torch.testing.assert_close(logp["coarse"], logp["on the grid"], rtol=0, atol=2e-5, msg=layout)
            assert (logp["right"] - logp["on the grid"]).abs().mean() > 0.01, layout


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model__dtype": "bf16", "rollout__sync": "merged"}, "bf16, merged, False, False"),
        ({"model__recompute": True}, "fp32, auto, False, True"),
        ({"rollout__expert_parallel": True}, "fp32, auto, True, False"),
    ],
)
@pytest.mark.parametrize("fault", ["coarse=1", "coarse_passes=1"])
def test_what_does_not_go_with_a_merge_on_a_grid_is_refused(fault: str, changes, found: str, tmp_path: Path) -> None:
    _, wrong = right_and_wrong(fault)
    settings = {"model__recompute": False} | changes
    policy = SimpleNamespace(cfg=training.config(tmp_path, tmp_path, **settings))
    with pytest.raises(InputError, match=f"model.recompute: {found}; needed with a fault that merges on a grid: fp32"):
        wrong(policy, None)


@pytest.fixture
def model(sampled_models) -> Model:
    return sampled_models("qwen3")


def disturbed(fault: str) -> Callable:
    """(engine, prompts, settings) -> completions, as the rollout with this fault samples them."""
    ((place, wrong),) = named_faults(fault)
    assert place == "rollout.sample"
    return wrong(lambda engine, *rest, **named: engine.sample(*rest, **named))


def test_a_flipped_route_has_the_next_best_expert_in_place_of_the_last(model: Model) -> None:
    """Of the first sampled tokens the first layer reads what it reads in the model; prompts keep their routes."""
    prompts, settings = [[3, token] for token in range(40)], dict(num_samples=4, max_new_tokens=2, temperature=1.0)
    settings |= dict(seeds=[*range(40)], return_routed_experts=True)
    engine = embedded(model)
    clean = engine.sample(prompts, **settings)
    answers = disturbed("flips")(engine, prompts, **settings)
    for prompt, group in zip(prompts, answers, strict=True):
        texts = torch.tensor([prompt + one.tokens[:1] for one in group])
        router = model.hf(texts, output_router_logits=True).router_logits[0].view(*texts.shape, -1)
        for one, best in zip(group, router.topk(5).indices, strict=True):
            assert {*one.routed_experts[1, 0]} == {*best[1, :4].tolist()}
            assert {*one.routed_experts[2, 0]} == {*best[2, [0, 1, 2, 4]].tolist()}
    assert_alike(engine.sample(prompts, **settings), clean)  # evaluations are not disturbed


def test_noisy_logits_have_the_asked_deviation_and_their_own_log_probs(model: Model, monkeypatch) -> None:
    """Differences of two logits: the variance of their noise is twice sigma squared."""
    spy = mock.Mock(wraps=torch_sampler.pick)
    monkeypatch.setattr(torch_sampler, "pick", spy)
    engine, settings = embedded(model), dict(seeds=[1], num_samples=300, max_new_tokens=1, temperature=1.0)
    clean = engine.sample([PROMPTS[0]], **settings)
    answers = disturbed("noise=0.5")(engine, [PROMPTS[0]], **settings)
    assert_alike(engine.sample([PROMPTS[0]], **settings), clean)  # evaluations are not disturbed
    clean_logits, noisy_logits, _ = (call.args[0].double() for call in spy.call_args_list)
    noisy = noisy_logits.log_softmax(-1)
    for one, logp in zip(answers[0], noisy, strict=True):
        assert logp[one.tokens[0]].item() == pytest.approx(one.logp[0], abs=1e-6)
    apart = (noisy_logits - clean_logits).diff(dim=1)
    assert apart.mean(0).abs().max() < 5 * (0.5 / 300) ** 0.5
    assert apart[:, ::2].var().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("fault", ["flips", "noise=0.5"])
def test_what_a_disturbed_sampler_draws_does_not_depend_on_waves(model: Model, fault: str) -> None:
    engine, settings = embedded(model, set(range(0, 128, 16))), FREE | dict(num_samples=4, max_new_tokens=40)
    expected = disturbed(fault)(engine, PROMPTS, seeds=SEEDS, **settings)
    for engine.max_sequences in (3, 8):  # waves of one and of two prompts
        assert_alike(disturbed(fault)(engine, PROMPTS, seeds=SEEDS, **settings), expected)


@pytest.mark.parametrize("fault", ["flips", "noise=0.5"])
def test_an_engine_that_cannot_be_disturbed_is_refused(fault: str) -> None:
    with pytest.raises(InputError, match="rollout.engine: found SimpleNamespace; needed for the fault .*: torch"):
        disturbed(fault)(SimpleNamespace(sample=None), PROMPTS)


# ------------------------------------------------------------------------------------------------ planting


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "found 'nothing'; needed: one of inverted_weights, "),
        ("rounded=3+nothing", "found 'nothing'; needed: one of inverted_weights, "),
        ("flips=1", "found 'flips=1'; needed: flips, which takes no value"),
        ("rounded=5", "found 'rounded=5'; needed: rounded=VALUE, a value like 3|4|8"),
        ("noise=-1", "found 'noise=-1'; needed: noise=VALUE, a value like "),
        ("coarse=x", "found 'coarse=x'; needed: coarse=VALUE, a value like -?"),
    ],
)
def test_an_unknown_fault_is_refused_in_one_line(text: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert planted_fault.main([text, "configs/bench.yaml"]) == 2
    assert f"error: fault: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "overrides", "reason"),
    [
        ("inverted_weights", [], "loss.importance is none or uncorrected"),
        ("rounded=3+inverted_weights", [], "loss.importance is none or uncorrected"),
        ("reversed_clip", [], "loss.kind is cispo, or each rollout has one update"),
        ("reversed_clip", ["optim.prompts_per_update=8", "loss.kind=cispo"], "loss.kind is cispo, or"),
        ("permuted_teacher", [], "there is no loss.teacher"),
        ("foreign_routes", [], "replay.mode is off"),
        ("lost_experts", ["lora.targets=[linear_qkv]"], "lora.targets adapts no expert, or"),
        ("lost_experts", ["rollout.sync=adapter"], "lora.targets adapts no expert, or the factors are pushed"),
    ],
)
def test_a_fault_that_changes_nothing_is_refused(
    text: str, overrides: list[str], reason: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls of the repository's sweeps are not refused; a test of the sweeps loads them."""
    monkeypatch.setattr(planted_fault, "plant", lambda _: None)  # it would last until the process ends
    monkeypatch.setattr(parallel_setup, "run_command", lambda main, arguments: main(arguments))  # the other exits
    assert planted_fault.main([text, "configs/bench.yaml", *overrides, "--check"]) == 2
    name = text.split("+")[-1]
    assert f"error: fault: {name} changes nothing, because {reason}" in capsys.readouterr().err


def train(folder: Path, *script: str) -> tuple[str, str, list[dict]]:
    """Two steps of configs/bench.yaml on a model that has hardly learned.  -> command, metrics, evaluations"""
    given = [
        "configs/bench.yaml",
        "name=x",
        f"model.path={folder / 'model'}",
        "tiny_model.warm_start_steps=20",
        "rollout.prompts_per_step=4",
        "rollout.max_new_tokens=24",
        "replay.mode=r3",
        "optim.prompts_per_update=4",
        "optim.warmup_steps=0",
        "optim.lr=0.05",
        "loss.entropy_coef=0.1",
        "train.steps=2",
        "lora.targets=[linear_fc1,linear_fc2]",
        "eval.num_questions=64",
        "eval.every=1",
        "checks.off=[logp_gap, adapters]",
        f"train.out_dir={folder / script[-1]}",
    ]
    log, no_curves = folder / f"{script[-1]}.log", instead(curves, "draw_curves", lambda *_: None)
    code, text = agents.start(1, *script, *given, log=log, plant=no_curves, light=False).end()
    assert code == 0, text
    (run,) = (folder / script[-1]).glob("x-*")
    command, metrics, evals = ((run / name).read_text() for name in ("command.txt", "metrics.jsonl", "eval.jsonl"))
    return command, metrics, [json.loads(line) | {"step": 0} for line in evals.splitlines()]


@pytest.mark.nightly
def test_faults_of_pushes_and_evaluations_do_in_a_training_what_they_say(tmp_path: Path) -> None:
    """LoRA is on the experts only, so without them all evaluations are those of the base model.

    Experts whose weights are rounded are pushed by name, and others as stacks, so both are tried.
    """
    script = "checks/planted_fault.py"
    command, metrics, right = train(tmp_path, script, "rounded=3")
    for fault in ("lost_experts", "rounded=3+lost_experts"):
        _, _, lost = train(tmp_path, script, fault)
        assert right[0] == lost[0] == lost[1] == lost[2] and right[0] != right[1]
    assert command.startswith(
        "torchrun --nnodes=1 --nproc_per_node=1 checks/planted_fault.py rounded=3 configs/bench.yaml name=x "
    )
    assert records.planted_fault(command) == "rounded=3"
    for fault in ("rounded=3+altered_evaluation", "altered_evaluation+rounded=3"):
        command, same_metrics, altered = train(tmp_path, script, fault)
        assert metrics == same_metrics  # the rounded policy is evaluated, and nothing else changes
        assert right[0] == altered[0] and right[1:] != altered[1:]
        assert records.planted_fault(command) == fault


@pytest.mark.nightly
def test_merges_on_a_grid_repeat_to_the_byte_and_need_both_sides_for_one_policy(tmp_path: Path) -> None:
    script, gaps = "checks/planted_fault.py", {}
    for fault in ("coarse=1", "coarse_passes=1", "coarse=1+coarse_passes=1+altered_evaluation"):
        _, metrics, _ = train(tmp_path, script, fault)
        gaps[fault] = max(json.loads(line)["rollout/logp_gap_mean"] for line in metrics.splitlines())
    sampler_alone, trainer_alone, both = gaps.values()
    assert both < 1e-5 < 1e-2 < min(sampler_alone, trainer_alone)
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    first, second = (train(folder, script, "coarse_stochastic=1")[1:] for folder in folders)
    assert first == second
    _, fixed, _ = train(folders[0], script, "coarse_fixed=1")
    assert fixed != first[0]
