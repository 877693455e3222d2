"""The Megatron MoE model for a Hugging Face config, and the computation of token log-probs and entropies with it.

Router, dispatcher, parallel linears and embedding are Megatron's. RMSNorm, attention and grouped experts are ours, with
one implementation for all devices; Megatron's layer spec inserts them. Rows are padded on the right and attention is
causal, so no mask is needed.
b is the number of rows, T the number of tokens per row, and N the number of completion tokens. h is the hidden size,
and V the size of the vocabulary (V / tensor on a rank).
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from facts.architectures import Architecture
from facts.limits import ROWS_PER_CHUNK, logits_per_chunk
from hardware import device as devices
from hardware import kernels
from hardware import quantisation as quantised
from hardware.quantisation import Packed
from knobs import ModelConfig
from model.packing import CausalAttention, Packing
from parallel_setup import Parallel


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with a learned weight, which replaces Megatron's layer norms."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **unused) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        # This copies x, because a view would keep the whole QKV tensor alive until the backward pass.
        return kernels.rms_norm(x.contiguous(), self.weight, self.eps)


class ProjectionNorm(RMSNorm):
    """RMSNorm over the queries (or keys) of all heads together, of which this rank has ``heads``.

    d is the head size.  (T, b, heads, d) -> (T, b, heads, d)
    """

    def __init__(self, config, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__(config, heads * hidden_size, eps)
        self.ranks = config.tensor_model_parallel_size

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks == 1:
            return super().forward(x.flatten(2)).view_as(x)
        from megatron.core.tensor_parallel import mappings

        wide = x.flatten(2).float()
        # The mean square is over the heads of all ranks, in the forward and in the backward pass.
        total = mappings.reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True))
        total = mappings.copy_to_tensor_model_parallel_region(total)
        wide = wide * torch.rsqrt(total / (self.ranks * wide.shape[-1]) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype).view_as(x)


# ------------------------------------------------------------------------------------------------ building


def build_for(model: ModelConfig, arch: Architecture, parallel: Parallel) -> torch.nn.Module:
    """Build this rank's shard of the model with the settings of ``model``; see `build`."""
    dtype = devices.DTYPES[model.dtype]
    return build(arch, parallel, dtype=dtype, recompute=model.recompute, quantisation=model.quantisation)


