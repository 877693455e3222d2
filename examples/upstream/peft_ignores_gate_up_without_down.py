"""PEFT with transformers 5 ignores a Qwen3-MoE adapter with gate_proj and up_proj of every expert, but no down_proj.

It maps them to gate_up_proj, and names the loaded tensors as if down_proj were there, too; so no name fits. Found with
peft 0.20.0 and 0.21.2 with transformers 5.19.0; OLMoE is the same. Needed: the logits change, or an error.
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

sizes = {"hidden_size": 64, "moe_intermediate_size": 24, "num_experts": 8, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=99, num_hidden_layers=1, **sizes, **heads)).eval()
ids = torch.arange(20)[None]
base = model(ids).logits
tensors, leaves = {}, ("gate_proj", "up_proj")
for expert in range(8):
    shared_a = torch.randn(4, 64)
    for leaf in leaves:
        name = f"base_model.model.model.layers.0.mlp.experts.{expert}.{leaf}"
        tensors |= {f"{name}.lora_A.weight": shared_a.clone(), f"{name}.lora_B.weight": torch.randn(24, 4)}
settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": list(leaves)}
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    Path(folder, "adapter_config.json").write_text(json.dumps(settings))
    loaded = peft.PeftModel.from_pretrained(model, folder).eval()
print("peft", peft.__version__, "transformers", transformers.__version__)
print("largest entry of a loaded B:", max(p.abs().max().item() for n, p in loaded.named_parameters() if "lora_B" in n))
print("largest change of a logit:", (loaded(ids).logits - base).abs().max().item())
print("warnings:", [str(w.message)[:140] for w in said])
