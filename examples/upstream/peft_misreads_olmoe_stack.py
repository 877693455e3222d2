"""PEFT 0.18.1 with transformers 5 misreads a gate_up_proj stack of OLMoE, where 2 x intermediate_size = hidden_size.

It takes the last axis but one of the parameter for the input, so A and B have exchanged roles; with other sizes the
load is refused. OLMoE-1B-7B has these sizes. Found with peft 0.18.1 with transformers 5.0.0 and 5.19.0; 0.21.2
is right.
"""

import json
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file
from transformers import OlmoeConfig, OlmoeForCausalLM

experts, hidden, width, rank = 4, 64, 32, 2
sizes = {"hidden_size": hidden, "intermediate_size": width, "num_experts": experts, "num_experts_per_tok": 2}
model = OlmoeForCausalLM(OlmoeConfig(vocab_size=99, num_hidden_layers=1, num_attention_heads=4, **sizes)).eval()
weight = model.model.layers[0].mlp.experts.gate_up_proj  # (E, 2 width, hidden)
before = weight.detach().clone()
a, b = torch.randn(experts, rank, hidden), torch.randn(experts, 2 * width, rank)
update = 2.0 * torch.bmm(b, a)  # alpha / R = 2
prefix = "base_model.model.model.layers.0.mlp.experts"
stack_b = b.permute(1, 2, 0).flatten(1).contiguous()  # (out, R E), E fastest
tensors = {f"{prefix}.lora_A.weight": a.flatten(0, 1).clone(), f"{prefix}.lora_B.weight": stack_b}
settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": []}
settings["target_parameters"] = ["mlp.experts.gate_up_proj"]
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    Path(folder, "adapter_config.json").write_text(json.dumps(settings))
    merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
found = merged.model.layers[0].mlp.experts.gate_up_proj - before
print("peft", peft.__version__, "transformers", transformers.__version__)
print("size of the right update:", update.norm().item())
print("distance from it:        ", (found - update).norm().item())
print("warnings:", [str(w.message)[:140] for w in said])
