"""Flash attention in plain torch, with the parameters and the rules of the real functions, for machines without a GPU.

Two modules as attributes of namespaces: `flash_attn` (version 2), `flash_attn_interface` (version 3), and torch's `varlen_attn`. What
the real kernels refuse is refused here: pages that are no multiple of 256 tokens, tables that are not int32, strided rows. What they
leave undefined is NaN here: queries that no row owns. Nothing asks a tensor for a number on the host, as under a CUDA graph.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

Tensor = torch.Tensor


def attend(
    q: Tensor,  # [Q, heads, d]
    keys: Tensor,  # [blocks, P, kv_heads, d]
    values: Tensor,
    cu_q: Tensor,
    lengths: Tensor,
    table: Tensor,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    sinks: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
) -> Tensor:
    """Every query over all positions its table has, masked: causal from the bottom right, `window[0]` keys to its left."""
    assert q.stride(-1) == 1 and keys.stride(-1) == 1 and values.stride(-1) == 1, "the last dimension must be contiguous"
    for tensor in (cu_q, lengths, table):
        assert tensor.dtype == torch.int32, f"indices must be int32, not {tensor.dtype}"
    assert cu_q.shape[0] == lengths.shape[0] + 1 == table.shape[0] + 1
    page, heads, kv_heads = keys.shape[1], q.shape[1], keys.shape[2]
    at = torch.arange(q.shape[0])
    row = torch.searchsorted(cu_q[1:].contiguous(), at, right=True)
    owned = row < lengths.shape[0]
    row = row.clamp(max=lengths.shape[0] - 1)
    queries = cu_q[1:][row] - cu_q[:-1][row]
    place = lengths[row] - queries + (at - cu_q[:-1][row])  # of the query, among its row's positions
    positions = torch.arange(table.shape[1] * page)
    gathered = [cache[table.long()].flatten(1, 2)[row] for cache in (keys, values)]  # [Q, T * P, kv_heads, d]
    k, v = (cache.repeat_interleave(heads // kv_heads, dim=2).float() for cache in gathered)
    seen = (positions <= place[:, None]) & (positions < lengths[row][:, None])
    if window[0] >= 0:
        seen &= positions >= place[:, None] - window[0]
    if max_q is not None:
        seen &= ((at - cu_q[:-1][row]) < max_q)[:, None]  # what a kernel that was told too little does not reach
    if max_k is not None:
        seen &= (positions < max_k)[None]
    scores = torch.einsum("qhd,qkhd->qhk", q.float(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None].expand(q.shape[0], -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : positions.shape[0]]
    out = torch.einsum("qhk,qkhd->qhd", weights, v.masked_fill(~seen[:, :, None, None], 0.0))
    return out.masked_fill(~owned[:, None, None], torch.nan).to(q.dtype)


def _check_pages(cache: Tensor) -> None:
    if cache.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash-attn 2.8: rows' lengths are the differences of cu_seqlens_k."""
    assert causal and block_table is not None
    _check_pages(k)
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return attend(
        q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, window_size, softcap, None, max_seqlen_q, max_seqlen_k
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """flash-attn 2.8: q [B, n, heads, d]."""
    assert causal and block_table is not None and k is None
    _check_pages(k_cache)
    return _uniform(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, window_size, softcap, None)


def _uniform(q, keys, values, lengths, table, scale, window, softcap, sinks):
    batch, count = q.shape[:2]
    cu_q = torch.arange(batch + 1, dtype=torch.int32) * count
    return attend(q.flatten(0, 1), keys, values, cu_q, lengths, table, scale, window, softcap, sinks).view(q.shape)


def flash_attn_3_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    s_aux=None,
):
    """flash-attn 3 as vLLM builds it (the last parameter is theirs): q [B, n, heads, d], or [Q, heads, d] with cu_seqlens_q."""
    assert causal and page_table is not None and k is None
    if cu_seqlens_q is None:
        return _uniform(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, window_size, softcap, s_aux)
    assert max_seqlen_q is not None
    return attend(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap, s_aux, max_seqlen_q
    )


def varlen_attn(
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
    """torch 2.13's."""
    assert block_table is not None and seqused_k is not None and window_size[1] == 0
    if not enable_gqa and query.shape[1] != key.shape[2]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    _check_pages(key)
    return attend(query, key, value, cu_seq_q, seqused_k, block_table, scale, window_size, 0.0, None, max_q, max_k)


FLASH_2 = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache)
FLASH_3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_3_with_kvcache)
TORCH = SimpleNamespace(varlen_attn=varlen_attn)
