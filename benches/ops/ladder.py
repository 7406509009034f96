"""From the lesson to the product: one decode in every way there is, ours and torch's; and batches of the same sum."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpager import ops
from kvpager.ops.attention import reference
from ops.decode import HEAD_DIM, NUM_KV_HEADS, Pool, packed_sdpa
from ops.machine import Machine
from ops.timing import alternate, print_times

Calls = dict[str, Callable[[], object]]
BATCH, LENGTH, GROUP = 8, 2048, 2
LADDER_ROUNDS = 3  # the first rungs take seconds


def ladder(machine: Machine, threads: int, rounds: int, flex: bool) -> dict[str, float]:
    """Milliseconds of each rung; 8 sequences of 2,048 tokens in float32, G = 2."""
    torch.set_num_threads(threads)
    num_tokens = BATCH * LENGTH
    pool = Pool("float32", 16, num_tokens * 2 * NUM_KV_HEADS * HEAD_DIM * 4)
    native_call, _ = pool.decode([LENGTH] * BATCH, GROUP)
    cache = (pool.cache.key_cache[0], pool.cache.value_cache[0])
    table = pool.order[: num_tokens // 16].reshape(BATCH, -1)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    query = torch.randn(BATCH, NUM_KV_HEADS * GROUP, HEAD_DIM)
    scale = 1 / math.sqrt(HEAD_DIM)
    rows = [torch.empty(num_tokens, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]

    def gather_and_sdpa() -> Tensor:
        key, value = ops.gather_kv(*cache, table, lengths, key=rows[0], value=rows[1])
        heads = [x.view(BATCH, LENGTH, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2) for x in (key, value)]
        return scaled_dot_product_attention(query.view(BATCH, NUM_KV_HEADS, GROUP, HEAD_DIM), *heads, scale=scale)

    inputs = (query, *cache, table, lengths)
    calls: Calls = {
        "lesson: block after block in torch": lambda: reference.paged_attention_blockwise(*inputs, scale=scale),
        "specification: gather in torch": lambda: reference.paged_attention(*inputs, scale=scale, max_seq_len=LENGTH),
        "gather_kv + SDPA": gather_and_sdpa,
        "SDPA, packed heads, contiguous": packed_sdpa(LENGTH, BATCH, GROUP, torch.float32)[0],
        "native": native_call,
    }
    if flex:
        calls |= flex_attention_calls(pool, table, query.view(BATCH, -1, 1, HEAD_DIM), scale)
    title = f"ladder: float32, G={GROUP}, {BATCH} x {LENGTH} tokens, {threads} threads"
    return print_times(title, alternate(machine, calls, threads, min(rounds, LADDER_ROUNDS)))


def flex_attention_calls(pool: Pool, table: Tensor, query: Tensor, scale: float) -> Calls:
    """torch's flex attention, compiled: over contiguous K and V, and over pages named by its block mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    contiguous = [torch.full((BATCH, NUM_KV_HEADS, LENGTH, HEAD_DIM), 0.01) for _ in range(2)]
    # Flex wants [1, K, N * S, D], and every table as long as the pool.
    paged = [layer[0].transpose(0, 1).reshape(1, NUM_KV_HEADS, -1, HEAD_DIM)
             for layer in (pool.cache.key_cache, pool.cache.value_cache)]  # fmt: skip
    pages = torch.zeros(BATCH, 1, 1, pool.cache.num_blocks, dtype=torch.int32)
    pages[:, 0, 0, : table.shape[1]] = table
    whole = torch.full((BATCH, 1, 1), table.shape[1], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(whole), torch.zeros_like(pages), whole, pages, BLOCK_SIZE=(1, pool.cache.block_size),
        seq_lengths=(1, paged[0].shape[2]),
    )  # fmt: skip
    return {
        "flex attention, compiled, contiguous": lambda: compiled(query, *contiguous, scale=scale, enable_gqa=True),
        "flex attention, compiled, paged": lambda: compiled(
            query, *paged, block_mask=mask, scale=scale, enable_gqa=True
        ),
    }


def shapes(machine: Machine, num_bytes: int, threads: int, rounds: int) -> dict[str, float]:
    """Milliseconds of 1 × 32k, 8 × 4k and 64 × 512 tokens, and of mixed lengths of the same sum."""
    torch.set_num_threads(threads)
    pool = Pool("bfloat16", 16, num_bytes)
    total = min(32768, pool.num_tokens // 2 // 1024 * 1024)
    mixed = [total // 2, total // 4] + [total // 256] * 64
    batches = {
        f"1 x {total}": [total], f"8 x {total // 8}": [total // 8] * 8, f"64 x {total // 64}": [total // 64] * 64,
        f"mixed, {len(mixed)} sequences": mixed,
    }  # fmt: skip
    calls: Calls = {name: pool.decode(lengths, 2)[0] for name, lengths in batches.items()}
    title = f"shapes: bfloat16, G=2, {total} tokens, {threads} threads"
    medians = print_times(title, alternate(machine, calls, threads, rounds))
    spread = max(medians.values()) / min(medians.values()) - 1
    print(f"  slowest over fastest {spread:+.1%} (bar: 15 %)")
    return {**medians, "spread": spread}
