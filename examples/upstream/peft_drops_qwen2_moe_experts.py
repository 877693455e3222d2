"""PEFT with transformers 5 drops the routed experts of a Qwen2-MoE adapter with a pair an expert, without a warning.

The file holds what PEFT 0.18.1 saves with transformers 4.57.6: lora_A, lora_B of every expert's gate, up and down_proj.
Found with peft 0.20.0 and 0.21.2 with transformers 5.19.0. Needed: the numbers are equal, or an error.
"""

import json
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

sizes = {"hidden_size": 64, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48, "num_experts": 8}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
model = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=99, num_hidden_layers=1, num_experts_per_tok=2, **sizes, **heads))
tensors, leaves = {}, ("gate_proj", "up_proj", "down_proj")
for block, width in [(f"experts.{expert}", 24) for expert in range(8)] + [("shared_expert", 48)]:
    for leaf in leaves:
        rows, columns = (64, width) if leaf == "down_proj" else (width, 64)
        name = f"base_model.model.model.layers.0.mlp.{block}.{leaf}"
        tensors |= {f"{name}.lora_A.weight": torch.randn(4, columns), f"{name}.lora_B.weight": torch.randn(rows, 4)}
settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": list(leaves)}
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    Path(folder, "adapter_config.json").write_text(json.dumps(settings))
    loaded = peft.PeftModel.from_pretrained(model, folder)
routed = [p for name, p in loaded.named_parameters() if "lora_" in name and ".experts." in name]
print("peft", peft.__version__, "transformers", transformers.__version__)
print("numbers of routed experts in the file: ", sum(t.numel() for n, t in tensors.items() if ".experts." in n))
print("numbers of routed experts in the model:", sum(p.numel() for p in routed))
print("warnings:", [str(w.message) for w in said])
