"""What preflight.py tries under torchrun: groups, operators, two layers, and the tests of a device."""

import dataclasses
import inspect
import io
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import launched
import planted
import pytest
import reference
import torch
import torch.distributed as dist
import training
import world
from gpu_attention import FORMS, as_on_a_gpu
from planting import Plant, after
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file
from scipy import stats
from source import ROOT
from tiers import nightly
from torch import Tensor

import export
import parallel_setup
from checks import adapter_check, groups, kernels_check, layers_check, sampling_check
from checks.kernels_check import Case
from checks.launched import Answer
from facts.exits import InputError
from hardware import kernels
from inputs import hf_config
from inputs.config import load_config, to_yaml
from knobs import ParallelConfig
from model import batches
from parallel_setup import Parallel
from weights import peft_adapters, probes

# --------------------------------------------------------------------------------------------------------------- groups


def check_layout(tensor: int, expert: int) -> tuple[list[dict], str, bool]:
    return check(parallel_setup.open_layout(ParallelConfig(tensor=tensor, expert=expert), torch.device("cpu")))


def check(parallel: Parallel) -> tuple[list[dict], str, bool]:
    rows = groups.measure(parallel)
    return rows, groups.as_text(rows), all(row["answer"] == "right" for row in rows)


def check_with_a_fault(parallel: Parallel, collective: str, place: int) -> tuple[str, bool]:
    """One element is wrong on one rank, in every answer of one collective over a group of two ranks."""
    real = getattr(dist, collective)

    def faulty(out, *args, group, **kwargs):
        real(out, *args, group=group, **kwargs)
        if parallel.rank == place and dist.get_world_size(group) == 2:
            out.view(-1)[3] += 1

    setattr(dist, collective, faulty)
    return check(parallel)[1:]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            (8, 2, 4),
            {
                "tensor": {(0, 1), (2, 3), (4, 5), (6, 7)},
                "expert": {(0, 1, 2, 3), (4, 5, 6, 7)},
                "data": {(0, 2, 4, 6), (1, 3, 5, 7)},
                "expert_data": {(0, 4), (1, 5), (2, 6), (3, 7)},
            },
        ),
        (
            (4, 2, 4),
            {"tensor": {(0, 1), (2, 3)}, "expert": {(0, 1, 2, 3)}, "data": {(0, 2), (1, 3)}},
        ),
    ],
)
def test_the_groups_that_carry_traffic_are_checked_and_no_other(sizes, expected):
    """Computed by hand: tensor ranks are neighbours, then come expert ranks; all other ranks hold copies."""
    ranks, *layout = sizes
    for rows, table, right in world.run(ranks, check_layout, *layout):
        assert right and "WRONG" not in table
        assert all(0 < row["milliseconds"] < 60e3 for row in rows)
        found = [(row["group"], {*map(tuple, row["members"])}) for row in rows]
        wanted = expected | {"world": {tuple(range(ranks))}}
        assert dict(found) == wanted and len(found) == 4 * len(wanted)  # each collective over the same groups
        assert all(group in wanted.items() for group in found)


@pytest.mark.parametrize(
    ("collective", "shown"),
    [("all_reduce", "all-reduce"), ("all_gather_into_tensor", "all-gather"), ("all_to_all_single", "all-to-all")],
)
def test_a_wrong_answer_is_named_with_its_group_and_ranks(collective, shown):
    """In TP2 x DP2, rank 2 shares a tensor group with rank 3 and a data group with rank 0."""
    for table, right in world.in_layouts(["TP2_EP2_DP2"], check_with_a_fault, collective, 2)["TP2_EP2_DP2"]:
        assert not right
        wrong = [line for line in table.splitlines() if "WRONG" in line]
        assert all(shown in line for line in wrong)
        assert any(re.match(r"tensor .*WRONG in ranks \[2, 3\]: element 3 is", line) for line in wrong)
        assert any(re.match(r"data .*WRONG in ranks \[0, 2\]: element 3 is", line) for line in wrong)


def test_the_exit_code_says_whether_all_were_right(monkeypatch):
    world._import_megatron()
    for right, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(groups, "answer", lambda cfg, parallel, right=right: Answer(right, "", []))
        assert world.as_torchrun(1, groups.main, ["configs/tiny_cpu.yaml", "parallel.expert=1"]) == [code]


