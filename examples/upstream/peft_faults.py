"""Five faults of PEFT with MoE models: an adapter is loaded, and a part of it has no effect, or a wrong one.

    python peft_faults.py [NAME ...]     needs peft alone; NAME: a function below. Without one, all of them.

Each prints the versions, PEFT's warnings, and two numbers that should be equal, or a change that should not be 0. An
error would be as good. The models are random and small.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 99,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
EXPERTS = {f"layers.0.mlp.experts.{expert}": 24 for expert in range(8)}
LEAVES = ("gate_proj", "up_proj", "down_proj")


def pairs(widths: dict[str, int], leaves: tuple[str, ...] = LEAVES) -> dict[str, torch.Tensor]:
    """Factors of rank 4 for the matrices of each block, which has this width."""
    tensors = {}
    for block, width in widths.items():
        for leaf in leaves:
            rows, columns = (64, width) if leaf == "down_proj" else (width, 64)
            tensors[f"base_model.model.model.{block}.{leaf}.lora_A.weight"] = torch.randn(4, columns)
            tensors[f"base_model.model.model.{block}.{leaf}.lora_B.weight"] = torch.randn(rows, 4)
    return tensors


def load(model: torch.nn.Module, tensors: dict[str, torch.Tensor], **settings: object) -> peft.PeftModel:
    """The model with an adapter of these tensors, whose files are those of PEFT."""
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": []}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        save_file(tensors, Path(folder, "adapter_model.safetensors"))
        Path(folder, "adapter_config.json").write_text(json.dumps(about | settings))
        loaded = peft.PeftModel.from_pretrained(model.eval(), folder)
    print("peft", peft.__version__, "transformers", transformers.__version__)
    print("warnings:", [str(w.message)[:140] for w in said])
    return loaded


def compare(what: str, tensors: dict[str, torch.Tensor], loaded: peft.PeftModel, part: str) -> None:
    """Print how many numbers of the factors with ``part`` in their names are in the file, and in the model."""
    held = {name: factor for name, factor in loaded.named_parameters() if "lora_" in name}
    for place, factors in (("file: ", tensors), ("model:", held)):
        print(f"numbers{what} in the {place}", sum(t.numel() for name, t in factors.items() if part in name))


def drops_qwen2_moe_experts() -> None:
    """PEFT with transformers 5 drops the routed experts of an adapter with a pair an expert, without a warning.

    The file holds what PEFT 0.18.1 saves with transformers 4.57.6. Found with peft 0.20.0 and 0.21.2 with transformers
    5.19.0.
    """
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(shared_expert_intermediate_size=48, **SIZES))
    tensors = pairs(EXPERTS | {"layers.0.mlp.shared_expert": 48})
    compare(" of routed experts", tensors, load(model, tensors, target_modules=LEAVES), ".experts.")


def drops_qwen3_moe_dense_layers() -> None:
    """PEFT with transformers 5 drops gate_proj, up_proj and down_proj of the dense layers.

    It maps these target modules to the routed experts' parameters, so the dense MLP of mlp_only_layers is no longer
    adapted. Found with peft 0.20.0 and 0.21.2 with transformers 5.19.0.
    """
    sizes = SIZES | {"num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(mlp_only_layers=[1], **sizes))
    tensors = pairs(EXPERTS | {"layers.1.mlp": 48})
    compare(" of the dense layer", tensors, load(model, tensors, target_modules=LEAVES), "layers.1.mlp.")


def ignores_gate_up_without_down() -> None:
    """PEFT with transformers 5 ignores an adapter with gate_proj and up_proj of every expert, but no down_proj.

    It maps them to gate_up_proj, and names the loaded tensors as if down_proj were there, too; so no name fits. Found
    with peft 0.20.0 and 0.21.2 with transformers 5.19.0; OLMoE is the same.
    """
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=16, **SIZES)).eval()
    ids = torch.arange(20)[None]
    base = model(ids).logits
    tensors = pairs(EXPERTS, LEAVES[:2])
    for block in EXPERTS:
        a = f"base_model.model.model.{block}.{{}}_proj.lora_A.weight"
        tensors[a.format("up")] = tensors[a.format("gate")].clone()  # they become one pair
    loaded = load(model, tensors, target_modules=LEAVES[:2])
    factors = [factor.abs().max().item() for name, factor in loaded.named_parameters() if "lora_B" in name]
    print("largest entry of a loaded B:", max(factors))
    print("largest change of a logit:", (loaded(ids).logits - base).abs().max().item())


def misreads_olmoe_stack() -> None:
    """PEFT 0.18.1 with transformers 5 misreads a stack of gate_up_proj, where 2 x intermediate_size = hidden_size.

    It takes the last axis but one of the parameter for the input, so A and B have exchanged roles; with other sizes the
    load is refused. OLMoE-1B-7B has these sizes. Found with transformers 5.0.0 and 5.19.0; peft 0.21.2 is right.
    """
    model = OlmoeForCausalLM(OlmoeConfig(**SIZES | {"intermediate_size": 32, "num_experts": 4}))
    before = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()  # (E, 2 width, hidden)
    a, b = torch.randn(4, 2, 64), torch.randn(4, 64, 2)
    update = 2.0 * torch.bmm(b, a)  # alpha / R = 2
    prefix = "base_model.model.model.layers.0.mlp.experts"
    stack_b = b.permute(1, 2, 0).flatten(1).contiguous()  # (out, R E), E fastest
    tensors = {f"{prefix}.lora_A.weight": a.flatten(0, 1).clone(), f"{prefix}.lora_B.weight": stack_b}
    merged = load(model, tensors, r=2, lora_alpha=4, target_parameters=["mlp.experts.gate_up_proj"]).merge_and_unload()
    found = merged.model.layers[0].mlp.experts.gate_up_proj - before
    print("size of the right update:", update.norm().item())
    print("distance from it:        ", (found - update).norm().item())


def skips_missing_target_parameters() -> None:
    """PEFT leaves out the target_parameters that a model does not have, without a warning if another one is found.

    transformers 4 has no mlp.experts.gate_up_proj (an adapter that PEFT saved with transformers 5 names it). Found with
    peft 0.17.1, 0.18.1, 0.21.2 with transformers 4.57.6.
    """
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(shared_expert_intermediate_size=48, **SIZES))
    tensors = pairs({"layers.0.mlp.shared_expert": 48}, ("up_proj",))
    prefix = "base_model.model.model.layers.0.mlp.experts"
    tensors |= {f"{prefix}.lora_A.weight": torch.randn(8 * 4, 64), f"{prefix}.lora_B.weight": torch.randn(48, 8 * 4)}
    parameters = ["mlp.experts.gate_up_proj", "mlp.shared_expert.up_proj.weight"]
    compare("", tensors, load(model, tensors, target_parameters=parameters), "")


FAULTS = {
    "drops_qwen2_moe_experts": drops_qwen2_moe_experts,
    "drops_qwen3_moe_dense_layers": drops_qwen3_moe_dense_layers,
    "ignores_gate_up_without_down": ignores_gate_up_without_down,
    "misreads_olmoe_stack": misreads_olmoe_stack,
    "skips_missing_target_parameters": skips_missing_target_parameters,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or FAULTS:
        print(name)
        torch.manual_seed(0)
        FAULTS[name]()