def build(
    arch: Architecture,
    parallel: Parallel,
    *,
    dtype: torch.dtype,
    recompute: bool,
    aux_loss: float = 0.0,
    quantisation: str = "none",
) -> torch.nn.Module:
    """Build this rank's shard of the model, with uninitialised weights; huggingface.load fills them.

    ``aux_loss`` is the router's load-balancing coefficient, which only the supervised warm start of tiny models uses.
    ``quantisation`` is the value of model.quantisation, which applies to the routed experts.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = _transformer_config(arch, parallel, dtype, recompute, aux_loss)
    config.quantisation = quantisation
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[_layer_spec(arch, is_moe, parallel.tensor) for is_moe in arch.moe_layers],
            layer_norm=RMSNorm,
        ),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=arch.tied_head,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        parallel_output=True,
    )
    for layer, is_moe in zip(model.decoder.layers, arch.moe_layers, strict=True):
        if is_moe:
            layer.mlp.register_forward_hook(_release_routes)
            if parallel.expert == 1:
                devices.keep_row_counts_on_device(layer.mlp.token_dispatcher)
            # From 0.18 on, Megatron does not sort a token's experts if gradients are off, which changes the last bits.
            layer.mlp.router.routing = torch.enable_grad()(layer.mlp.router.routing)
    # kernels.rotary needs stacked (cos, sin), so the rotary embedding returns these instead of angles: (2, T, 1, 1, d).
    model.rotary_pos_emb.register_forward_hook(lambda module, args, a: torch.stack([a.cos(), a.sin()]).to(dtype))
    return model.to(parallel.device).train()  # Megatron creates some weights on the CPU in any case


def _release_routes(moe_layer: torch.nn.Module, *unused) -> None:
    """Drop the routes that Megatron's dispatcher keeps until its next use.

    The autograd graph of the routes would keep the input of every layer and its gradient alive after the update.
    """
    dispatcher = moe_layer.token_dispatcher
    dispatcher.probs = dispatcher.routing_map = dispatcher.reversed_local_input_permutation_mapping = None


def _transformer_config(arch: Architecture, parallel: Parallel, dtype: torch.dtype, recompute: bool, aux_loss: float):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.dense_ffn_size,
        qk_layernorm=bool(arch.qk_norm),
        add_qkv_bias=arch.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # mixture of experts
        num_moe_experts=arch.num_experts,
        moe_layer_freq=[int(is_moe) for is_moe in arch.moe_layers],
        moe_ffn_hidden_size=arch.expert_ffn_size,
        moe_router_topk=arch.experts_per_token,
        moe_router_pre_softmax=not arch.norm_topk_prob,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if aux_loss else "none",
        moe_aux_loss_coeff=aux_loss,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,  # our experts replace Megatron's
        moe_shared_expert_intermediate_size=arch.shared_expert_ffn_size or None,
        moe_shared_expert_gate=bool(arch.shared_expert_ffn_size),
        moe_shared_expert_overlap=False,
        # layout; Megatron allows MoE with tensor parallelism only with sequence parallelism
        tensor_model_parallel_size=parallel.tensor,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.tensor > 1,
        # activation recompute: only the input of each layer is kept
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # the weights are not initialised, and every fused CUDA kernel is off
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
    )


def _layer_spec(arch: Architecture, is_moe: bool, tensor: int):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_layer_local_spec(
        num_experts=arch.num_experts if is_moe else None, qk_layernorm=bool(arch.qk_norm), normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if arch.qk_norm == "head":
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    elif arch.qk_norm == "projection":
        for name, heads in (("q_layernorm", arch.num_heads), ("k_layernorm", arch.num_kv_heads)):
            setattr(attention, name, ModuleSpec(module=ProjectionNorm, params={"heads": heads // tensor}))
    if is_moe:
        # a functools.partial from Megatron 0.18 on, before that a ModuleSpec
        mlp = layer.mlp.keywords["submodules"] if isinstance(layer.mlp, functools.partial) else layer.mlp.submodules
        mlp.experts = GroupedExperts
    return spec


# ------------------------------------------------------------------------------------------------ forward


def hidden_states(model: torch.nn.Module, tokens: Tensor, packing: Packing | None = None) -> Tensor:
    """Return the output of the final norm at every position, on every tensor rank.  (b, T) -> (T, b, h)

    T must be a multiple of the tensor-parallel size, because sequence parallelism splits the tokens of a row. If
    ``packing`` is given, ``tokens`` is the packed sequence of M tokens.  (1, M) -> (M, 1, h)
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    x = model.embedding(input_ids=tokens, position_ids=None)  # (T / tensor, b, h); RoPE needs no position ids
    if model.config.recompute_granularity and torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()  # a checkpointed layer returns gradients only if its input requires one
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.use(packing)
    longest = tokens.shape[1] if packing is None else packing.index.shape[1]
    cos_sin = model.rotary_pos_emb(longest)  # (2, T, 1, 1, d)
    if packing is not None:
        cos_sin = cos_sin[:, packing.position]
    x = model.decoder(hidden_states=x, attention_mask=None, rotary_pos_emb=cos_sin)
    if model.config.sequence_parallel:
        # Each tensor rank returns only the gradient of its vocabulary shard; the backward pass sums these.
        x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
    return x


class TokenStats(NamedTuple):
    """Statistics of the model's distribution for each token of the rows. They are 0 for tokens outside the mask."""

    logp: Tensor  # (b, T) log-probability of the token
    entropy: Tensor  # (b, T) expected value of -log p over the vocabulary, in nats


