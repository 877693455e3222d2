"""layers_check.py: a sound trainer and sampler agree, and an update that does not reach the sampler is named.

The tests have two ranks in bf16 and a tiny model without a warm start. One lost expert was also found at the sizes of
Qwen3-30B-A3B; that was tried by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import training
import world

import hf_config
import weights_hf
from config import load_config, to_yaml
from input_files import InputError
from plan import layers_check
from weight_sync import WeightSync

SIZES = {
    "tiny_model__architecture": "qwen2_moe", "tiny_model__vocab_size": 320, "tiny_model__hidden_size": 32,
    "tiny_model__num_layers": 3, "tiny_model__num_heads": 4, "tiny_model__num_kv_heads": 2, "tiny_model__head_dim": 8,
    "tiny_model__num_experts": 16, "tiny_model__experts_per_token": 4, "tiny_model__expert_width": 32,
    "tiny_model__shared_expert_width": 16, "tiny_model__warm_start_steps": 0, "rollout__max_new_tokens": 16,
}  # fmt: skip


def one_expert_lost() -> None:
    """Expert 13 of layer 1 is pushed without its update. With EP2 it is the sixth expert of the second rank."""
    real = weights_hf.merged

    def faulty(slot: weights_hf.Slot):
        lost = slot.expert == 5 and any("layers.1." in name and "experts.13." in name for name in slot.names)
        return slot.weight if lost else real(slot)

    weights_hf.merged = faulty


def nothing_pushed() -> None:
    """The engine receives nothing after the first push."""
    WeightSync.push_clean = lambda self: None


def wrong_replica() -> None:
    """The engine of the second rank keeps its base weights."""
    real = WeightSync.push_clean

    def faulty(self: WeightSync) -> None:
        load = self.engine.load_weights
        if self.parallel.rank == 1:
            self.engine.load_weights = lambda tensors: [None for _ in tensors]
        real(self)
        self.engine.load_weights = load

    WeightSync.push_clean = faulty


def check(folder: Path, fault: Callable[[], None] | None, dtype: str = "bf16") -> tuple[list[int], dict, str]:
    """The exit codes of two ranks with EP2, the figures, and the printed text."""
    cfg = training.in_layout(
        training.config(folder / "none", folder, model__dtype=dtype, rollout__sync="merged", **SIZES), "EP2"
    )
    (folder / "run.yaml").write_text(to_yaml(cfg))
    given = [str(folder / "run.yaml"), "--folder", str(folder / "two"), "--json", str(folder / "found.json")]
    world._import_megatron()

    def run() -> int:
        if fault:
            fault()
        return layers_check.main(given)

    codes = world.as_torchrun(2, run, log=folder / "log")
    text = (folder / "log").read_text()
    assert (folder / "found.json").exists(), text
    assert not (folder / "two").exists()
    return codes, json.loads((folder / "found.json").read_text()), text


def test_a_sound_trainer_and_sampler_agree_and_every_expert_is_met(tmp_path) -> None:
    codes, found, text = check(tmp_path, None)
    assert codes == [0, 0] and not found["wrong"] and "WRONG" not in text, text
    assert found["layers"] == 2  # the model has three
    assert found["experts"] == found["experts_judged"] == 2 * 16
    assert found["gap_mean"] < 0.1 < found["gap_without_adapters"]
    assert found["tokens"] > 3000 and len(found["gap_by_replica"]) == 2


def test_one_expert_whose_adapter_does_not_reach_the_sampler_is_named(tmp_path) -> None:
    codes, found, _ = check(tmp_path, one_expert_lost)
    assert codes == [1, 1]
    worst = found["experts_most_apart"][0]
    assert (worst["layer"], worst["expert"]) == (1, 13)
    assert "stand out by their median, first: 13 of layer 1 (" in found["wrong"]


@pytest.mark.parametrize(
    ("fault", "words"), [(nothing_pushed, "(samplers 0, 1 of 2, "), (wrong_replica, "(samplers 1 of 2, ")]
)
def test_an_engine_that_was_not_pushed_to_is_named(fault, words, tmp_path) -> None:
    codes, found, _ = check(tmp_path, fault, "fp32")
    assert codes == [1, 1]
    assert "nats a token, at most 0.001 expected" in found["wrong"] and words in found["wrong"]
    assert "layer 0 is the first whose output differs" in found["wrong"]


def test_adapters_that_change_nothing_are_refused_as_a_blind_check() -> None:
    found = {"bound": 0.1, "gap_by_replica": [0.0], "gap_by_rank": [0.0], "gap_mean": 0.0, "gap_without_adapters": 0.0}
    assert "would not show" in layers_check.judged(found, [])
    assert layers_check.judged(found | {"gap_without_adapters": 3.0}, []) == ""
    assert "differ by nan" in layers_check.judged(found | {"gap_mean": float("nan")}, [])


def test_a_folder_of_the_users_is_left_alone(tmp_path) -> None:
    cfg = load_config(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="in the way, and not made by this program"):
        layers_check.write_model(cfg, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_two_layers_have_the_real_models_sizes() -> None:
    path = Path(__file__).parents[1] / "configs" / "qwen3.yaml"
    cfg = load_config(path, ["model.path=none/Qwen3-30B-A3B-Instruct-2507"])
    two, whole = hf_config.parse(layers_check.settings(cfg)), hf_config.planned(cfg)[0]
    assert (two.num_layers, whole.num_layers) == (2, 48)
    for key in ("hidden_size", "num_heads", "num_experts", "expert_ffn_size", "vocab_size", "experts_per_token"):
        assert getattr(two, key) == getattr(whole, key)
