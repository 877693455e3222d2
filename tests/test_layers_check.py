"""layers_check.py: a sound trainer and sampler agree, and an update that does not reach the sampler is named.

The tests have two ranks in bf16 and a tiny model without a warm start. One lost expert was also found at the sizes of
Qwen3-30B-A3B; that was tried by hand.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import planted
import pytest
import torch
import training
import world
from planting import Plant
from pytest import MonkeyPatch
from scipy import stats
from tiers import asked, nightly

from checks import layers_check, sampling_check
from facts.exits import InputError
from hardware.device import DTYPES
from inputs import hf_config
from inputs.config import load_config, to_yaml
from knobs import Config
from model import batches
from parallel_setup import Parallel

SIZES = {
    "tiny_model__architecture": "qwen2_moe",
    "tiny_model__vocab_size": 320,
    "tiny_model__hidden_size": 32,
    "tiny_model__num_layers": 3,
    "tiny_model__num_heads": 4,
    "tiny_model__num_kv_heads": 2,
    "tiny_model__head_dim": 8,
    "tiny_model__num_experts": 16,
    "tiny_model__experts_per_token": 4,
    "tiny_model__expert_width": 32,
    "train__seed": 1,
    "tiny_model__warm_start_steps": 0,
    "rollout__max_new_tokens": 16,
}


def check(folder: Path, fault: Plant, dtype: str = "bf16") -> tuple[list[int], dict, str]:
    """The exit codes of two ranks with EP2, the figures, and the printed text."""
    cfg = training.in_layout(
        training.config(folder / "none", folder, model__dtype=dtype, rollout__sync="merged", **SIZES), "EP2"
    )
    (folder / "run.yaml").write_text(to_yaml(cfg))
    given = [str(folder / "run.yaml"), "--folder", str(folder / "two"), "--json", str(folder / "found.json")]
    world._import_megatron()

    def run() -> int:
        fault(MonkeyPatch())
        return layers_check.main(given)

    codes = world.as_torchrun(2, run, log=folder / "log")
    text = (folder / "log").read_text()
    assert (folder / "found.json").exists(), text
    assert not (folder / "two").exists()
    return codes, json.loads((folder / "found.json").read_text()), text


def test_a_sound_trainer_and_sampler_agree_and_every_expert_is_met(tmp_path) -> None:
    codes, found, text = check(tmp_path, planted.nothing)
    assert codes == [0, 0] and not found["wrong"] and "WRONG" not in text, text
    assert found["layers"] == 2  # the model has three
    assert found["experts"] == found["experts_judged"] == 2 * 16
    assert found["gap_mean"] < 0.1 < found["gap_without_adapters"]
    assert found["tokens"] > 3000 and len(found["gap_by_replica"]) == 2
    assert "first tokens that the same seeds give again: 1, 1; at least 0.9 expected" in text
    assert all(row["right"] and row["text"] in text for row in found["sampling"]) and len(found["sampling"]) == 3


def test_one_expert_whose_adapter_does_not_reach_the_sampler_is_named(tmp_path) -> None:
    """In fp32 the trainer has a copy of its own, so its log-probs show it."""
    codes, found, _ = check(tmp_path, planted.FAULTS["one expert is pushed without its update"], "fp32")
    assert codes == [1, 1]
    worst = found["experts_most_apart"][0]
    assert (worst["layer"], worst["expert"]) == (1, 13)
    assert "stand out by their median, first: 13 of layer 1 (" in found["wrong"]


def test_a_wrong_merge_in_memory_that_trainer_and_sampler_share_is_named(tmp_path) -> None:
    codes, found, _ = check(tmp_path, planted.FAULTS["experts have a quarter of their update"])
    assert codes == [1, 1] and not found["gap_mean"] > found["bound"]
    assert "share are not W + (alpha / R) B A" in found["wrong"] and "stand out" not in found["wrong"]


def test_an_engine_that_was_not_pushed_to_is_named(tmp_path) -> None:
    codes, found, _ = check(tmp_path, planted.FAULTS["rank 1 is never pushed to"], "fp32")
    assert codes == [1, 1] and "(samplers 1 of 2, " in found["wrong"]
    assert "nats a token, at most 0.001 expected" in found["wrong"]
    assert "layer 0 is the first whose output differs" in found["wrong"]


# ------------------------------------------------------------------------------------------------ how tokens are drawn


FOLLOWS = "p of a chi-square of each sampler's first tokens: "
REPEAT, AGAIN = "completions that repeat an earlier one, ", "first tokens that the same seeds give again: "
FAULTS = dict(
    asked(
        [  # name, (ranks, words of the message); one without words is not planted
            ("none", (1, "")),
            ("none on two ranks", (2, "")),
            ("temperature x 1.3 on rank 1", (2, FOLLOWS)),
            ("top-k 3", (1, FOLLOWS)),
            ("one random stream for both replicas", (2, REPEAT)),
            ("one sample for the whole group", (1, REPEAT)),
            ("seeds are ignored", (1, AGAIN)),
            nightly("temperature x 1.3", (1, FOLLOWS)),
            nightly("one random stream for all prompts", (1, REPEAT)),
            nightly("each sample twice", (1, REPEAT)),
        ]
    )
)


def write_model(cfg: Config, folder: Path) -> None:
    config = layers_check.settings(cfg.model.path, cfg.tiny_model, cfg.row_tokens)
    layers_check.write_model(folder, config, DTYPES[cfg.model.dtype], cfg.train.seed)


def each_fault(parallel: Parallel, path: Path) -> dict[str, str]:
    """What the check says about each fault for so many ranks."""
    cfg = training.config(path, path, **SIZES)
    said = {}
    for name, (ranks, words) in FAULTS.items():
        if ranks == parallel.world_size:
            with MonkeyPatch.context() as patch:
                if words:
                    planted.FAULTS[name](patch)
                said[name] = layers_check.compare(cfg, hf_config.read(path), parallel)["wrong"]
    return said


@pytest.mark.nightly
def test_a_sampler_that_does_not_draw_by_its_log_probs_is_named(tmp_path) -> None:
    path = tmp_path / "layers"
    write_model(training.config(path, path, **SIZES), path)
    by_layout = world.in_layouts(["TP1", "EP2"], each_fault, path)
    assert len({tuple(one.items()) for one in by_layout["EP2"]}) == 1, "all ranks say the same"
    for name, said in (by_layout["TP1"][0] | by_layout["EP2"][0]).items():
        _, words = FAULTS[name]
        assert words in said and bool(said) == bool(words), (name, said)
        assert "nats" not in said, "the log-probs of these samplers are right"
        if "on rank 1" in name:
            sound, faulty = re.search(rf"{FOLLOWS}([^,]*), ([^,]*); at least", said).groups()
            assert float(sound) > 1e-6 > float(faulty)


def batch(tokens: list[list[int]], logp: torch.Tensor, prompts: list[list[int]]) -> batches.Rollout:
    """One completion for each list of tokens, in groups of equal size; ``logp`` (S, N)."""
    groups = torch.zeros(len(prompts), len(tokens) // len(prompts))
    return batches.Rollout(
        prompts,
        torch.tensor(tokens),
        logp,
        [len(row) for row in tokens],
        torch.zeros(len(tokens)),
        groups,
        groups,
        groups,
    )


def test_the_p_values_are_those_of_a_chi_square_test() -> None:
    """32 tokens of equal probability: the classes are 0 and 1, 2 and 3, and so on."""
    counts = torch.randint(20, 120, (32,), generator=torch.Generator().manual_seed(0))
    counts = torch.stack([counts, counts.roll(1)])  # of two replicas, with other pairs
    tokens = [[token] for row in counts for token, n in enumerate(row.tolist()) for _ in range(n)]
    uniform = torch.full((1, 32), -math.log(32), dtype=torch.float64)
    drawn = batch(tokens, torch.full((len(tokens), 1), -math.log(32)), [[1], [1]])
    found = sampling_check.chi_square(drawn, uniform, 2)
    # Nothing is known of the last class, so it counts as a degree of freedom.
    expected = [stats.chi2.sf(stats.chisquare(row.view(16, 2).sum(1)).statistic, 16) for row in counts]
    assert found == pytest.approx(expected, rel=1e-3) and min(expected) < 1e-6


def test_a_sampler_whose_kernels_round_otherwise_is_judged_by_its_own_log_probs() -> None:
    generator = torch.Generator().manual_seed(0)
    trainer = torch.randn(4, 320, generator=generator).double().log_softmax(1)
    sampler = (trainer + 0.5 * torch.randn(4, 320, generator=generator)).log_softmax(1)
    tokens = sampler.exp().multinomial(4096, replacement=True, generator=generator)  # (P, G)
    p_value = {}
    for name, logp in (("its own", sampler), ("the trainer's", trainer)):
        drawn = batch(tokens.view(-1, 1).tolist(), logp.gather(1, tokens).view(-1, 1).float(), [[1]] * 4)
        (p_value[name],) = sampling_check.chi_square(drawn, trainer, 1)
    assert p_value["its own"] > 1e-3 and p_value["the trainer's"] < 1e-9, p_value


# ------------------------------------------------------------------------------------------------ its inputs


def test_adapters_that_change_nothing_are_refused_as_a_blind_check() -> None:
    found = {
        "bound": 0.1,
        "gap_by_replica": [0.0],
        "gap_by_rank": [0.0],
        "gap_mean": 0.0,
        "gap_without_adapters": 0.0,
        "experts_wrong": 0.0,
    }
    found["sampling"] = []
    assert "would not show" in layers_check.judged(found, [])
    assert layers_check.judged(found | {"gap_without_adapters": 3.0}, []) == ""
    assert "differ by nan" in layers_check.judged(found | {"gap_mean": float("nan")}, [])


def test_a_folder_of_the_users_is_left_alone(tmp_path) -> None:
    cfg = load_config(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="already there and not an empty directory"):
        write_model(cfg, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
