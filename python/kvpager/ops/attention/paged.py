"""`paged_attention` and `paged_prefill`: attention of a step's queries over the K and V that tables name.

One query a sequence is a decode; a prefill takes any number. Both take the same options, checks and backends.
"""

from typing import Any, Unpack, cast

from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.native import native_status
from kvpager.ops import device_errors
from kvpager.ops.attention import backends, reference
from kvpager.ops.attention.backends import Backend
from kvpager.ops.attention.checks import check_attention
from kvpager.ops.attention.options import OPTIONS_SCHEMA, AttentionKeywords, DecodeKeywords
from kvpager.ops.attention.results import store, with_lse
from kvpager.ops.attention.split_plan import check_split_plan
from kvpager.ops.device_errors import REFUSALS
from kvpager.ops.op import Op, check_errors
from kvpager.ops.tensors import Layout, as_hnd, scales_as_hnd


def _decode(
    out: Tensor,
    lse: Tensor | None,
    *inputs: Tensor,
    max_seq_len: int,
    fixed_split: int = 0,
    split_plan: Tensor | None = None,
    workspace: Tensor | None = None,
    **options: Unpack[AttentionKeywords],
) -> None:
    if split_plan is not None:  # the reference never cuts a sequence, so that every plan gives the same
        check_split_plan(split_plan.tolist(), inputs[-1].tolist(), fixed_split)
    store(out, lse, reference.paged_attention(*inputs, max_seq_len=max_seq_len, **options))


def _prefill(out: Tensor, lse: Tensor | None, *inputs: Tensor, **options: Any) -> None:
    store(out, lse, reference.paged_prefill(*inputs, **options))


_RESULTS = "Tensor(a!) out, Tensor(b!)? lse"
_CACHES = "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables"

_PAGED_ATTENTION = Op(
    "paged_attention",
    f"({_RESULTS}, {_CACHES}, Tensor seq_lens, *, float scale, SymInt max_seq_len, {OPTIONS_SCHEMA}, "
    "int fixed_split=0, Tensor? split_plan=None, Tensor(c!)? workspace=None) -> ()",
    check_attention,
    _decode,
    made="out",
)
_PAGED_PREFILL = Op(
    "paged_prefill",
    f"({_RESULTS}, {_CACHES}, Tensor query_start_loc, Tensor seq_lens, *, float scale, SymInt max_query_len, "
    f"SymInt max_seq_len, {OPTIONS_SCHEMA}) -> ()",
    check_attention,
    _prefill,
    made="out",
)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Unpack[DecodeKeywords],
) -> Tensor:
    """Decode attention: one query token a sequence, the last one, over all K/V of that sequence.

    Args:
        query: query [B, H, D] float; may be a strided view of a fused projection. H is a multiple of K; query head h
            reads kv head h // (H // K).
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D]; of the query's dtype, or codes.
        value_cache: value_cache, like `key_cache`.
        block_tables: block_tables [B, M] int32; entries past a row's length are not read.
        seq_lens: seq_lens [B] int32; length 0 gives zeros and lse −inf. Positions at or past it are never read.
        max_seq_len: upper bound of `seq_lens`; M · S if None.
        layout: axes of the caches (and of scales with three dimensions).
        backend: who computes; see `kvpager.ops.attention.backends`. Others than "native" ignore `split_plan` and
            `workspace`.
        out: out [B, H, D] to write into, of the query's dtype.
        lse: lse [B, H] float32 (float64 with float64) to write into: log of the softmax denominator.
        options: scale, window, softcap and the others of `AttentionOptions`; how to cut, of `DecodeKeywords`.

    Returns:
        out. `paged_attention_lse` returns (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, options or lengths do not fit.
        SlotError: a table entry that is read names no block.

    On CUDA nothing waits for the GPU, and a call with a `split_plan` and a `workspace` allocates nothing: it can be
    captured in a graph and replayed over new values of all its tensors. O(sum of lengths · H · D).
    """
    keywords = cast("dict[str, Any]", options)
    keywords["max_seq_len"] = max_seq_len
    tables = (block_tables, seq_lens)
    return _attend(_PAGED_ATTENTION, (out, lse), (query, key_cache, value_cache), tables, layout, backend, keywords)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Unpack[AttentionKeywords],
) -> Tensor:
    """Causal attention of the last tokens of each sequence: prompts, chunks, prefix hits, drafts and decodes, mixed.

    The queries of sequence b are rows query_start_loc[b] … query_start_loc[b + 1] − 1 and are its last tokens: the last
    of them stands at position seq_lens[b] − 1 (the causal mask is aligned at the end). Their own K/V are in the cache.

    Args:
        query: query [T, H, D] float, as in `paged_attention`; rows past the last sequence get zeros and lse −inf.
        key_cache: as in `paged_attention`.
        value_cache: as in `paged_attention`.
        block_tables: as in `paged_attention`.
        query_start_loc: query_start_loc [B + 1] int32: starts at 0, never falls.
        seq_lens: seq_lens [B] int32, cached and new tokens together; at least as long as the sequence's query.
        max_query_len: upper bound of the query lengths; T if None.
        max_seq_len: as in `paged_attention`.
        layout: as in `paged_attention`.
        backend: as in `paged_attention`.
        out: out [T, H, D] to write into.
        lse: lse [T, H] to write into.
        options: scale, window (of each query token), softcap and the others of `AttentionOptions`.

    Returns:
        out. `paged_prefill_lse` returns (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, options, lengths or query starts do not fit.
        SlotError: a table entry that is read names no block.

    O(sum over query tokens of their position · H · D).
    """
    keywords = cast("dict[str, Any]", options)
    keywords["max_seq_len"], keywords["max_query_len"] = max_seq_len, max_query_len
    tables = (block_tables, query_start_loc, seq_lens)
    return _attend(_PAGED_PREFILL, (out, lse), (query, key_cache, value_cache), tables, layout, backend, keywords)


