"""What is timed: our decode, the peers that are installed, and torch's SDPA over contiguous K and V."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpu.figures import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Shape, layers_for
from kvpager import PagedKVCache, ops
from kvpager.ops.attention import backends
from kvpager.ops.attention.backends import flash_attn
from kvpager.ops.attention.split_plan import MIN_PART_TOKENS

LEAST_BYTES, MOST_BYTES = 1 << 30, 24 << 30  # of the caches that the calls of one graph go round
Calls = list[Callable[[], object]]


class Inputs:
    """A shape's caches, layer after layer, its tables (shuffled), lengths and queries."""

    def __init__(self, shape: Shape, block_size: int = BLOCK_SIZE, *, device: str = "cuda", layers: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        columns = -(-shape.length // block_size)
        dtype = {"bf16": torch.bfloat16, "fp8": "fp8_e4m3"}[shape.kv]
        self.shape = shape
        self.cache = PagedKVCache(
            layers or layers_for(shape, LEAST_BYTES, MOST_BYTES), shape.batch * columns, NUM_KV_HEADS, block_size,
            HEAD_DIM, dtype=dtype, device=device,
        )  # fmt: skip
        self.cache.storage.view(torch.uint8).fill_(60)  # small ordinary numbers in every dtype
        for scale in (*self.cache.key_scale, *self.cache.value_scale):
            scale.fill_(0.01)
        order = torch.randperm(shape.batch * columns, generator=generator).to(torch.int32)
        self.tables = order.view(shape.batch, columns).to(device)
        self.lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        self.query = torch.randn(shape.batch, NUM_HEADS, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
        self.out = torch.empty_like(self.query)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.key_cache[layer], self.cache.value_cache[layer]


def ours(inputs: Inputs) -> Calls:
    """`paged_attention` as an engine calls it: one split plan and one workspace for all layers."""
    shape, cache = inputs.shape, inputs.cache
    device = inputs.lengths.device
    split_plan = ops.make_split_plan(
        inputs.lengths, block_size=cache.block_size, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM,
        min_part_tokens=MIN_PART_TOKENS,
    )  # fmt: skip
    num_bytes = ops.workspace_bytes(
        shape.batch, NUM_HEADS, HEAD_DIM, max_seq_len=shape.length, num_kv_heads=NUM_KV_HEADS, device=device
    )
    workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def call_of(layer: int) -> Callable[[], object]:
        scales = {}
        if cache.quantised:
            scales = {"key_scale": cache.key_scale[layer], "value_scale": cache.value_scale[layer]}
        return lambda: ops.paged_attention(
            inputs.query, *inputs.layer(layer), inputs.tables, inputs.lengths, max_seq_len=shape.length,
            split_plan=split_plan, workspace=workspace, out=inputs.out, **scales,
        )  # fmt: skip

    return [call_of(layer) for layer in range(cache.num_layers)]


def peer(name: str, inputs: Inputs) -> Calls | None:
    """Through the same hand-off that `backend=` uses, planned once; None if it is not installed or does not take it."""
    keywords = {"max_seq_len": inputs.shape.length}
    try:
        run = backends.planned(name, inputs.query, inputs.cache.key_cache[0], (inputs.tables, inputs.lengths), keywords)
    except backends.ArgumentError as error:
        print(f"{name} on {inputs.shape.name}: {error}")
        return None
    assert run is not None
    layers = range(inputs.cache.num_layers)
    return [lambda layer=layer: run(inputs.query, *inputs.layer(layer), inputs.out, None) for layer in layers]


def block_size_of(name: str) -> int:
    """FlashAttention-2 has larger blocks only."""
    return flash_attn.BLOCK_MULTIPLE_2 if name == "flash_attn" and flash_attn._version() == 2 else BLOCK_SIZE


def packed_sdpa(inputs: Inputs) -> Calls | None:
    """The heads of a group packed as query rows, K and V contiguous: torch's attention has no pages. bf16 only."""
    if inputs.cache.quantised:
        return None
    B, length, group = inputs.shape.batch, inputs.shape.length, NUM_HEADS // NUM_KV_HEADS
    query = inputs.query.view(B, NUM_KV_HEADS, group, HEAD_DIM)
    scale = 1 / math.sqrt(HEAD_DIM)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call_of(layer: int) -> Callable[[], object]:
        key, value = (rows.view(B, NUM_KV_HEADS, length, HEAD_DIM) for rows in inputs.layer(layer))
        return lambda: sdpa(query, key, value, scale=scale)

    return [call_of(layer) for layer in range(inputs.cache.num_layers)]
