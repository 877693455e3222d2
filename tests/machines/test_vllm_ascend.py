"""The real vLLM and vllm-ascend, 0.23.0(.post1) or 0.30.0(rc2), with our arguments and pushes, on a stub of CANN.

Run on cann_stub.py: the platform (A3); `create_engine_config` for every layout of the run scripts, eager and with
graphs, and arguments that are refused; then engines of a tiny model (worker, memory check, model, caches). On one rank
a push of whole weights must write what is expected by hand. On four ranks of gloo (tensor 2 x data 2, experts over all)
the groups and the placement of the experts must be the trainer's, and a push of the trainer's shards must write what
vllm-ascend's loader writes.

With MINDSPEED_DIR, a checkout of MindSpeed core_r0.16.0, the engines are also made in processes that have started the
device by the real MindSpeed and imported Megatron, as a training does. triton has a stand-in until then.

It ends there: the stub's kernels and collectives compute nothing, so there is no forward pass, no sampling, no graph
capture, no adapter, and nothing about speed and memory. docs/npu.md says what an earlier harness showed of these.

The environment needs a C compiler and no CANN. It has torch 2.13.0, because torch 2.10.0 without CUDA is not on PyPI
for x86_64. For 0.30.0rc2, install requirements/npu-0.30.txt after npu.txt, the tag v0.30.0 and vllm-ascend==0.30.0rc2:

    python3 -m venv ../vllm-ascend-env && source ../vllm-ascend-env/bin/activate
    pip install --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
    export TORCH_DEVICE_BACKEND_AUTOLOAD=0          # torch must not import torch_npu, which fails without CANN
    grep -vE '^(#|$|torch|triton)' requirements/npu.txt | pip install --no-deps torch_npu==2.13.0 -r /dev/stdin
    git clone -b v0.23.0 --depth 1 https://github.com/vllm-project/vllm ../vllm  # or PyPI's source, unpacked
    VLLM_TARGET_DEVICE=empty pip install --no-deps --no-build-isolation ../vllm
    export SOC_VERSION=ascend910_9391 COMPILE_CUSTOM_KERNELS=0
    pip install --no-deps --no-build-isolation --no-binary vllm-ascend vllm-ascend==0.23.0.post1
    export VLLM_ASCEND_ENV=../vllm-ascend-env/bin/python
    export MINDSPEED_DIR=../MindSpeed
    python -m pytest -m vllm_ascend --all tests/machines/test_vllm_ascend.py
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import cann_stub
import pytest
import run_scripts
import torch
import training
from packaging.version import Version
from safetensors.torch import load_file
from source import ROOT

from inputs import config

pytestmark = [pytest.mark.vllm_ascend, pytest.mark.nightly]

SIZES = dict(vocab_size=512, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=128, num_experts=8, expert_width=64)
LAYOUTS = [name for name in run_scripts.NAMES if "npu" in name or "node" in name]
# What the real code refuses: what is changed, words of its error, and whether before 0.30 and from 0.30 on.
REFUSED = {
    "graphs and blocking launches": (
        {"variables": {"ASCEND_LAUNCH_BLOCKING": "1"}},
        "ACL graph is incompatible",
        (True, False),
    ),
    "ranks that are no grid": (
        {"changes": {"tensor_parallel_size": 3}},
        "data_parallel_rank (5) must be in the range",
        (True, True),
    ),
    "a fourth of a head": (
        {"changes": {"tensor_parallel_size": 64, "data_parallel_size": 1}},
        "attention heads",
        (True, True),
    ),
    "a longer row": (
        {"changes": {"max_model_len": 10**6}},
        "greater than the derived max_model_len",
        (True, True),
    ),
    "routes in Model Runner V1": (
        {"changes": {"enable_return_routed_experts": True}},
        "only supported by the V2 model",
        (False, True),
    ),
}


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
def child(python: str, tmp_path_factory) -> Callable[..., None]:
    """A function that runs vllm_ascend_engine.py."""
    if missing := cann_stub.missing_tools():
        pytest.skip(f"the stub of CANN needs a C compiler and binutils; missing: {', '.join(missing)}")
    variables = cann_stub.host_environment(python, tmp_path_factory.mktemp("cann"))

    def run(what: str, folder: Path, *mindspeed: str) -> None:
        command = [python, str(ROOT / "tests" / "support" / "vllm_ascend_engine.py"), what, str(folder), *mindspeed]
        done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]

    return run


# ------------------------------------------------------------------------------------------------------ configuration


def cases(folder: Path) -> dict[str, dict]:
    """For every layout, its last rank with and without graphs."""
    for path in ROOT.glob("configs/*.config.json"):  # the published config.json files
        model = folder / path.name.removesuffix(".config.json")
        model.mkdir()
        shutil.copy(path, model / "config.json")
    found = {}
    for name in LAYOUTS:
        job = run_scripts.job(name)
        model = Path(config.load_config(ROOT / job.config, job.overrides).model.path).name
        overrides = [*job.overrides, f"model.path={folder / model}"]
        for mode, eager in (("eager", "true"), ("graphs", "false")):
            found[f"{name} {mode}"] = {
                "config": str(ROOT / job.config),
                "overrides": [*overrides, f"rollout.enforce_eager={eager}"],
                "rank": job.ranks - 1,
                "ranks": job.ranks,
            }
    return found


@pytest.fixture(scope="module")
def configurations(child, tmp_path_factory) -> tuple[dict, dict, dict]:
    """The answers for the platform; the cases; the answer for each case."""
    folder = tmp_path_factory.mktemp("configurations")
    asked = cases(folder)
    for name, (change, _, _) in REFUSED.items():
        asked[name] = asked["run_16npu.sh tp4_ep16 graphs"] | change
    (folder / "asked.json").write_text(json.dumps(list(asked.values())))
    child("configurations", folder)
    found = json.loads((folder / "answer.json").read_text())
    return found, asked, dict(zip(asked, found["cases"], strict=True))


def test_the_platform_is_an_npu_of_the_kind_that_it_was_built_for(configurations) -> None:
    assert (configurations[0]["platform"], configurations[0]["device"]) == ("NPUPlatform", "A3")


def test_every_shipped_layout_becomes_the_engine_that_was_meant(configurations) -> None:
    """Expected from the configuration, by hand: `tensor` ranks a replica, or one engine over all ranks.

    The rows that an engine decodes together are those of rooms/plan/test_estimates.py.
    """
    _, asked, answers = configurations
    layouts = asked.keys() - REFUSED.keys()
    assert len(layouts) >= 40
    for name in layouts:
        case, found = asked[name], answers[name]
        assert "error" not in found, (name, found)
        cfg = config.load_config(case["config"], case["overrides"])
        tensor, rows = cfg.rollout.tensor, found["rows"]
        data = case["ranks"] // tensor if cfg.rollout.expert_parallel else 1
        graphs = {"graphs": "NONE", "sizes": []}
        if not cfg.rollout.enforce_eager:
            sizes = [size for size in (16, 64, 128, 192, 256) if size < rows]
            graphs = {"graphs": "FULL_DECODE_ONLY", "sizes": [*sizes, rows]}
        assert found == graphs | {
            "tensor": tensor,
            "data": data,
            "data rank": data - 1,
            "world": tensor * data,
            # With R3, a replica's ranks split each expert instead, unless one engine spans all ranks.
            "expert parallel": cfg.rollout.expert_parallel or cfg.replay.mode != "r3",
            "worker": "vllm_ascend.worker.worker.NPUWorker",
            "cache bytes": cfg.rollout.kv_cache_mib * 2**20,
            "rows": rows,
            "block": 128,
            "prefix caching": True,
            "chunked prefill": False,
            "async": False,
            "quantization": None,
            "tied head": False,
            "tiled weights": 0,
            "binds CPUs": False,
        }, name


@pytest.mark.parametrize("what", REFUSED)
def test_the_checks_of_the_real_code_are_in_force(what: str, configurations, newer: bool) -> None:
    _, words, refused = REFUSED[what]
    assert (words in configurations[2][what].get("error", "")) == refused[newer]


# ------------------------------------------------------------------------------------------------------------- pushes


MINDSPEED = os.environ.get("MINDSPEED_DIR", "")
NO_MINDSPEED = pytest.mark.skipif(not MINDSPEED, reason="MINDSPEED_DIR names no checkout of MindSpeed")
IN_A_PROCESS = pytest.mark.parametrize(
    "mindspeed", [pytest.param([], id="alone"), pytest.param([MINDSPEED], id="with MindSpeed", marks=NO_MINDSPEED)]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return training.make_model(tmp_path_factory.mktemp("models") / "model", **SIZES)


def answers_of(child, what: str, folder: Path, model: Path, mindspeed: list[str], **changes: object) -> list[dict]:
    """What each rank found in an engine for the tiny model, in a process that has started with MindSpeed or without."""
    shutil.copytree(model, folder / "model")
    cfg = training.config(
        folder / "model", folder, model__dtype="bf16", rollout__engine="vllm", rollout__kv_cache_mib=64, **changes
    )
    (folder / "config.yaml").write_text(config.to_yaml(cfg.model_copy(update={"device": "npu"})))
    child(what, folder, *mindspeed)
    return [torch.load(path) for path in sorted(folder.glob("answer-*.pt"))]


def in_vllms_layout(model: Path, newer: bool) -> dict[str, torch.Tensor]:
    """The weights of the model under the names and in the layout of vLLM on one rank.

    E experts, h hidden size, w expert width: w13 (E, h, 2w) with gate before up, w2 (E, w, h). From 0.30 on, a router
    computes with a copy in fp32.
    """
    weights = load_file(model / "model.safetensors")
    for layer in (f"model.layers.{number}" for number in range(training.SIZES["num_layers"])):
        parts = {}
        for part in ("gate", "up", "down"):
            names = [f"{layer}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(SIZES["num_experts"])]
            parts[part] = torch.stack([weights.pop(name).t() for name in names])
        weights[f"{layer}.mlp.experts.w13_weight"] = torch.cat([parts["gate"], parts["up"]], dim=2)
        weights[f"{layer}.mlp.experts.w2_weight"] = parts["down"]
        qkv = [weights.pop(f"{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        weights[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(qkv)
    found = {name: weight.bfloat16() for name, weight in weights.items()}
    if newer:
        found |= {f"{name}_fp32": weight.float() for name, weight in found.items() if name.endswith(".gate.weight")}
    return found


def assert_equal(found: object, expected: object) -> None:
    """The same names, and tensors of the same shapes, dtypes and values."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
