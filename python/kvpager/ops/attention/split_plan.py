"""How decode attention is cut over threads or a GPU: split plans made once a step, and the room for what is cut.

A batch is a line of tokens, sequence after sequence; a split plan cuts it into parts of equal length, whatever the
sequences are. It is an int32 tensor [B, fixed_split, row, position, row, position, …]; any cuts in order give the right
result, so a plan can be slow but not wrong. On the CPU a part is all heads of its tokens; on CUDA a block of
threads takes one part of one kv head.
"""

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.kinds import is_whole
from kvpager.ops.tensors import check_written, require_tensors

MIN_PART_TOKENS = 128  # as in csrc/cuda, `kMinPartTokens`: below this a part costs more than it brings
PARTS_PER_THREAD = 4  # as in csrc/cpu/decode/paged_attention.cpp: a thread that is late leaves its last parts to others


def _blocks_per_multiprocessor(head_dim: int) -> int:
    """As in csrc/cuda, `decode_blocks`: so many run at once."""
    return 2 if head_dim > 128 else 3


def default_num_parts(device: str | torch.device, num_kv_heads: int, head_dim: int) -> int:
    """Parts that fill `device`: 4 for each thread of torch on the CPU; on CUDA K · parts blocks fill it once.

    Raises:
        ArgumentError: `device` names no device of this machine, or one of the two numbers is not 1 or more.
    """
    _check_number("num_kv_heads", num_kv_heads, 1)
    _check_number("head_dim", head_dim, 1)
    try:
        if torch.device(device).type != "cuda":
            return PARTS_PER_THREAD * torch.get_num_threads()
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    except (RuntimeError, TypeError, AssertionError) as error:  # torch's, of no such name, of no such GPU
        raise ArgumentError("device", '"cpu" or a GPU of this machine', repr(device)) from error
    return max(1, _blocks_per_multiprocessor(head_dim) * multiprocessors // num_kv_heads)


def _check_number(argument: str, number: object, least: int) -> None:
    if not is_whole(number) or number >= 2**63:
        raise ArgumentError(argument, "a whole number of at most 63 bits", repr(number))
    if number < least:
        raise ArgumentError(argument, f"at least {least}", number)


def make_split_plan(
    seq_lens: Tensor,
    *,
    block_size: int,
    window: int = 0,
    fixed_split: int = 0,
    num_parts: int | None = None,
    num_kv_heads: int = 1,
    head_dim: int = 128,
    min_part_tokens: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """A split plan for `paged_attention` over these lengths: made once a step, valid for all layers.

    Args:
        seq_lens: seq_lens [B] int32.
        block_size: S; cuts lie at multiples of it.
        window: the attention's window; 0 = all.
        fixed_split: the attention's `fixed_split`; cuts lie at multiples of it.
        num_parts: parts to cut into; if None as many as fill the device of `seq_lens` (`default_num_parts`). For
            lengths on the CPU whose plan goes to a GPU, name the number.
        num_kv_heads: K, which share out the blocks of a GPU; only for `num_parts` None on CUDA.
        head_dim: D, which bounds the blocks that a GPU runs at once; only for `num_parts` None on CUDA.
        min_part_tokens: use so few of the parts that each has so many tokens, and leave the last parts empty; 0 uses
            all parts. `MIN_PART_TOKENS` is what the CUDA kernels choose for themselves.
        out: int32 [2 · num_parts + 4] on the device of `seq_lens`, to write into.

    Returns:
        split_plan [2 · num_parts + 4] int32 on the device of `seq_lens`, without a sync. O(B + num_parts).

    Raises:
        ArgumentError: an option is out of range, or `seq_lens` or `out` is not of that shape, dtype and device.
    """
    require_tensors(seq_lens=seq_lens)
    if seq_lens.dim() != 1 or seq_lens.dtype is not torch.int32:
        raise ArgumentError("seq_lens", "[B] int32", f"{seq_lens.dim()} dimensions of {seq_lens.dtype}")
    if num_parts is None:
        num_parts = default_num_parts(seq_lens.device, num_kv_heads, head_dim)
    for argument, number, least in (
        ("block_size", block_size, 1), ("window", window, 0), ("fixed_split", fixed_split, 0),
        ("num_parts", num_parts, 1), ("min_part_tokens", min_part_tokens, 0),
    ):  # fmt: skip
        _check_number(argument, number, least)
    B, device = seq_lens.shape[0], seq_lens.device
    if out is None:
        out = torch.empty(2 * num_parts + 4, dtype=torch.int32, device=device)
    elif out.shape != (2 * num_parts + 4,) or out.dtype is not torch.int32 or out.device != device:
        raise ArgumentError("out", f"[{2 * num_parts + 4}] int32 on {device}", f"{list(out.shape)} {out.dtype}")
    check_written("out", out)
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
    total = ends[-1]
    parts = (total // min_part_tokens).clamp(1, num_parts) if min_part_tokens else num_parts
    targets = total * torch.arange(1, num_parts, device=device) // parts
    rows = torch.searchsorted(ends, targets, right=True).clamp(max=B - 1)
    grain = fixed_split or block_size
    positions = (lengths - ends)[rows] + targets  # the first visible position, and as far on as the target lies
    cuts[:, 0] = rows
    cuts[:, 1] = torch.minimum(positions, lengths[rows]) // grain * grain
    if min_part_tokens:  # the cuts behind the last part that is used lie at the end of the line
        cuts.masked_fill_((targets >= total)[:, None], 0)
        cuts[:, 0].masked_fill_(targets >= total, B)
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
        num_parts: the split plan's parts; as many as fill `device` (`default_num_parts`) if None.
        num_kv_heads: K; only for `num_parts` None on CUDA.
        device: where the attention runs.

    Returns:
        Room for one float32 result [H, D + 2] for each piece of a sequence that is cut; on CUDA also a counter for each
        sequence and head.

    Raises:
        ArgumentError: a number is no whole one or too small, or there is no such device.
    """
    for argument, number, least in (
        ("num_sequences", num_sequences, 0), ("num_heads", num_heads, 1), ("head_dim", head_dim, 1),
        ("max_seq_len", max_seq_len, 0), ("fixed_split", fixed_split, 0),
    ):  # fmt: skip
        _check_number(argument, number, least)
    if num_parts is not None:
        _check_number("num_parts", num_parts, 1)
    else:
        num_parts = default_num_parts(device, num_kv_heads, head_dim)
    # Free: a cut makes two pieces of a sequence that was whole, and one more of another.
    pieces = num_sequences * -(-max_seq_len // fixed_split) if fixed_split else 2 * (num_parts - 1)
    padding = 8  # three areas, each at a multiple of 4 floats
    return 4 * (pieces * num_heads * (head_dim + 2) + num_sequences * num_heads + padding)


def check_split_plan(split_plan: list[int], seq_lens: list[int], fixed_split: int) -> None:
    """A split plan: [B, fixed_split, row, position, …], cuts in order from the start of the batch to its end."""
    wanted = "one that make_split_plan made for these `seq_lens` and `fixed_split`"
    B = len(seq_lens)
    if len(split_plan) < 6 or len(split_plan) % 2:
        raise ArgumentError("split_plan", wanted, f"{len(split_plan)} entries")
    if split_plan[0] != B:
        raise ArgumentError("split_plan", wanted, f"one for {split_plan[0]} sequences")
    if split_plan[1] != fixed_split:
        raise ArgumentError("split_plan", wanted, f"one for splits of {split_plan[1]} tokens")
    cuts = list(zip(split_plan[2::2], split_plan[3::2], strict=True))
    for i, (row, position) in enumerate(cuts):
        if i in (0, len(cuts) - 1):
            fits = (row, position) == ((0, 0) if i == 0 else (B, 0))
        else:
            fits = (row, position) >= cuts[i - 1] and (
                (row, position) == (B, 0) or (0 <= row < B and 0 <= position <= seq_lens[row])
            )
        if not fits or (fixed_split and position % fixed_split):
            raise ArgumentError("split_plan", wanted, f"a cut at row {row}, position {position}")
