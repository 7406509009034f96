"""The attention wrappers: decode, prefill, and the merge of partial results. They allocate, default and word errors.

The kernels check what they are given, so a good call pays for nothing twice; `kvpager.ops` says what holds for all.
"""

from typing import Literal, overload

from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops import backends, checks, device_errors
from kvpager.ops.backends import Backend
from kvpager.ops.device_errors import REFUSALS, raise_typed
from kvpager.ops.layout import Layout, as_hnd, scales_as_hnd
from kvpager.ops.schemas import registered_op

_paged_attention = registered_op("paged_attention")
_paged_prefill = registered_op("paged_prefill")
_merge_attention = registered_op("merge_attention")


@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    fixed_split: int = 0,
    schedule: Tensor | None = None,
    workspace: Tensor | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    fixed_split: int = 0,
    schedule: Tensor | None = None,
    workspace: Tensor | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    fixed_split: int = 0,
    schedule: Tensor | None = None,
    workspace: Tensor | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode attention: one query token a sequence, the last one, over all K/V of that sequence.

    Args:
        query: query [B, H, D] float; may be a strided view of a fused projection. H is a multiple of K; query head h
            reads kv head h // (H // K).
        key_cache: key_cache [N, K, S, D] or, NHD, [N, S, K, D]; of the query's dtype, or int8 or float8_e4m3fn codes.
        value_cache: value_cache, like `key_cache`.
        block_tables: block_tables [B, M] int32; entries past a row's length are not read.
        seq_lens: seq_lens [B] int32; length 0 gives zeros and lse −inf. Positions at or past it are never read.
        scale: factor of the scores, finite; 1 / √D if None.
        max_seq_len: upper bound of `seq_lens`; M · S if None.
        window: positions a query sees, itself included; 0 = all. Blocks wholly before the window are not read.
        softcap: c > 0 bends a score s to c · tanh(s / c), before the mask; 0 = none.
        sinks: sinks [H] float32 (float64 with float64): logits added to each head's softmax denominator.
        key_scale: of a quantised cache, key_scale [N, K, S] or, NHD, [N, S, K] float32, or [1] for the whole cache.
        value_scale: value_scale, like `key_scale`.
        fixed_split: tokens of a split: then each row's result is the same, bit for bit, whatever else is in the batch
            and however many threads run. 0 lets the kernel cut long sequences where it suits the device.
        schedule: from `kvpager.ops.make_schedule` for these lengths; None lets the kernel cut for itself.
        workspace: uint8 of at least `kvpager.ops.workspace_bytes`, zeroed, and left zeroed; None lets the kernel find
            room itself.
        layout: axes of the caches (and of scales with three dimensions).
        backend: who computes; see `kvpager.ops.backends`. Others than "native" ignore schedule and workspace.
        out: out [B, H, D] to write into, of the query's dtype.
        lse: lse [B, H] float32 (float64 with float64) to write into: log of the softmax denominator.
        return_lse: return lse too.

    Returns:
        out, or (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, options or lengths do not fit.
        SlotError: a table entry that is read names no block.

    On CUDA nothing waits for the GPU, and a call with a `schedule` and a `workspace` allocates nothing: it can be
    captured in a graph and replayed over new values of all its tensors. O(sum of lengths · H · D).
    """
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    key_scale, value_scale = scales_as_hnd(key_scale, value_scale, layout)
    if not isinstance(query, Tensor):
        raise ArgumentError("query", "a tensor", type(query).__name__)
    if backend != "auto" or query.is_cuda:
        run = backends.chosen(
            backend, query, key_cache, block_tables=block_tables, seq_lens=seq_lens, query_start_loc=None, scale=scale,
            max_query_len=1, max_seq_len=max_seq_len, window=window, softcap=softcap, sinks=sinks,
            key_scale=key_scale, value_scale=value_scale, fixed_split=fixed_split,
        )  # fmt: skip
        if run is not None:
            _check_decode(
                out, lse, query, key_cache, value_cache, block_tables, seq_lens, sinks, scale, window, softcap,
                key_scale, value_scale, fixed_split, schedule, workspace,
            )  # fmt: skip
            out, lse = _outputs(query, out, lse, return_lse)
            run(query, key_cache, value_cache, out, lse)
            return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse
    given = (out, lse)
    try:
        out, lse = _outputs(query, out, lse, return_lse)
        _paged_attention(
            out, lse, query, key_cache, value_cache, block_tables, seq_lens,
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            max_seq_len=block_tables.shape[1] * key_cache.shape[2] if max_seq_len is None else max_seq_len,
            window=window, softcap=softcap, sinks=sinks, key_scale=key_scale, value_scale=value_scale,
            fixed_split=fixed_split, schedule=schedule, workspace=workspace,
        )  # fmt: skip
    except REFUSALS as error:
        raise_typed(
            error, _check_decode,
            *given, query, key_cache, value_cache, block_tables, seq_lens, sinks, scale, window, softcap,
            key_scale, value_scale, fixed_split, schedule, workspace,
        )  # fmt: skip
    if device_errors.CHECKED:
        device_errors.check_errors(out.device)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse


@overload
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: Layout = "HND",
    backend: Backend = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
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
        scale: as in `paged_attention`.
        max_query_len: upper bound of the query lengths; T if None.
        max_seq_len: as in `paged_attention`.
        window: as in `paged_attention`, per query token.
        softcap: as in `paged_attention`.
        sinks: as in `paged_attention`.
        key_scale: as in `paged_attention`.
        value_scale: as in `paged_attention`.
        layout: as in `paged_attention`.
        backend: as in `paged_attention`.
        out: out [T, H, D] to write into.
        lse: lse [T, H] to write into.
        return_lse: return lse too.

    Returns:
        out, or (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices, strides, options, lengths or query starts do not fit.
        SlotError: a table entry that is read names no block.

    O(sum over query tokens of their position · H · D).
    """
    key_cache, value_cache = as_hnd(key_cache, value_cache, layout)
    key_scale, value_scale = scales_as_hnd(key_scale, value_scale, layout)
    if not isinstance(query, Tensor):
        raise ArgumentError("query", "a tensor", type(query).__name__)
    if backend != "auto" or query.is_cuda:
        run = backends.chosen(
            backend, query, key_cache, block_tables=block_tables, seq_lens=seq_lens, query_start_loc=query_start_loc,
            scale=scale, max_query_len=max_query_len, max_seq_len=max_seq_len, window=window, softcap=softcap,
            sinks=sinks, key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip
        if run is not None:
            checks.check_attention(
                out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks, scale, window,
                softcap, key_scale, value_scale,
            )  # fmt: skip
            out, lse = _outputs(query, out, lse, return_lse)
            run(query, key_cache, value_cache, out, lse)
            return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse
    given = (out, lse)
    try:
        out, lse = _outputs(query, out, lse, return_lse)
        _paged_prefill(
            out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            max_query_len=query.shape[0] if max_query_len is None else max_query_len,
            max_seq_len=block_tables.shape[1] * key_cache.shape[2] if max_seq_len is None else max_seq_len,
            window=window, softcap=softcap, sinks=sinks, key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip
    except REFUSALS as error:
        if not isinstance(query_start_loc, Tensor):  # None would be taken for a decode
            raise ArgumentError("query_start_loc", "a tensor", type(query_start_loc).__name__) from None
        raise_typed(
            error, checks.check_attention,
            *given, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks, scale, window,
            softcap, key_scale, value_scale,
        )  # fmt: skip
    if device_errors.CHECKED:
        device_errors.check_errors(out.device)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse


@overload
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Merge two attention results over disjoint sets of positions into that over their union, by log-sum-exp.

    Sinks belong into one of the two parts at most. A part with lse −inf is empty: its out is not read. The formula
    is out = Σ out_i · exp(lse_i − lse) with lse = log Σ exp(lse_i).

    Args:
        out_a: out_a [T, H, D] float.
        lse_a: lse_a [T, H] float32 (float64 with float64).
        out_b: out_b [T, H, D], like `out_a`.
        lse_b: lse_b [T, H], like `lse_a`.
        out: out [T, H, D] to write into; may be `out_a` or `out_b` itself.
        lse: lse [T, H] to write into; may be `lse_a` or `lse_b` itself.
        return_lse: return the merged lse too.

    Returns:
        out, or (out, lse).

    Raises:
        ArgumentError: shapes, dtypes, devices or strides do not fit.

    O(T · H · D).
    """
    given = (out, lse)
    try:
        out, lse = _outputs(out_a, out, lse, return_lse)
        _merge_attention(out, lse, out_a, lse_a, out_b, lse_b)
    except REFUSALS as error:
        raise_typed(error, checks.check_merge, *given, out_a, lse_a, out_b, lse_b)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # `_outputs` has made lse


def _check_decode(
    out: Tensor | None,
    lse: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    fixed_split: int,
    schedule: Tensor | None,
    workspace: Tensor | None,
) -> None:
    checks.check_attention(
        out, lse, query, key_cache, value_cache, block_tables, None, seq_lens, sinks, scale, window, softcap,
        key_scale, value_scale,
    )  # fmt: skip
    checks.check_split(fixed_split, schedule, workspace, query)


def _outputs(query: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = query.new_empty(query.shape)  # empty_like would keep the strides of a fused projection
    if lse is None and return_lse:
        lse = query.new_empty(query.shape[:2], dtype=checks.accumulate_dtype(query.dtype))
    return out, lse