def test_a_size_that_does_not_divide_the_ranks_is_refused_by_name() -> None:
    groups.refuse(ParallelConfig(tensor=2, expert=4), 4)
    with pytest.raises(InputError, match="parallel.expert: 3 does not divide the 4"):
        groups.refuse(ParallelConfig(tensor=2, expert=3), 4)


# ------------------------------------------------------------------------------------------------------------ operators
# checks/kernels_check.py names a slightly wrong operator with its dtype and pass.
#
# Sound ones pass in tests/machines/on_device/test_operators.py.

CONFIGS = Path(__file__).parents[3] / "configs"
CPU = torch.device("cpu")
SMALL = ["optim.tokens_per_micro_batch=352", "rollout.max_new_tokens=24"]  # 4 rows of 88 tokens


def small_cases(quantisation: str = "none") -> list[Case]:
    cfg = load_config(CONFIGS / "tiny_cpu.yaml", [*SMALL, f"model.quantisation={quantisation}"])
    return kernels_check.cases_of(cfg, hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0], 2, seed=0)


def table() -> dict[tuple[str, str], list[str]]:
    """(operator, dtype) -> which passes are wrong."""
    results = [result for case in small_cases() for result in kernels_check.check_operator(case, CPU, 0)]
    return {(row["operator"], row["dtype"]): row["wrong"] for row in kernels_check.summary(results)}


def test_every_operator_of_kernels_is_checked() -> None:
    functions = inspect.getmembers(kernels, inspect.isfunction)
    public = {name for name, f in functions if not name.startswith("_") and f.__module__ == kernels.__name__}
    checked = {case.name.split()[0] for case in [*small_cases(), *small_cases("int4")]}
    assert (
        public - {"attention_mask", "sequences", "sortable"} - {"on_gpu", "takes_sequences"} == checked
    )  # arguments; questions


@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_takes_the_attention_of_sequences(form: str, monkeypatch) -> None:
    """The operator of a GPU, with its formula in place of the kernel, against the formula with a mask."""
    as_on_a_gpu(monkeypatch, form)
    taken = after(kernels, "sequence_attention", lambda out, *_: calls.append(out.shape) or out)
    calls: list[torch.Size] = []
    taken(monkeypatch)
    assert not any(table()[operator, "fp32"] for operator in ("sequence_attention", "masked_attention", "take"))
    assert calls


def off(real: Callable[..., Tensor], dtype: torch.dtype, forward: float, backward: float) -> Callable[..., Tensor]:
    """``real``, but in ``dtype`` its answer is multiplied by ``forward`` and its gradients by ``backward``."""

    def faulty(x: Tensor, *args, **kwargs) -> Tensor:
        out = real(x, *args, **kwargs)
        if x.dtype == dtype:
            out = out + ((forward - 1) * out).detach()
            out.register_hook(lambda grad: grad * backward)
        return out

    return faulty


@pytest.mark.parametrize(
    "operator",
    [
        "rms_norm",
        "causal_attention",
        "masked_attention",
        "swiglu",
        "weighted_swiglu",
        "rotary",
        "grouped_mm",
        "quantised_grouped_mm",
        "dispatch_rows",
        "combine_rows",
        "take",
    ],
)
@pytest.mark.parametrize(
    ("dtype", "which", "forward", "backward"),
    [
        ("bf16", "forward", 1.03, 1.0),
        ("bf16", "backward", 1.0, 0.97),
        ("fp32", "forward", 1 + 2e-5, 1.0),
        ("fp32", "backward", 1.0, -1.0),
    ],
)
def test_an_operator_that_is_off_is_named_with_its_dtype_and_pass(
    operator, dtype, which, forward, backward, monkeypatch
) -> None:
    real = getattr(kernels, operator)
    monkeypatch.setattr(kernels, operator, off(real, kernels_check.devices.DTYPES[dtype], forward, backward))
    every = small_cases("int4" if operator == "quantised_grouped_mm" else "none")
    mine = [case for case in every if case.name.startswith(operator)]
    rows = kernels_check.summary([result for case in mine for result in kernels_check.check_operator(case, CPU, 3)])
    assert {(row["dtype"], *row["wrong"]) for row in rows} == {(dtype, which), ("bf16" if dtype == "fp32" else "fp32",)}
    text = kernels_check.as_text(rows)
    assert f"WRONG: {which}, on rank 3" in text and text.count("WRONG") == len(mine)