def head_weight(model: torch.nn.Module) -> Tensor:
    """Return this rank's share of the output layer's weight.  (V / tensor, h)"""
    return (model.embedding.word_embeddings if model.share_embeddings_and_output_weights else model.output_layer).weight


def token_logprobs(
    model: torch.nn.Module,
    tokens: Tensor,
    mask: Tensor,
    parallel: Parallel,
    temperature: float = 1.0,
    packing: Packing | None = None,
) -> TokenStats:
    """Return the log-probability of every token where ``mask`` is 1, and the entropy there.

    Position t has log p(tokens[t] | tokens[:t]) under softmax(logits / temperature), so mask[:, 0] must be 0. Only the
    hidden states that predict these tokens reach the language-model head, and only a chunk of the (N, V) logits exists
    at a time. ``packing`` is the result of packing.pack for these rows. With it, the results are the same, but the
    model processes fewer tokens.  tokens and mask: (b, T)
    """
    assert not mask[:, 0].any(), "nothing predicts the first token of a row"
    row, position = mask.nonzero(as_tuple=True)
    if packing is None:
        hidden = hidden_states(model, tokens)[position - 1, row]  # (N, h): the state that predicts the token
    else:
        packed = hidden_states(model, packing.pack(tokens), packing)[:, 0]  # (M, h)
        hidden = kernels.take(packed, packing.index[row, position - 1])  # rows that share a prompt share its last state
    logp, entropy = _VocabularyLogProbs.apply(hidden, head_weight(model), tokens[row, position], temperature, parallel)
    zeros = hidden.new_zeros(mask.shape, dtype=torch.float32)
    return TokenStats(zeros.index_put((row, position), logp), zeros.index_put((row, position), entropy))


class _VocabularyLogProbs(torch.autograd.Function):
    """The log-probs and entropies of the chosen tokens, for a vocabulary that is split over the tensor ranks.

    The backward pass computes the logits of each chunk again. The weight is frozen, so it gets no gradient. p is the
    softmax of the logits over the vocabulary.
    d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
    (N, h), (V / tensor, h), (N,) -> (N,) and (N,)
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, chosen: Tensor, temperature: float, parallel: Parallel):
        first = parallel.tensor_rank * len(weight)  # the first token of this rank's slice of the vocabulary
        columns, mine = _own(chosen - first, len(weight))  # (N,) twice
        top = hidden.new_empty(len(hidden), dtype=torch.float32)
        sums = top.new_empty(3, len(hidden))  # the chosen logits, and two moments
        for rows in _chunks(hidden, len(weight)):
            logits = (hidden[rows] @ weight.t()).float()  # (n, V / tensor)
            if temperature != 1:
                logits /= temperature
            largest = logits.amax(dim=-1)
            if parallel.tensor > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel.tensor_group)
            logits -= largest[:, None]  # avoids the cancellation of large numbers in entropy and log-prob
            top[rows] = largest
            sums[0, rows] = logits.gather(1, columns[rows, None])[:, 0] * mine[rows]
            weights = logits.exp()
            sums[1, rows] = weights.sum(-1)
            sums[2, rows] = weights.mul_(logits).sum(-1)
            del logits, weights  # frees them before the next chunk
        if parallel.tensor > 1:
            dist.all_reduce(sums, group=parallel.tensor_group)
        chosen_logit, total, first_moment = sums
        log_sum = total.log()
        log_norm, logp, entropy = top + log_sum, chosen_logit - log_sum, log_sum - first_moment / total
        ctx.save_for_backward(hidden, weight, columns, mine, log_norm, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, columns, mine, log_norm, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_logp = torch.zeros(columns.shape, device=hidden.device) if grad_logp is None else grad_logp
        for rows in _chunks(hidden, len(weight)):
            log_p = (hidden[rows] @ weight.t()).float()
            if ctx.temperature != 1:
                log_p /= ctx.temperature
            log_p -= log_norm[rows, None]
            if grad_entropy is None:  # the entropy is only logged
                grad = log_p.exp_().mul_(-grad_logp[rows, None])
            else:
                p = log_p.exp()
                grad = -p * grad_logp[rows, None] - p * (log_p + entropy[rows, None]) * grad_entropy[rows, None]
            grad.scatter_add_(1, columns[rows, None], (grad_logp[rows] * mine[rows])[:, None].to(grad.dtype))
            if ctx.temperature != 1:
                grad /= ctx.temperature
            grad_hidden[rows] = (grad.to(weight.dtype) @ weight).to(hidden.dtype)
            del log_p, grad
        return grad_hidden, None, None, None, None


def _own(local: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the ``local`` tokens in a slice of ``size`` columns, and whether each token is in it.

    A token outside the slice gets an arbitrary column.
    """
    return local.clamp(0, size - 1), (local >= 0) & (local < size)