@IN_A_PROCESS
def test_a_push_of_whole_weights_reaches_every_parameter_and_the_start_leaves_torch_npus_formats_as_they_were(
    mindspeed, child, model, newer: bool, tmp_path
) -> None:
    """By default torch_npu stores no tensor of an A3 in an internal format."""
    (found,) = answers_of(child, "whole", tmp_path, model, mindspeed)
    assert_equal(found["parameters"], in_vllms_layout(model, newer))
    assert found["may tile"] == [False, False]


@pytest.mark.slow
@IN_A_PROCESS
def test_the_trainers_shards_are_what_vllm_ascends_loader_makes_of_the_whole_weights(
    mindspeed, child, model, tmp_path
) -> None:
    """On every rank; and vLLM has the trainer's groups and experts, whose memory has the trainer's layout."""
    sizes = {"rollout__tensor": 2, "rollout__expert_parallel": True, "parallel__tensor": 2, "parallel__expert": 4}
    found = answers_of(child, "shards", tmp_path, model, mindspeed, **sizes)
    assert len(found) == 4
    for rank, answer in enumerate(found):
        experts = [2 * rank, 2 * rank + 1]
        assert answer["groups"] == {
            "tensor": [[0, 1], [2, 3]][rank // 2],
            "data": [[0, 2], [1, 3]][rank % 2],
            "expert": [0, 1, 2, 3],
        }
        assert_equal(answer["pushed"], answer["loaded"])
        for name, weight in answer["trainer's stacks"].items():
            assert_equal(answer["stacks"][name], (weight, experts))
        assert len(answer["stacks"]) == len(answer["trainer's stacks"]) == 2 * 2