def test_one_wrong_row_or_number_is_enough(monkeypatch) -> None:
    (case,) = [case for case in small_cases() if case.name == "grouped_mm (fc2)"]
    real = kernels.grouped_mm
    for spoil in (lambda row: row.mul(1.02), lambda row: row.masked_fill(torch.arange(len(row)) == 5, math.nan)):

        def faulty(*args, spoil=spoil) -> Tensor:
            out = real(*args)
            return torch.cat([out[:17], spoil(out[17])[None], out[18:]])

        monkeypatch.setattr(kernels, "grouped_mm", faulty)
        assert all("forward" in result["wrong"] for result in kernels_check.check_operator(case, CPU, 0))


def test_an_operator_that_refuses_its_input_is_named_and_the_others_are_still_checked(monkeypatch) -> None:
    def refuse(*args, **kwargs) -> Tensor:
        raise RuntimeError("npu_rotary_mul: unsupported\nmore")

    monkeypatch.setattr(kernels, "rotary", refuse)
    rows = kernels_check.summary([r for case in small_cases() for r in kernels_check.check_operator(case, CPU, 1)])
    errors = {row["operator"]: row["error"] for row in rows if row["wrong"]}
    assert errors == {"rotary": "npu_rotary_mul: unsupported"} and len(rows) == 30
    assert "WRONG: forward and backward, on rank 1 (npu_rotary_mul: unsupported)" in kernels_check.as_text(rows)


@pytest.mark.parametrize(("dense", "shared"), [(40, 0), (0, 40)])
def test_swiglu_has_the_width_of_a_dense_layer_or_of_the_shared_expert(dense: int, shared: int) -> None:
    cfg = load_config(CONFIGS / "tiny_cpu.yaml", SMALL)
    arch = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0]
    arch = dataclasses.replace(arch, dense_ffn_size=dense, shared_expert_ffn_size=shared)
    (swiglu,) = [case for case in kernels_check.cases_of(cfg, arch, 2, seed=0) if case.name == "swiglu"]
    assert swiglu.inputs["gate_up"].shape[-1] == 2 * 40


# ----------------------------------------------------------------------------------------------------------- two layers
# layers_check.py: a sound trainer and sampler agree, and an update that does not reach the sampler is named.
#
# The tests have two ranks in bf16 and a tiny model without a warm start. One lost expert was also found at the sizes of
# Qwen3-30B-A3B; that was tried by hand.

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
    "data__max_prompt_tokens": 7,  # two tensor ranks split no odd number evenly
    "rollout__max_new_tokens": 16,
}