def _chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    """Split the rows of ``hidden`` into slices, so that only the logits of one slice exist at a time."""
    size = max(1, min(ROWS_PER_CHUNK, logits_per_chunk(hidden.device.type) // vocabulary))
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]


# --------------------------------------------------------------------------------------------------- the routed experts


class GroupedLinear(torch.nn.Module):
    """A linear layer with one weight matrix for each of this rank's E experts.

    The rows of the input are sorted by expert, and the rows of expert e are multiplied by matrix e. ``weight`` is an
    (E, in, out) parameter. If ``quantisation`` is int4, two buffers replace it: the codes and scales of an (E, out, in)
    tensor.
    """

    def __init__(self, num_experts: int, in_size: int, out_size: int, dtype: torch.dtype, quantisation: str) -> None:
        super().__init__()
        self.shape, self.dtype, self.quantisation = (num_experts, in_size, out_size), dtype, quantisation
        if quantisation == "none":
            self.weight = torch.nn.Parameter(torch.empty(num_experts, in_size, out_size, dtype=dtype))
        else:
            packed = quantised.empty((num_experts, out_size, in_size), dtype)
            self.register_buffer("codes", packed.codes, persistent=False)
            self.register_buffer("scales", packed.scales, persistent=False)

    @property
    def packed(self) -> Packed:
        """The int4 codes and their scales, without a copy."""
        return Packed(self.codes, self.scales)

    def matrices(self, experts: slice) -> Tensor:
        """Return the matrices of these e ``experts``, dequantised if they are int4 codes.  -> (e, in, out)"""
        return self.weight[experts] if self.quantisation == "none" else self.packed[experts].dequantised().mT

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Multiply each of the N rows of x by the matrix of its expert.  (N, in), (E,) -> (N, out)"""
        if "weight" in self._parameters:  # the base weight, or one that LoRA has merged
            return kernels.grouped_mm(x, self.weight, tokens_per_expert)
        return kernels.quantised_grouped_mm(x, self.packed, tokens_per_expert)


class GroupedExperts(torch.nn.Module):
    """SwiGLU experts. The output of each row is multiplied by its routing probability."""

    def __init__(self, num_local_experts: int, config, **unused) -> None:
        super().__init__()
        width, dtype, quantisation = config.moe_ffn_hidden_size, config.params_dtype, config.quantisation
        self.linear_fc1 = GroupedLinear(num_local_experts, config.hidden_size, 2 * width, dtype, quantisation)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, config.hidden_size, dtype, quantisation)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute the output of the expert of each of N rows. The second result, the bias, is None.

        (N, h), (E,), (N,) -> (N, h), None
        """
        # The router weight commutes with the second matrix. To apply it before is cheaper, since the width w < h.
        # No variable keeps the (N, 2 w) result of linear_fc1.
        hidden = kernels.weighted_swiglu(self.linear_fc1(x, tokens_per_expert), probs)  # (N, w)
        return self.linear_fc2(hidden, tokens_per_expert), None
