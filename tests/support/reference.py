"""Random tiny models of transformers, the independent reference. No norm, bias or router is the identity."""

from __future__ import annotations

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
    """A transformers Qwen3MoE ("qwen3_moe") or Qwen2MoE ("qwen2_moe") with random weights, in fp32."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    rope = {"rope_theta": 12345.0, "rope_type": "default"}
    if kind == "qwen3_moe":
        sizes = SIZES | dict(head_dim=24, norm_topk_prob=True, rope_parameters=rope) | changes
        reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    else:
        sizes = SIZES | dict(shared_expert_intermediate_size=48, norm_topk_prob=False, rope_parameters=rope) | changes
        reference = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))
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


def load(directory: Path):
    """The model of a directory, loaded by transformers, in fp32 with its plain attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def tokens(rows: int = 8, length: int = 16, vocabulary: int = 128, seed: int = 1) -> torch.Tensor:
    """Random token ids.  -> (rows, length)"""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def distribution(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each next token, entropy, and variance of -log p, by the plain formulas.

    (b, T, V), (b, T) -> (b, T - 1) three times
    """
    log_p = torch.log_softmax(logits[:, :-1] / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    variance = (log_p.exp() * (log_p + entropy[..., None]).square()).sum(-1)
    return log_p.gather(2, tokens[:, 1:, None])[..., 0], entropy, variance
