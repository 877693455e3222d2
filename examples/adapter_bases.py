"""Makes the random models of docs/adapters.md, and for each model a LoRA adapter of its attention, saved with PEFT.

python examples/adapter_bases.py DIR        needs transformers 5 and peft; writes DIR/KIND/base and DIR/KIND/adapter
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

SIZES = {
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # large enough that attention matters
}
WIDTHS = {"intermediate_size": 192, "moe_intermediate_size": 64}  # of a dense layer, and of an expert
KINDS = {
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **WIDTHS, mlp_only_layers=[1], shared_expert_intermediate_size=96),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **WIDTHS, mlp_only_layers=[1], head_dim=32),
    "dense": Qwen2MoeConfig(**SIZES, **WIDTHS, mlp_only_layers=[0, 1, 2]),  # for vLLM on a CPU
    "olmoe": OlmoeConfig(**SIZES, intermediate_size=64),  # half the hidden size, as in OLMoE-1B-7B
}


def make(folder: Path, kinds: dict[str, PreTrainedConfig]) -> None:
    """Write the models and adapters. Their weights depend only on the versions of the packages."""
    for kind, config in kinds.items():
        torch.manual_seed(0)
        base = folder.resolve() / kind / "base"
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)  # it stores the base's folder
        adapted.save_pretrained(folder / kind / "adapter")


if __name__ == "__main__":
    make(Path(sys.argv[1]), KINDS)
