"""How decode attention is cut over threads or a GPU: schedules made once a step, and the room for what is cut.

A batch is a line of tokens, sequence after sequence; a schedule cuts it into parts of equal length, whatever the
sequences are. It is an int32 tensor [B, fixed_split, row, position, row, position, …]; any cuts in order give the right
result, so a schedule can be slow but not wrong. On the CPU a part is all heads of its tokens; on CUDA a block of
threads takes one part of one kv head.
"""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops import checks

PARTS_PER_THREAD = 4  # as in csrc/cpu/decode.cpp: a thread that is late leaves its last parts to others
BLOCKS_PER_MULTIPROCESSOR = 3  # as in csrc/cuda/decode_launch.h: all parts run at once


def default_num_parts(device: str | torch.device, num_kv_heads: int) -> int:
    """Parts that fill `device`: 4 for each thread of torch on the CPU; on CUDA K · parts blocks fill it once."""
    if torch.device(device).type != "cuda":
        return PARTS_PER_THREAD * torch.get_num_threads()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, BLOCKS_PER_MULTIPROCESSOR * multiprocessors // num_kv_heads)


def make_schedule(
    seq_lens: Tensor,
    *,
    block_size: int,
    window: int = 0,
    fixed_split: int = 0,
    num_parts: int | None = None,
    num_kv_heads: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """A schedule for `paged_attention` over these lengths: made once a step, valid for all layers.

    Args:
        seq_lens: seq_lens [B] int32.
        block_size: S; cuts lie at multiples of it.
        window: the attention's window; 0 = all.
        fixed_split: the attention's `fixed_split`; cuts lie at multiples of it.
        num_parts: parts to cut into; if None as many as fill the device of `seq_lens` (`default_num_parts`). For
            lengths on the CPU whose schedule goes to a GPU, name the number.
        num_kv_heads: K, which share out the blocks of a GPU; only for `num_parts` None on CUDA.
        out: int32 [2 · num_parts + 4] on the device of `seq_lens`, to write into.

    Returns:
        schedule [2 · num_parts + 4] int32 on the device of `seq_lens`, without a sync. O(B + num_parts).

    Raises:
        ArgumentError: an option is out of range, or `seq_lens` or `out` is not of that shape, dtype and device.
    """
    checks.require_tensors(seq_lens=seq_lens)
    if seq_lens.dim() != 1 or seq_lens.dtype is not torch.int32:
        raise ArgumentError("seq_lens", "[B] int32", f"{seq_lens.dim()} dimensions of {seq_lens.dtype}")
    if num_parts is None:
        num_parts = default_num_parts(seq_lens.device, num_kv_heads)
    for argument, number, least in (
        ("block_size", block_size, 1), ("window", window, 0), ("fixed_split", fixed_split, 0),
        ("num_parts", num_parts, 1),
    ):  # fmt: skip
        if number < least:
            raise ArgumentError(argument, f"at least {least}", number)
    B, device = seq_lens.shape[0], seq_lens.device
    if out is None:
        out = torch.empty(2 * num_parts + 4, dtype=torch.int32, device=device)
    elif out.shape != (2 * num_parts + 4,) or out.dtype is not torch.int32 or out.device != device:
        raise ArgumentError("out", f"[{2 * num_parts + 4}] int32 on {device}", f"{list(out.shape)} {out.dtype}")
    out[0], out[1], out[2:4], out[-2], out[-1] = B, fixed_split, 0, B, 0
    if num_parts == 1:
        return out
    cuts = out[4:-2].view(num_parts - 1, 2)
    if B == 0:
        cuts.zero_()
        return out
    lengths = seq_lens.long()
    visible = lengths.clamp(max=window) if window else lengths
    ends = visible.cumsum(0)
    targets = ends[-1] * torch.arange(1, num_parts, device=device) // num_parts
    rows = torch.searchsorted(ends, targets, right=True).clamp(max=B - 1)
    grain = fixed_split or block_size
    positions = (lengths - ends)[rows] + targets  # the first visible position, and as far on as the target lies
    cuts[:, 0] = rows
    cuts[:, 1] = torch.minimum(positions, lengths[rows]) // grain * grain
    return out


def workspace_bytes(
    num_sequences: int,
    num_heads: int,
    head_dim: int,
    *,
    max_seq_len: int,
    fixed_split: int = 0,
    num_parts: int | None = None,
    num_kv_heads: int = 1,
    device: str | torch.device = "cpu",
) -> int:
    """Bytes of a `workspace` (uint8, zeroed once) that is enough for `paged_attention`.

    Args:
        num_sequences: B.
        num_heads: H.
        head_dim: D.
        max_seq_len: upper bound of the lengths that the attention is given.
        fixed_split: the attention's `fixed_split`.
        num_parts: the schedule's parts; as many as fill `device` (`default_num_parts`) if None.
        num_kv_heads: K; only for `num_parts` None on CUDA.
        device: where the attention runs.

    Returns:
        Room for one float32 result [H, D + 2] for each piece of a sequence that is cut; on CUDA also a counter for each
        sequence and head.
    """
    if num_parts is None:
        num_parts = default_num_parts(device, num_kv_heads)
    # Free: a cut makes two pieces of a sequence that was whole, and one more of another.
    pieces = num_sequences * -(-max_seq_len // fixed_split) if fixed_split else 2 * (num_parts - 1)
    padding = 8  # three areas, each at a multiple of 4 floats
    return 4 * (pieces * num_heads * (head_dim + 2) + num_sequences * num_heads + padding)
