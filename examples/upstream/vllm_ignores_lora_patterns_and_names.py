"""vLLM ignores alpha_pattern and rank_pattern of a PEFT adapter, and serves the base if no name of the adapter fits.

Three adapters that PEFT applies alike, and one whose names have a prefix that the model does not have. Found with vLLM
0.30.0 on a CPU. Needed: the first three log-probs are equal, and an error for the last adapter.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

PREFIX, MODULE = "base_model.model.", "model.layers.0.self_attn.q_proj"


def adapter(folder: Path, scale_of_b: float = 1.0, rows: int = 4, prefix: str = PREFIX, **settings) -> LoRARequest:
    a, b = torch.zeros(rows, 128), torch.zeros(128, rows)  # of rank 4; more rows are 0
    generator = torch.manual_seed(1)
    a[:4] = torch.randn(4, 128, generator=generator) * 0.1
    b[:, :4] = torch.randn(128, 4, generator=generator) * 0.1 * scale_of_b
    folder.mkdir()
    tensors = {f"{prefix}{MODULE}.lora_A.weight": a, f"{prefix}{MODULE}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about | settings))
    return LoRARequest(folder.name, 1 + len(list(folder.parent.iterdir())), str(folder))


if __name__ == "__main__":
    root = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    config = Qwen2Config(vocab_size=99, hidden_size=128, intermediate_size=96, initializer_range=0.1, **heads)
    Qwen2ForCausalLM(config).save_pretrained(root / "model")
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "gpu_memory_utilization": 0.01}
    llm = LLM(str(root / "model"), dtype="float32", enable_lora=True, kv_cache_memory_bytes=2**28, **options)
    requests = {
        "no pattern": adapter(root / "plain"),
        "alpha_pattern": adapter(root / "alpha", 0.5, alpha_pattern={"q_proj": 16}),
        "rank_pattern": adapter(root / "rank", 2.0, rows=8, rank_pattern={"q_proj": 8}),
        "names with a prefix": adapter(root / "names", prefix=f"{PREFIX}language_model."),
        "base": None,
    }
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    for name, request in requests.items():
        answer = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], sampling, lora_request=request, use_tqdm=False)
        rows = answer[0].prompt_logprobs[1:]
        print(f"{name:20}", [round(row[token].logprob, 4) for row, token in zip(rows, [6, 7, 8], strict=True)])
