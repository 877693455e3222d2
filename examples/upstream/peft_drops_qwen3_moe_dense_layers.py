"""PEFT with transformers 5 drops gate_proj, up_proj and down_proj of the dense layers of a Qwen3-MoE.

It maps these target modules to the routed experts' parameters, so the dense MLP of mlp_only_layers is no longer
adapted. Found with peft 0.20.0 and 0.21.2 with transformers 5.19.0. Needed: the numbers are equal, or an error.
"""

import json
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
config = Qwen3MoeConfig(vocab_size=99, num_hidden_layers=2, mlp_only_layers=[0], **sizes, **heads)
model = Qwen3MoeForCausalLM(config)
tensors, leaves = {}, ("gate_proj", "up_proj", "down_proj")
blocks = [("layers.0.mlp", 48)] + [(f"layers.1.mlp.experts.{expert}", 24) for expert in range(8)]
for block, width in blocks:
    for leaf in leaves:
        rows, columns = (64, width) if leaf == "down_proj" else (width, 64)
        name = f"base_model.model.model.{block}.{leaf}"
        tensors |= {f"{name}.lora_A.weight": torch.randn(4, columns), f"{name}.lora_B.weight": torch.randn(rows, 4)}
settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": list(leaves)}
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    Path(folder, "adapter_config.json").write_text(json.dumps(settings))
    loaded = peft.PeftModel.from_pretrained(model, folder)
dense = [p for name, p in loaded.named_parameters() if "lora_" in name and "layers.0.mlp." in name]
print("peft", peft.__version__, "transformers", transformers.__version__)
print("numbers of the dense layer in the file: ", sum(t.numel() for n, t in tensors.items() if "layers.0." in n))
print("numbers of the dense layer in the model:", sum(p.numel() for p in dense))
print("warnings:", [str(w.message)[:90] for w in said])