paged_attention_lse = with_lse(paged_attention)
paged_prefill_lse = with_lse(paged_prefill)


def _attend(
    op: Op,
    results: tuple[Tensor | None, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, ...],
    layout: Layout,
    backend: Backend,
    keywords: dict[str, Any],
) -> Tensor:
    """Fill in the defaults, and let a backend or the op compute."""
    query, key_cache, value_cache = inputs
    out, lse = results
    if not isinstance(query, Tensor):
        raise ArgumentError("query", "a tensor", type(query).__name__)
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    if layout != "HND":
        scales = scales_as_hnd(keywords.get("key_scale"), keywords.get("value_scale"), layout)
        keywords["key_scale"], keywords["value_scale"] = scales
    try:
        if keywords.get("scale") is None:
            keywords["scale"] = query.shape[2] ** -0.5
        if keywords["max_seq_len"] is None:
            keywords["max_seq_len"] = tables[0].shape[1] * key_cache.shape[2]
        if op is _PAGED_PREFILL and keywords["max_query_len"] is None:
            keywords["max_query_len"] = query.shape[0]
        if backend != "auto" or (query.is_cuda and not native_status().cuda_kernels):
            op.check(out, lse, query, key_cache, value_cache, *tables, **keywords)  # the packages check nothing
            run = backends.planned(backend, query, key_cache, tables, keywords)
        else:
            run = None
        if out is None:
            out = query.new_empty(query.shape)  # empty_like would keep the strides of a fused projection
        if run is None:
            op.call(out, lse, query, key_cache, value_cache, *tables, **keywords)
    except REFUSALS as error:
        op.refuse(error, out, lse, query, key_cache, value_cache, *tables, **keywords)
    if run is not None:
        run(query, key_cache, value_cache, out, lse)
    elif device_errors.CHECKED:
        check_errors(out.device)
    return out
