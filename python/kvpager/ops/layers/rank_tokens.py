"""`rank_tokens`: the log-sum-exp of each row of scores, and how many of them are above a token's."""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.op import Op
from kvpager.ops.tensors import accumulate_dtype, check_exact, check_float_rows, check_written, require_tensors


def _check(lse: Tensor, ranks: Tensor, scores: Tensor, token_ids: Tensor) -> None:
    """Metadata of `rank_tokens`."""
    T, _ = check_float_rows("scores", scores)
    check_exact("lse", lse, (T,), accumulate_dtype(scores.dtype), scores.device)
    check_exact("ranks", ranks, (T,), torch.int64, scores.device)
    check_exact("token_ids", token_ids, (T,), torch.int64, scores.device)
    check_written("lse", lse)
    check_written("ranks", ranks)


def _reference(lse: Tensor, ranks: Tensor, scores: Tensor, token_ids: Tensor) -> None:
    V = scores.shape[1]
    for row, token_id in enumerate(token_ids.tolist()):
        if not 0 <= token_id < V:
            raise ArgumentError("token_ids", f"tokens below {V}", f"{token_id} at row {row}")
    lse.copy_(scores.to(lse.dtype).logsumexp(dim=-1))
    ranks.copy_((scores > scores.gather(1, token_ids[:, None])).sum(dim=-1) + 1)


_RANK_TOKENS = Op(
    "rank_tokens",
    "(Tensor(a!) lse, Tensor(b!) ranks, Tensor scores, Tensor token_ids) -> ()",
    _check,
    _reference,
    has_cuda_kernel=False,
)


def rank_tokens(scores: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row of scores, and the rank of one token in it.

    A token's log-probability is its score less the log-sum-exp. Computed in float32 (float64 for float64), on the CPU
    in two passes over a row and without memory beside the scores.

    Args:
        scores: scores [T, V] float.
        token_ids: token_ids [T] int64, one token of each row, 0 … V − 1.

    Returns:
        lse [T] float32 (float64 with float64), and ranks [T] int64: 1 + the scores of the row above the token's. A row
        of −inf alone has lse −inf.

    Raises:
        ArgumentError: shapes, dtypes, devices, strides or token ids do not fit.

    O(T · V).
    """
    require_tensors(scores=scores, token_ids=token_ids)
    lse = scores.new_empty(scores.shape[:1], dtype=accumulate_dtype(scores.dtype))
    ranks = scores.new_empty(scores.shape[:1], dtype=torch.int64)
    _RANK_TOKENS(lse, ranks, scores, token_ids)
    return lse, ranks
