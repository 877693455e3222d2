"""PEFT leaves out the target_parameters that a model does not have, without a warning if another one is found.

transformers 4 has no mlp.experts.gate_up_proj (an adapter that PEFT saved with transformers 5 names it). Found with
peft 0.17.1, 0.18.1, 0.21.2 with transformers 4.57.6. Needed: an error, as for tensors that fit nowhere.
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
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
model = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=99, num_hidden_layers=1, **sizes, **heads))
prefix = "base_model.model.model.layers.0.mlp"
tensors = {
    f"{prefix}.experts.lora_A.weight": torch.randn(8 * 4, 64),
    f"{prefix}.experts.lora_B.weight": torch.randn(48, 8 * 4),
    f"{prefix}.shared_expert.up_proj.lora_A.weight": torch.randn(4, 64),
    f"{prefix}.shared_expert.up_proj.lora_B.weight": torch.randn(48, 4),
}
settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": []}
settings["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.shared_expert.up_proj.weight"]
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    Path(folder, "adapter_config.json").write_text(json.dumps(settings))
    loaded = peft.PeftModel.from_pretrained(model, folder)
print("peft", peft.__version__, "transformers", transformers.__version__)
print("numbers in the file: ", sum(tensor.numel() for tensor in tensors.values()))
print("numbers in the model:", sum(p.numel() for name, p in loaded.named_parameters() if "lora_" in name))
print("warnings:", [str(w.message)[:140] for w in said])