def checked(folder: Path, fault: Plant, dtype: str = "bf16", layout: str = "EP2") -> tuple[list[int], dict, str]:
    """The exit codes of two ranks, the figures, and the printed text."""
    cfg = training.in_layout(
        training.config(folder / "none", folder, model__dtype=dtype, rollout__sync="merged", **SIZES), layout
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


def test_a_check_of_all_ranks_without_a_configuration_asks_for_one(capsys) -> None:
    assert kernels_check.main([]) == 2
    assert capsys.readouterr().err.startswith("error: CONFIG: missing; give a YAML file")


def test_a_sound_trainer_and_sampler_agree_and_every_expert_is_met(tmp_path) -> None:
    codes, found, text = checked(tmp_path, planted.nothing, layout="TP2")
    assert codes == [0, 0] and not found["wrong"] and "WRONG" not in text, text
    assert found["layers"] == 2  # the model has three
    assert found["experts"] == found["experts_judged"] == 2 * 16
    assert found["gap_mean"] < 0.1 < found["gap_without_adapters"]
    assert 3000 < found["tokens"] <= 2 * 8 * 2 * 8 * 16 and len(found["gap_by_replica"]) == 2
    assert "first tokens that the same seeds repeat: 1, 1; at least 0.9 expected" in text
    assert text.count("; the most different has a median gap of") == 1
    assert all(row["right"] and row["text"] in text for row in found["sampling"]) and len(found["sampling"]) == 3


@pytest.mark.ci
def test_one_expert_whose_adapter_does_not_reach_the_sampler_is_named(tmp_path) -> None:
    """In fp32 the trainer has a copy of its own, so its log-probs show it."""
    codes, found, _ = checked(tmp_path, planted.FAULTS["one expert is pushed without its update"], "fp32")
    assert codes == [1, 1]
    worst = found["experts_most_apart"][0]
    assert (worst["layer"], worst["expert"]) == (1, 13)
    assert "have a larger median gap, first: 13 of layer 1 (" in found["wrong"]


def test_a_wrong_merge_in_memory_that_trainer_and_sampler_share_is_named(tmp_path) -> None:
    codes, found, _ = checked(tmp_path, planted.FAULTS["experts have a quarter of their update"])
    assert codes == [1, 1] and not found["gap_mean"] > found["bound"]
    assert "share are not W + (alpha / R) B A" in found["wrong"] and "larger median gap" not in found["wrong"]


def test_an_engine_that_was_not_pushed_to_is_named(tmp_path) -> None:
    codes, found, _ = checked(tmp_path, planted.FAULTS["rank 1 is never pushed to"], "fp32", "TP2")
    assert codes == [1, 1] and "(samplers 1 of 2, " in found["wrong"]
    assert "nats per token, at most 0.001 is allowed" in found["wrong"]
    assert "layer 0 is the first whose output differs" in found["wrong"]
    # The experts are merged in memory that it shares with the trainer.
    assert found["wrong"].endswith("; the sampler has: routed experts only"), found["wrong"]


# ------------------------------------------------------------------------------------------------ how tokens are drawn


FOLLOWS = "p-value of a chi-square test of each sampler's first tokens: "
REPEAT, AGAIN = "completions that repeat an earlier one, ", "first tokens that the same seeds repeat: "
DRAWN = {  # fault: words of the message
    "temperature x 1.3 on rank 1": FOLLOWS,
    "top-k 3": FOLLOWS,
    "one random stream for both replicas": REPEAT,
    "one sample for the whole group": REPEAT,
    "seeds are ignored": AGAIN,
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", DRAWN)
def test_a_sampler_that_does_not_draw_by_its_log_probs_is_named(fault: str, tmp_path) -> None:
    codes, found, _ = checked(tmp_path, planted.FAULTS[fault], "fp32")
    assert codes == [1, 1] and DRAWN[fault] in found["wrong"]
    assert "nats" not in found["wrong"], "the log-probs of these samplers are right"


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


# ------------------------------------------------------------------------------------------------ the tests of a device

TINY = str(ROOT / "configs" / "tiny_cpu.yaml")
NO_LAYOUT = "rank 1 opens no layout"  # so that no test can pass
PLANTED = {  # fault: a test that must fail, or the error of all
    "": "",
    "advantages of the wrong sign": "test_update.py::test_steps_are_those_of_the_unsharded_model",
    "gradients divided by the number of ranks": "test_lora.py::test_gradients_and_their_norm",
    "expert gradients doubled": "test_lora.py::test_gradients_and_their_norm",
    NO_LAYOUT: f"RuntimeError: planted: {NO_LAYOUT}",
}
EACH_PUSH = ("expert gradients doubled", NO_LAYOUT)


def self_test(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "preflight.py", "--self-test", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault if fault in EACH_PUSH else nightly(fault) for fault in PLANTED])
def test_two_ranks_of_a_cpu_are_judged_and_a_line_names_each_failed_test(fault: str, tmp_path, monkeypatch) -> None:
    """The process of the reference has the folders of PYTHONPATH, where packages may lie."""
    log = launched.noting_starts(tmp_path, monkeypatch)
    done = self_test(TINY, "--ranks", "2", PYTEST_ADDOPTS=f"--plant '{fault}' -k TP2_EP2" if fault else "")
    assert done.returncode == (1 if fault else 0), done.stdout[-3000:] + done.stderr[-3000:]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED tests/machines/on_device/")]
    assert all("[TP1" not in line for line in failed)  # only two ranks
    assert bool(failed) == bool(fault) and (not fault or any(PLANTED[fault] in line for line in failed)), failed
    counts = done.stdout.splitlines()[-1]
    assert (" failed" in counts, " passed" in counts) == (bool(fault), fault != NO_LAYOUT)
    assert "reference_process" in log.read_text()


def test_a_package_that_cannot_be_imported_fails_the_tests_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('planted: not this transformers')")
    done = self_test(TINY, "--ranks", "1", PYTHONPATH=str(tmp_path), PYTEST_ADDOPTS="-k gradients_and_their_norm")
    assert done.returncode == 1 and "ImportError: planted: not this transformers" in done.stdout, done


STAND_IN = {"PYTEST_PLUGINS": "with_fake_npu", "PYTHONPATH": str(ROOT / "tests" / "support")}


@pytest.mark.ci
def test_the_operators_of_the_stand_in_npu_equal_their_formulas() -> None:
    done = self_test(TINY, "device=npu", **STAND_IN, PYTEST_ADDOPTS="-k 2-none")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("1 passed"), done


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_two_launched_ranks_of_the_stand_in_npu_are_judged(fault: str, tmp_path: Path, monkeypatch) -> None:
    """A rank that raises ends the others, with its error. Only the layout that has most kinds of parallelism is run."""
    chosen = "-k 'TP2_EP2 or 2-none'" + (f" --plant '{fault}'" if fault else "")
    for name, value in (STAND_IN | {"PYTEST_ADDOPTS": chosen}).items():
        monkeypatch.setenv(name, value)
    with launched.launch(2, "preflight.py", "--self-test", TINY, "device=npu", log=tmp_path / "log") as launch:
        code = launch.wait()
    assert code == (1 if fault else 0), launch.text[-3000:]
    assert PLANTED[fault] in launch.text and (fault == NO_LAYOUT or " passed" in launch.text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([TINY, "--ranks", "3"], "error: --ranks: no layout of the tests has 3 ranks; give --ranks 1, 2, 4, 8 or 16"),
        ([TINY, "device=npu"], "error: device: npu: torch_npu is not installed; install requirements/npu.txt"),
        (["none.yaml"], "error: none.yaml: "),
    ],
)
def test_what_cannot_be_tested_here_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = self_test(*arguments)
    assert done.returncode == 2, done
    assert done.stderr.splitlines()[-1].startswith(said), done.stderr


