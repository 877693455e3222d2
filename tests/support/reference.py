"""Random tiny models of transformers, the independent reference. No norm, bias or router is the identity."""

from pathlib import Path

import torch
from torch import Tensor

SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    moe_intermediate_size=32,
    num_experts=16,
    num_experts_per_tok=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    mlp_only_layers=[1],
)


def model(kind: str, seed: int = 0, **changes):
    """A transformers model of this ``model_type`` (qwen3_moe, qwen2_moe or olmoe) with random weights, in fp32."""
    import transformers

    rope = {"rope_theta": 12345.0, "rope_type": "default"}
    own = {
        "qwen3_moe": dict(head_dim=24, norm_topk_prob=True),
        "qwen2_moe": dict(shared_expert_intermediate_size=48, norm_topk_prob=False),
        "olmoe": dict(norm_topk_prob=False, rms_norm_eps=1e-5, eos_token_id=None),
    }[kind]
    sizes = SIZES | own | {"rope_parameters": rope} | changes
    if kind == "olmoe":  # every layer is a MoE layer, and its experts have this width
        sizes["intermediate_size"] = sizes.pop("moe_intermediate_size")
        del sizes["mlp_only_layers"]
    name = {"qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe", "olmoe": "Olmoe"}[kind]
    reference = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08, generator=generator)
            elif "norm" in name:
                parameter.normal_(1, 0.2, generator=generator)
            else:
                parameter.normal_(0, 0.1, generator=generator)
    return reference.float().eval()


def save(kind: str, directory: Path, seed: int = 0, **changes) -> Path:
    """Save this model as a Hugging Face directory."""
    model(kind, seed, **changes).save_pretrained(directory)
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32):
    """The model of a directory, loaded by transformers, with its plain attention and experts."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # its others take no float64
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **plain).eval()


@torch.no_grad()
def logp(model, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> Tensor:
    """The log-prob of each of ``tokens`` after ``prompt`` and the tokens before it (teacher forcing)."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def tokens(rows: int = 8, length: int = 16, vocabulary: int = 128, seed: int = 1) -> torch.Tensor:
    """Random token ids.  -> (rows, length)"""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def distribution(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each next token, and entropy, by the plain formulas.  (b, T, V), (b, T) -> (b, T - 1) twice"""
    log_p = torch.log_softmax(logits[:, :-1] / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(2, tokens[:, 1:, None])[..., 0], entropy
