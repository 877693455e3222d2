"""The real vLLM and vllm-ascend, 0.23.0(.post1) or 0.30.0(rc2), with our arguments and pushes, on a stub of CANN.

Run on cann_stub.py: the platform (A3); `create_engine_config` for every layout of the run scripts; on one rank a whole
engine of a tiny model (worker, memory check, model, caches, warm-up), a push of whole weights through vLLM's reload,
and sampling, with 0.23.0 also with recorded routes; on four ranks of gloo (tensor 2 x data 2, experts over all) the
groups, the model, the placement of the experts and the push of the trainer's shards, which must write what
vllm-ascend's loader writes.

It ends there: the kernels of torch_npu, vllm-ascend and HCCL only check their arguments, so nothing is shown about
their values, speed and memory; no forward pass on several ranks; no graph capture. torch is 2.13.0 and not 2.10.0.

Executed, in the order of a start: the check of the chip; configuration, parallel sizes and options of every layout,
eager and with graphs, and arguments that are refused (REFUSED); AscendConfig with weight_nz_mode 0 and
enable_cpu_binding false; the memory check with 64 GiB that are free; vLLM's groups, ExpertMapManager and the
dispatchers' set-up on 4 ranks; both kinds of push, so that exchanged halves are found; AscendSampler with draws from
the table, the recorder of routed experts and block tables on one rank, with logits that are all 0. Not used here:
speculative decoding, layer sharding, xlite, Flash Comm, fused MC2, KV transfer. Not executed: the choice of the
exchange of tokens, lengths of the all-to-all, MC2's token masks and windows, the record of routes over replicas, ACL
graphs, the memory pools of sleep mode, Triton kernels, and with them Model Runner V2, the only one that records routes
with 0.30.0rc2.

The environment needs a C compiler and no CANN (torch 2.10.0 without CUDA is not on PyPI for x86_64). For 0.30.0rc2,
install requirements/npu-0.30.txt after npu.txt, the tag v0.30.0 and vllm-ascend==0.30.0rc2:

    python3 -m venv ../vllm-ascend-env && source ../vllm-ascend-env/bin/activate
    pip install --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
    export TORCH_DEVICE_BACKEND_AUTOLOAD=0          # torch must not import torch_npu, which fails without CANN
    grep -vE '^(#|$|torch|triton)' requirements/npu.txt | pip install --no-deps torch_npu==2.13.0 -r /dev/stdin
    git clone -b v0.23.0 --depth 1 https://github.com/vllm-project/vllm ../vllm
    VLLM_TARGET_DEVICE=empty pip install --no-deps --no-build-isolation ../vllm
    export SOC_VERSION=ascend910_9391 COMPILE_CUSTOM_KERNELS=0
    pip install --no-deps --no-build-isolation --no-binary vllm-ascend vllm-ascend==0.23.0.post1
    VLLM_ASCEND_ENV=../vllm-ascend-env/bin/python python -m pytest -m vllm_ascend tests/test_vllm_ascend.py
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import cann_stub
import pytest
import run_scripts
import training
from packaging.version import Version
from source import ROOT

import config
from engines.drawing import uniforms_of

pytestmark = [pytest.mark.vllm_ascend, pytest.mark.nightly]

SIZES = dict(vocab_size=512, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=128, num_experts=8, expert_width=64)
SCRIPTS = [name for name in run_scripts.SCRIPTS if "npu" in name or "node" in name]
REFUSED = {  # what the real code refuses -> (what is changed, words of its error)
    "graphs and blocking launches": ({"variables": {"ASCEND_LAUNCH_BLOCKING": "1"}}, "ACL graph is incompatible"),
    "ranks that are no grid": ({"changes": {"tensor_parallel_size": 3}}, "data_parallel_rank (5) must be in the range"),
    "a fourth of a head": ({"changes": {"tensor_parallel_size": 64, "data_parallel_size": 1}}, "attention heads"),
    "a longer row": ({"changes": {"max_model_len": 10**6}}, "greater than the derived max_model_len"),
    "routes in Model Runner V1": (
        {"changes": {"enable_return_routed_experts": True}},
        "only supported by the V2 model",
    ),
}
ONLY = {"graphs and blocking launches": False, "routes in Model Runner V1": True}  # refused only before, or from, 0.30
ODD = "a graph of 250 tokens for 4 tensor ranks"


@pytest.fixture(scope="module")
def python() -> str:
    """The Python that has vLLM and vllm-ascend."""
    if not (found := os.environ.get("VLLM_ASCEND_ENV", "")):
        pytest.skip("VLLM_ASCEND_ENV names no Python with vLLM and vllm-ascend (see the docstring)")
    return found


@pytest.fixture(scope="module")
def newer(python: str) -> bool:
    """Whether vllm-ascend is 0.30 or newer."""
    find = "from importlib.metadata import version; print(version('vllm-ascend'))"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout
    return Version(found.strip()).release >= (0, 30)


@pytest.fixture(scope="module")
def child(python: str, tmp_path_factory):
    """A function that runs vllm_ascend_engine.py."""
    if missing := cann_stub.missing_tools():
        pytest.skip(f"the stub of CANN needs a C compiler and binutils; missing: {', '.join(missing)}")
    variables = cann_stub.host_environment(python, tmp_path_factory.mktemp("cann"))

    def run(what: str, folder: Path) -> None:
        script = ROOT / "tests" / "support" / "vllm_ascend_engine.py"
        done = subprocess.run(
            [python, str(script), what, str(folder)], env=variables, cwd=ROOT, capture_output=True, text=True,
            timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]

    return run


# ------------------------------------------------------------------------------------------------------ configuration


def cases(folder: Path) -> dict[str, dict]:
    """For every layout, its last rank with and without graphs; then what must be refused."""
    for path in ROOT.glob("configs/*.config.json"):  # the published config.json files
        (folder / path.name.removesuffix(".config.json")).mkdir()
        shutil.copy(path, folder / path.name.removesuffix(".config.json") / "config.json")
    found = {}
    for name, job in run_scripts.shipped().items():
        if name.split()[0] in SCRIPTS:
            overrides = [text.replace("model.path:=models", f"model.path:={folder}") for text in job.overrides]
            for eager in ("true", "false"):
                chosen = [*overrides, f"rollout.enforce_eager={eager}"]
                case = {
                    "config": str(ROOT / job.config),
                    "overrides": chosen,
                    "rank": job.ranks - 1,
                    "ranks": job.ranks,
                }
                found[f"{name} {'eager' if eager == 'true' else 'graphs'}"] = case
    return found


@pytest.fixture(scope="module")
def configurations(child, tmp_path_factory) -> tuple[dict, dict, dict]:
    """The answers for the platform; the cases; the answer for each case."""
    folder = tmp_path_factory.mktemp("configurations")
    asked = cases(folder)
    colocated, sizes = asked["run_16npu.sh tp4_ep16 graphs"], {"cudagraph_capture_sizes": [16, 250]}
    asked |= {name: colocated | change for name, (change, _) in REFUSED.items()}
    graphs = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"} | sizes, "max_num_seqs": 250}
    asked[ODD] = colocated | {"changes": graphs}
    (folder / "asked.json").write_text(json.dumps(list(asked.values())))
    child("configurations", folder)
    found = json.loads((folder / "answer.json").read_text())
    return found, asked, dict(zip(asked, found["cases"], strict=True))


def test_the_platform_is_an_npu_of_the_kind_that_it_was_built_for(configurations) -> None:
    assert (configurations[0]["platform"], configurations[0]["device"]) == ("NPUPlatform", "A3")


def test_every_shipped_layout_becomes_the_engine_that_was_meant(configurations) -> None:
    """Expected from the configuration, by hand: `tensor` ranks a replica, or one engine over all ranks."""
    _, asked, answers = configurations
    layouts = [name for name in asked if name.startswith("run_")]
    assert len(layouts) >= 40
    for name in layouts:
        case, found = asked[name], answers[name]
        assert "error" not in found, (name, found)
        cfg = config.load_config(case["config"], case["overrides"])
        tensor, shared, eager = cfg.rollout.tensor, cfg.rollout.expert_parallel, cfg.rollout.enforce_eager
        data = case["ranks"] // tensor if shared else 1
        rows = decoded_rows(cfg, case["ranks"])
        sizes = [size for size in (16, 64, 128, 192, 256) if size < rows] + [rows]
        assert found["config"] == {
            "tensor": tensor, "data": data, "data rank": data - 1, "world": tensor * data, "expert parallel": True,
            "worker": "vllm_ascend.worker.worker.NPUWorker", "cache bytes": cfg.rollout.kv_cache_mib * 2**20,
            "block": 128, "prefix caching": True, "chunked prefill": False, "async": False,
            "graphs": "NONE" if eager else "FULL_DECODE_ONLY", "sizes": [] if eager else sizes,
            "quantization": None, "tied head": False, "tiled weights": 0, "binds CPUs": False,
        }, name  # fmt: skip


def decoded_rows(cfg: config.Config, ranks: int) -> int:
    """The rows that an engine decodes together: all of a step or of an evaluation, or as many as its cache holds."""
    about = json.loads((Path(cfg.model.path) / "config.json").read_text())
    heads = about["num_key_value_heads"] // min(about["num_key_value_heads"], cfg.rollout.tensor)
    width = about.get("head_dim", about["hidden_size"] // about["num_attention_heads"])
    token = about["num_hidden_layers"] * heads * width * 2 * 2  # keys and values in bf16
    group = cfg.rollout.group_size
    row = (
        cfg.data.max_prompt_tokens / group + cfg.rollout.max_new_tokens
    ) * token  # the rows of a group share a prompt
    step = math.ceil(cfg.rollout.prompts_per_step * cfg.rollout.tensor / ranks) * group
    return min(
        512, max(step, cfg.eval.batch_size * max(1, cfg.eval.samples)), int(cfg.rollout.kv_cache_mib * 2**20 / row)
    )


def test_a_graph_stays_whose_size_is_no_multiple_of_the_tensor_ranks(configurations) -> None:
    """vllm-ascend drops such sizes only under sequence parallelism, which the engine does not use."""
    answer = configurations[2][ODD]
    assert (answer["config"]["tensor"], answer["config"]["sizes"]) == (4, [16, 250])


@pytest.mark.parametrize("what", REFUSED)
def test_the_checks_of_the_real_code_are_in_force(what: str, configurations, newer: bool) -> None:
    assert (REFUSED[what][1] in configurations[2][what].get("error", "none")) == (ONLY.get(what, newer) == newer)


# ------------------------------------------------------------------------------------------------------------ engines


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return training.make_model(tmp_path_factory.mktemp("models") / "model", **SIZES)


def engine_folder(folder: Path, model: Path, **changes: object) -> Path:
    """A folder with the configuration of an engine for the tiny model, and the model."""
    cfg = training.config(
        folder / "model", folder, model__dtype="bf16", rollout__engine="vllm", rollout__kv_cache_mib=64,
        rollout__max_new_tokens=32, **changes,
    )  # fmt: skip
    shutil.copytree(model, folder / "model")
    (folder / "config.yaml").write_text(config.to_yaml(cfg.model_copy(update={"device": "npu"})))
    return folder


@pytest.fixture(scope="module")
def alone(child, model, newer: bool, tmp_path_factory) -> dict:
    folder = engine_folder(tmp_path_factory.mktemp("alone"), model, replay__mode="off" if newer else "r3")
    child("sample", folder)
    return json.loads((folder / "answer.json").read_text())


@pytest.fixture(scope="module")
def shared(child, model, tmp_path_factory) -> list[dict]:
    """The answers of the four ranks."""
    folder = engine_folder(
        tmp_path_factory.mktemp("shared"), model, rollout__tensor=2, rollout__expert_parallel=True,
        parallel__tensor=2, parallel__expert=4,
    )  # fmt: skip
    child("push", folder)
    return [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
def test_an_engine_samples_and_records_a_route_for_each_token_but_the_last(alone: dict, newer: bool) -> None:
    """Prompts of 3 and 2 tokens, 2 samples each of 4 tokens; 2 MoE layers, 2 experts a token; all logits are 0.

    From 0.30 on, only Model Runner V2 records routes, and the warm-up is the only other pass.
    """
    for group, prompt in zip(alone["samples"], (3, 2), strict=True):
        for tokens, routes, logp in group:
            assert len(tokens) == 4 and routes == (None if newer else [prompt + 4 - 1, 2, 2])
            assert logp == [pytest.approx(-math.log(SIZES["vocab_size"]), abs=1e-5)]
    layers, prefill_and_decode, calls = 2, 4, alone["calls"]
    assert calls["slot_mapping"] == prefill_and_decode
    assert calls["moe_gating_top_k"] >= layers * prefill_and_decode
    if not newer:  # now these are operators of torch_npu itself
        assert calls["rotary_embedding"] >= layers * prefill_and_decode
        assert calls["reshape_and_cache"] == layers * prefill_and_decode


@pytest.mark.slow
def test_a_push_reaches_every_copy_of_a_routers_weight(alone: dict, shared: list[dict], newer: bool) -> None:
    """From 0.30 on, a router computes with a copy in fp32."""
    copies = 2 if newer else 1
    assert len(alone["routers"]) == 2 * copies and alone["stale routers"] == []
    for found in shared:
        assert len([name for name in found["shapes"] if ".mlp.gate." in name]) == 2 * copies


@pytest.mark.slow
def test_an_engine_draws_the_tokens_of_the_embedded_sampler(alone: dict) -> None:
    """From equal logits: all of them are 0 here, so a uniform number u chooses token int(512 u)."""
    expected = (uniforms_of([1, 2], 2, 4) * SIZES["vocab_size"]).int().tolist()
    assert [[tokens for tokens, *_ in group] for group in alone["samples"]] == expected


@pytest.mark.slow
def test_a_push_of_whole_weights_brings_every_expert_transposed(alone: dict) -> None:
    """E local experts, h hidden size, w expert width: w13 (E, h, 2w) with gate before up, w2 (E, w, h)."""
    import torch

    found = {key: torch.tensor(alone[key]) for key in ("w13", "w2")}
    whole = {name: torch.tensor(value).bfloat16().float() for name, value in alone["whole"].items()}
    for e in range(8):
        gate, up, down = (
            whole[f"model.layers.1.mlp.experts.{e}.{kind}_proj.weight"] for kind in ("gate", "up", "down")
        )
        assert torch.equal(found["w13"][e], torch.cat([gate, up]).t()), e
        assert torch.equal(found["w2"][e], down.t()), e


@pytest.mark.slow
def test_the_groups_and_the_experts_of_a_rank_are_the_trainers(shared: list[dict]) -> None:
    """vllm_colocated.check_placement has compared them with Megatron's; the expected ranks are by hand."""
    for rank, found in enumerate(shared):
        experts = [2 * rank, 2 * rank + 1]
        assert found["placement"] == {
            "tensor": [[0, 1], [2, 3]][rank // 2], "data": [[0, 2], [1, 3]][rank % 2], "expert": [0, 1, 2, 3],
            "layer 0 experts": experts, "layer 1 experts": experts,
        }  # fmt: skip
        assert (found["config"]["data rank"], found["config"]["world"]) == (rank // 2, 4)


@pytest.mark.slow
def test_the_trainers_shards_are_what_vllm_ascends_loader_makes_of_the_whole_weights(shared: list[dict]) -> None:
    hidden, width, heads = 256, 64, 4
    for found in shared:
        assert found["different"] == [] and found["zero"] == []
        assert found["stacks"] == 2 * 2 and found["stacks that are not the trainer's"] == []
        assert found["different when swapped"] == [f"model.layers.{i}.mlp.experts.w13_weight" for i in (0, 1)]
        sizes = {name: shape[:-2] for name, shape in found["shapes"].items()}
        assert sizes["model.layers.0.mlp.experts.w13_weight"] == [2, hidden, 2 * width]
        assert sizes["model.layers.0.mlp.experts.w2_weight"] == [2, width, hidden]
        assert sizes["model.layers.0.self_attn.qkv_proj.weight"] == [3 * heads // 2 * 128, hidden]
        assert {shape[-1] for shape in found["shapes"].values()} == {"npu"}
        fp32 = {name for name, shape in found["shapes"].items() if shape[-2] != "torch.bfloat16"}
        assert fp32 == {name for name in found["shapes"] if name.endswith("gate.weight_fp32")}