# ------------------------------------------------------------------------------------------------------------- adapters
# adapter_check.py: PEFT is the program that is asked. Its adapters here are wrong as their files are, not as
# probes.faults has them.

EXPERTS, RANK = 8, probes.RANK
TWO_LAYERS = {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": EXPERTS, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> Path:
    """The probes of an adapter that PEFT itself has made and saved, for a Qwen2-MoE with a dense and a MoE layer."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("probed")
    base = reference.save("qwen2_moe", folder / "base", **TWO_LAYERS)
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"v_proj": 2},
        alpha_pattern={"o_proj": 3},
    )
    torch.manual_seed(0)
    model = get_peft_model(reference.load(base), settings)
    for name, factor in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(factor, std=0.1)
    model.save_pretrained(folder / "own")
    assert export.main([str(folder / "own"), "--probes", str(folder / "probes")]) == 0
    return folder / "probes"


def ask(folder: Path, stack: str, *more: str) -> tuple[int, dict[str, dict]]:
    """The exit code of the check, and what it says about each probe of a folder."""
    code = adapter_check.main([str(folder), "--stack", stack, "--json", str(folder / "found.json"), *more])
    figures = json.loads((folder / "found.json").read_text())
    return code, {row["probe"]: row for row in figures["rows"]}


def swapped(tensor: Tensor, dim: int) -> Tensor:
    """With the first half of a dimension after the second."""
    return torch.cat(tensor.chunk(2, dim)[::-1], dim)


def shifted(name: str, tensor: Tensor) -> Tensor:
    """Factors of the stack of all experts, A (E R, in) and B (out, R E), given to the next expert."""
    if "experts" not in name:
        return tensor
    return tensor.roll(RANK, 0) if "lora_A" in name else tensor.unflatten(1, (RANK, -1)).roll(1, 2).flatten(1)


def without_the_last(name: str, tensor: Tensor) -> Tensor:
    """The stack of all experts with a B of zeros for the last of them."""
    if "experts" not in name or "lora_A" in name:
        return tensor
    return tensor.unflatten(1, (RANK, -1)).index_fill(2, torch.tensor([EXPERTS - 1]), 0).flatten(1)


WRONG: dict[str, tuple[str, dict, Callable[[str, Tensor], Tensor], str, str]] = {
    # name: (probe, changes of adapter_config.json, of each factor, verdict, remark)
    "right": ("all.stack", {}, lambda name, x: x, "applied", "effect"),
    "alpha": ("all.stack", {"lora_alpha": RANK * probes.ALPHA}, lambda name, x: x, "wrong", "scale alpha instead of"),
    "rslora": ("all.stack", {"use_rslora": True}, lambda name, x: x, "wrong", "scale alpha / sqrt R"),
    "shifted": ("all.stack", {}, shifted, "wrong", "experts shifted by one"),
    "one_expert": ("experts_fc1.stack", {}, without_the_last, "wrong", "all but the last expert"),
    "neighbour": (
        "qkv.full", {}, lambda name, x: swapped(x, 0) if "lora_B" in name else x, "wrong", "neighbouring TP2 shard"
    ),
    "neighbour_down": (
        "experts_fc2.stack", {}, lambda name, x: swapped(x, 1) if "lora_A" in name else x, "wrong", "neighbouring TP2"
    ),
    "gate_up": (
        "experts_fc1.stack", {}, lambda name, x: swapped(x, 0) if "lora_B" in name else x, "wrong", "gate and up"
    ),
    "attention": ("all.stack", {}, lambda name, x: x if "attn" in name else 0 * x, "wrong", "attention only"),
    "base": ("all.stack", {}, lambda name, x: 0 * x, "ignored", "the base, bit for bit"),
    "unknown": ("all.stack", {}, lambda name, x: x.flip(0) if "_proj.lora_A" in name else x, "wrong", "no known fault"),
    "broken": ("qkv.full", {}, lambda name, x: x[:2], "refused", ""),
}  # fmt: skip


def changed_settings(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def changed_factors(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    path = folder / "adapter_model.safetensors"
    factors = {name: change(name, factor).contiguous() for name, factor in load_file(path).items()}
    save_file(factors, path, metadata={"format": "pt"})


def test_what_is_wrong_with_an_adapter_is_named(probed: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        folder.mkdir()
        shutil.copy(probed / "expected.json", folder)
        for label, (probe, settings, change, *_) in WRONG.items():
            target = folder / "probes" / f"{probe.partition('.')[0]}.{label}"
            shutil.copytree(probed / "probes" / probe, target)
            changed_settings(target, **settings)
            changed_factors(target, change)
        code, rows = ask(folder, "peft", "--dtype", dtype)
        assert code == 1 and len(rows) == len(WRONG)
        for label, (probe, _, _, verdict, remark) in WRONG.items():
            row = rows[f"{probe.partition('.')[0]}.{label}"]
            assert row["verdict"] == verdict and remark in row["remark"], row


def test_an_adapter_from_peft_is_read_as_peft_applies_it_and_what_peft_drops_is_found(probed: Path) -> None:
    """PEFT 0.21.2 with transformers 5.19: the experts of a Qwen2-MoE adapter with a pair an expert are left out."""
    code, rows = ask(probed, "peft", "--only", "given")
    assert code == 0 and rows["given.copied"]["verdict"] == "applied"
    code, rows = ask(probed, "peft", "--only", "all")
    assert code == 1 and rows["all.stack"]["verdict"] == "applied"
    for form in ("all.full", "all.leaf"):
        assert rows[form]["remark"] == "all but routed experts" and not rows[form]["warned"], rows[form]
    _, rows = ask(probed, "peft", "--only", "names_")
    assert {row["verdict"] for row in rows.values()} == {"ignored"}
    assert all("missing adapter keys" in row["warned"][0] for row in rows.values())
    _, rows = ask(probed, "peft", "--only", "pattern")
    assert {row["verdict"] for row in rows.values()} == {"applied"} and len(rows) == 2


def test_gates_factor_for_up_is_a_known_fault_where_up_has_its_own(probed: Path) -> None:
    arch = hf_config.read(probed.parent / "base")
    own, shared = (peft_adapters.read(probed / "probes" / f"{kind}.full", arch) for kind in ("mlp_own_a", "mlp"))
    wrong = probes.faults(own, arch)["up with the A of gate"]
    assert wrong.keys() == shared.keys() and not all(torch.equal(own[name].a, shared[name].a) for name in own)
    for name, pair in shared.items():
        assert torch.equal(wrong[name].a, pair.a) and torch.equal(wrong[name].b, pair.b), name
    assert "up with the A of gate" not in probes.faults(shared, arch)
    wider = {n: pair._replace(a=pair.a.repeat(2, 1)) if "up_proj" in n else pair for n, pair in own.items()}
    assert "up with the A of gate" not in probes.faults(wider, arch)  # ranks that differ, as of a rank_pattern


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "whole", "without_down"),
    [
        ("qwen2_moe", "all but routed experts", "wrong"),
        ("qwen3_moe", "all but dense and shared MLP", "ignored"),
        ("olmoe", "", "ignored"),
    ],
)
def test_the_models_of_the_document_show_what_its_table_says_of_peft(
    kind: str, whole: str, without_down: str, tmp_path: Path
) -> None:
    """PEFT 0.21.2 with transformers 5.19; ``whole``: what is wrong with all modules in a pair an expert."""
    bases = runpy.run_path(str(ROOT / "examples" / "adapter_bases.py"))
    bases["make"](tmp_path, {kind: bases["KINDS"][kind]})
    assert export.main([str(tmp_path / kind / "adapter"), "--probes", str(tmp_path / "probes")]) == 0
    _, rows = ask(tmp_path / "probes", "peft", "--only", "all")
    assert rows["all.stack"]["verdict"] == "applied"
    for form in ("all.full", "all.leaf"):
        assert rows[form]["verdict"] == ("wrong" if whole else "applied") and whole in rows[form]["remark"], rows[form]
    _, rows = ask(tmp_path / "probes", "peft", "--only", "mlp_fc1")
    assert rows["mlp_fc1.leaf"]["verdict"] == without_down and rows["mlp_fc1.stack"]["verdict"] == "applied"


@pytest.mark.parametrize("layout", ["TP2_EP2", "EP2"])
def test_the_trainer_applies_every_probe_in_any_layout(probed: Path, layout: str) -> None:
    (rank, *_), expected = world.in_layouts([layout], by_trainer, probed)[layout], probed / "expected.json"
    known = json.loads(expected.read_text())
    for name, found in rank.items():
        right = torch.tensor(known["kinds"][name.partition(".")[0]]["right"] if name else known["base"])
        assert (found - right).abs().max() < 1e-5, name
    assert len(rank) > 30


def by_trainer(parallel: Parallel, folder: Path) -> dict[str, Tensor]:
    """The log-probs of the trainer with each probe that has the names of the base model; "" without one."""
    base = json.loads((folder / "expected.json").read_text())["model"]
    arch = hf_config.read(base)
    cfg = training.config(Path(base), folder, model__path=base)
    trainer = probes.Trainer(cfg, arch, parallel, 3 * RANK)
    adapters = {path.name: path for path in (folder / "probes").iterdir() if "names_" not in path.name}
    return {"": trainer({})} | {name: trainer(peft_adapters.read(path, arch)) for name, path in adapters.items()}


def server(expected: dict, echo: bool, answers: dict[str, list]) -> Callable[..., io.BytesIO]:
    """urlopen with a server of these log-probs a model. It has qkv.full, and refuses to load it or another one."""

    def urlopen(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        if request.data is None:
            return io.BytesIO(b'{"data": [{"id": "base"}, {"id": "qkv.full"}]}')
        body = json.loads(request.data)
        if request.full_url.endswith("/v1/load_lora_adapter"):
            if body["lora_name"] in answers.keys() - {"qkv.full"}:
                return io.BytesIO(b"Success")
            raise urllib.error.HTTPError(request.full_url, 400, "Bad Request", Message(), io.BytesIO(b"no such module"))
        prompt = body["prompt"]
        row = answers[body["model"]][expected["prompts"].index(prompt)]
        choice: dict = {"text": "a"}
        if echo and body.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *row, -0.5]}
        elif not echo:
            keyed = zip(prompt[1:], row, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": logp}} for token, logp in keyed)]
        return io.BytesIO(json.dumps({"choices": [choice]}).encode())

    return urlopen


@pytest.mark.parametrize("echo", [False, True])
def test_a_server_is_asked_for_the_log_probs_of_the_prompts(probed: Path, echo: bool, monkeypatch) -> None:
    expected = json.loads((probed / "expected.json").read_text())
    right = expected["kinds"]["qkv"]["right"]
    answers = {"base": expected["base"], "qkv.full": right, "qkv.names_fsdp": expected["base"]}
    monkeypatch.setattr(urllib.request, "urlopen", server(expected, echo, answers))
    code, rows = ask(probed, "http://host", "--only", "qkv")
    assert code == 1
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "qkv.full": "applied",
        "qkv.names_fsdp": "ignored",
    } | dict.fromkeys(set(rows) - answers.keys(), "refused")
    assert (
        "HTTP 400: " in rows["qkv.alpha_pattern"]["remark"] and "no such module" in rows["qkv.alpha_pattern"]["remark"]
    )


def test_what_cannot_be_judged_has_exit_code_2_and_says_why(probed: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(probed, tmp_path / "probes")
    expected = json.loads((probed / "expected.json").read_text())
    expected["model"] = str(reference.save("qwen2_moe", tmp_path / "other", seed=1, **TWO_LAYERS))
    (tmp_path / "probes" / "expected.json").write_text(json.dumps(expected))
    for stack, said in (
        ("peft", "the base differs by"),
        ("pefd", "pefd is unknown; give transformers, "),
        ("trainer", "CONFIG: missing"),
        ("/nowhere/merged", "no merged model (config.json) in /nowhere/merged"),
        ("/nowhere/{}", "no merged model (config.json) in /nowhere/{}"),
        ("http://127.0.0.1:9", "cannot start or answer"),
    ):
        assert adapter_check.main([str(tmp_path / "probes"), "--stack", stack]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "advised"), [("float32", "--dtype bfloat16"), ("bfloat16", "--dtype float32")])
def test_the_advice_about_rounding_depends_on_the_type_that_is_given(dtype: str, advised: str) -> None:
    base, right = torch.zeros(2, 8).double(), torch.linspace(0.5, 1.5, 16).view(2, 8).double()
    known = {"right": right.tolist(), "faults": {"half": (right / 2).tolist()}}
    off = right + 0.2 * torch.tensor([1.0, -1.0]).repeat(2, 4)
    row = adapter_check.judged(off, base, known, base, 0.01, dtype)
    assert row["verdict"] == "wrong" and row["remark"].count("--dtype") == 1 and advised in row["remark"], row


def test_faults_that_the_tolerance_hides_are_named() -> None:
    kinds = {
        "all": {"right": [[0.0, 1.0]], "faults": {"experts swapped": [[0.01, 1.01]], "the base": [[1.0, 1.0]]}},
        "qkv": {"right": [[0.0, 1.0]], "faults": {"half": [[0.0, 1.0]]}},
    }
    assert adapter_check.too_small(kinds, {"all", "given"}, 0.02) == ["all: experts swapped"]
    assert adapter_check.too_small(kinds, {"all", "qkv"}, 0.001) == ["qkv: half"]


def test_a_given_adapter_that_is_refused_is_not_good(probed: Path, tmp_path: Path) -> None:
    shutil.copytree(probed, tmp_path / "probes")
    changed_settings(tmp_path / "probes" / "probes" / "given.copied", r=3)
    code, rows = ask(tmp_path / "probes", "peft", "--only", "given")
    assert (code, rows["given.copied"]["verdict"]) == (1, "refused")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: changed_settings(folder, use_dora=True),
            "use_dora is True; give an adapter in which it is False",
        ),
        (lambda folder: changed_settings(folder, base_model_name_or_path="gone"), "its base model is gone"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "no config.yaml; give the folder of a run"),
        (
            lambda folder: changed_factors(folder, lambda name, x: x[:, 1:] if "q_proj.lora_A" in name else x),
            "(64, 63)",
        ),
        (lambda folder: changed_factors(folder, lambda name, x: x[1:] if "q_proj.lora_A" in name else x), "a pair"),
        (lambda folder: changed_factors(folder, lambda name, x: 0 * x), "every B is 0"),
    ],
)
def test_an_adapter_that_has_no_right_answer_is_refused(probed: Path, tmp_path: Path, capsys, change, said) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(probed.parent / "own", folder)
    change(folder)
    assert export.main([str(folder), "--probes", str(tmp_path / "probes")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "probes").exists()
