"""A GPU's attention on a CPU: the formula of torch's varlen_attn instead of its kernel."""

import pytest
import torch
from torch.nn.attention import varlen

from hardware import kernels


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """The formula of torch 2.11's function of this name, and its signature. (T, heads, d), (S + 1,) int32"""
    assert window_size == (-1, 0) and return_aux is None and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    parts = []
    for q, k, v in zip(
        *(x.split(ends.diff().tolist()) for x, ends in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))),
        strict=True,
    ):
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        late = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)  # the last query sees all keys
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(late, float("-inf")).softmax(-1), v))
    return torch.cat(parts)


def varlen_attn_since_212(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """That of torch 2.12 and 2.13, which refuses fewer key/value heads unless it is told."""
    assert enable_gqa and seqused_k is block_table is num_splits is None
    places = cu_seq_q, cu_seq_k, max_q, max_k
    return varlen_attn(query, key, value, *places, return_aux=return_aux, scale=scale, window_size=window_size)


FORMS = {"2.11": varlen_attn, "2.12": varlen_attn_since_212}


def as_on_a_gpu(patch: pytest.MonkeyPatch, form: str) -> None:
    """Until ``patch`` is undone, packed lines take a GPU's way, with the formula in place of its kernel."""
    kernels._varlen_attention.cache_clear()
    patch.setattr(varlen, "varlen_attn", FORMS[form])
    patch.setattr(kernels, "on_gpu", lambda device: True)
    patch.setattr(kernels, "HALF", (torch.float32,))
    assert kernels.takes_sequences(torch.zeros(1, 2, 8))
