"""What a smaller cache costs in accuracy: attention outputs and logits by cache dtype, against the float32 cache.

Attention: 8 kv heads, G = 4, D = 128, context 2,048, decode and prefill, whichever is worse. Queries, K and V are
standard normal; in the columns "with outliers" every 16th channel of K is ten times as large, as trained models have
them. Errors are the largest and the root mean square difference from float64 attention over the float32 rows, relative
to the root mean square of that result. Logits: the bundled model in float32 along random tokens, in chunks and then
token by token; only what the cache keeps differs. Beside them, how often the most likely token is the same.

    python benches/accuracy.py             a table for people
    python benches/accuracy.py --markdown  the table of docs/kernels-cpu.md
    python benches/accuracy.py --json      for machines
"""

import argparse
import json

import torch
from torch import Tensor

from kvpager import ops
from kvpager.cache import PagedKVCache
from kvpager.cache_dtypes import CACHE_DTYPES
from kvpager.config import CacheConfig, ModelConfig
from kvpager.loader import BUNDLED_MODEL, load_parameters
from kvpager.manager import KVBlockManager
from kvpager.models import DecoderForCausalLM
from kvpager.runner import ModelRunner
from kvpager.verify import forward_eager

DTYPES = {each.name: getattr(torch, each.torch_name) for each in CACHE_DTYPES if each.name != "float64"}
QUANTISED = [each.name for each in CACHE_DTYPES if each.is_codes]
K, G, D, S, CONTEXT = 8, 4, 128, 16, 2048


def attention_error(name: str, *, outliers: bool, path: str) -> tuple[float, float]:
    """Largest and root mean square error of attention, relative to the result's root mean square.

    A quantised cache is read by float32 queries, a 16-bit one by queries of its own dtype.
    """
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(CONTEXT, K, D, generator=generator) for _ in range(2))
    if outliers:
        key[..., ::16] *= 10
    query = torch.randn(64, K * G, D, generator=generator)
    dtype = torch.float32 if name in QUANTISED else DTYPES[name]
    shape = (CONTEXT // S, K, S, D)
    caches = [torch.zeros(shape, dtype=DTYPES[name]) for _ in range(2)]
    scales = {}
    if name in QUANTISED:
        scales = {"key_scale": torch.zeros(shape[:3]), "value_scale": torch.zeros(shape[:3])}
    ops.write_kv(key.to(dtype), value.to(dtype), *caches, torch.arange(CONTEXT), **scales)
    table, length = torch.arange(CONTEXT // S, dtype=torch.int32)[None], torch.tensor([CONTEXT], dtype=torch.int32)
    given = query.to(dtype)
    if path == "decode":
        rows = table.expand(len(query), -1), length.expand(len(query))
        out = ops.paged_attention(given, *caches, *rows, **scales)
        first = [CONTEXT] * len(query)
    else:
        bounds = torch.tensor([0, len(query)], dtype=torch.int32)
        out = ops.paged_prefill(given, *caches, table, bounds, length, **scales)
        first = [CONTEXT - len(query) + 1 + row for row in range(len(query))]
    keys, values = (rows.double().repeat_interleave(G, 1) for rows in (key, value))
    wanted = torch.stack([_attend(query[row].double(), keys[:seen], values[:seen]) for row, seen in enumerate(first)])
    error, size = out.double() - wanted, wanted.square().mean().sqrt()
    return float(error.abs().max() / size), float(error.square().mean().sqrt() / size)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [H, D] over keys and values [n, H, D]."""
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query, keys) * D**-0.5, dim=1)
    return torch.einsum("hn,nhd->hd", weights, values)


class RoundedCache(PagedKVCache):
    """A float32 cache whose rows are rounded to 16 bits as they are written: what a 16-bit cache keeps, no more."""

    rounded_to = torch.float32

    def qk_norm_rope_write(self, layer: int, *inputs: Tensor | None, eps: float) -> Tensor:
        """As in `PagedKVCache`; the last of the inputs are the slots."""
        query = super().qk_norm_rope_write(layer, *inputs, eps=eps)
        slots = inputs[-1]
        for cache in () if self.quantised else (self.key_cache[layer], self.value_cache[layer]):
            rows = cache[slots // S, :, slots % S]
            cache[slots // S, :, slots % S] = rows.to(self.rounded_to).float()
        return query


def logits_of(name: str, tokens: list[int]) -> Tensor:
    """Logits [steps, V] of the bundled model in float32 along a text: half in chunks of 7, half token by token."""
    config = ModelConfig.from_folder(BUNDLED_MODEL)
    with torch.device("meta"):
        model = DecoderForCausalLM(config)
    load_parameters(model, BUNDLED_MODEL, dtype=torch.float32, device=torch.device("cpu"), ignored=("lm_head.weight",))
    num_blocks = len(tokens) // S + 2
    kept = name if name in QUANTISED else "auto"
    cache = RoundedCache.from_config(config, CacheConfig(block_size=S, num_blocks=num_blocks, kv_cache_dtype=kept))
    cache.rounded_to = DTYPES[name]
    runner = ModelRunner(model.eval(), cache, KVBlockManager(num_blocks, S))
    runner.block_manager.create_sequence(0)
    half = len(tokens) // 2
    pieces = [tokens[i : min(i + 7, half)] for i in range(0, half, 7)] + [[token] for token in tokens[half:]]
    return torch.cat([forward_eager(runner, [0], [piece]) for piece in pieces]).double()


def measure() -> list[dict[str, float | str]]:
    """One row for each dtype."""
    vocab_size = ModelConfig.from_folder(BUNDLED_MODEL).vocab_size
    tokens = torch.randint(3, vocab_size, (192,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = logits_of("float32", tokens)
    rows: list[dict[str, float | str]] = []
    for name in DTYPES:
        row: dict[str, float | str] = {"dtype": name}
        row["bytes"] = DTYPES[name].itemsize + (4 / D if name in QUANTISED else 0)
        for kind, outliers in (("plain", False), ("outliers", True)):
            errors = [attention_error(name, outliers=outliers, path=path) for path in ("decode", "prefill")]
            row[f"{kind}_max"], row[f"{kind}_rms"] = (max(each) for each in zip(*errors, strict=True))
        logits = logits_of(name, tokens)
        row["logits_max"] = float((logits - exact).abs().max())
        row["logits_rms"] = float((logits - exact).square().mean().sqrt() / exact.std())
        row["same_token"] = float((logits.argmax(1) == exact.argmax(1)).double().mean())
        rows.append(row)
    return rows


COLUMNS = {
    "dtype": "cache",
    "bytes": "bytes per element",
    "plain_max": "attention, max",
    "plain_rms": "rms",
    "outliers_max": "with outliers, max",
    "outliers_rms": "rms",
    "logits_max": "logits, max",
    "logits_rms": "rms / std",
    "same_token": "same best token",
}


def _cell(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if name == "bytes":
        return f"{value:.2f}"
    return f"{value:.1%}" if name == "same_token" else f"{value:.1e}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON list")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = measure()
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    table = [list(COLUMNS.values())] + [[_cell(name, row[name]) for name in COLUMNS] for row in rows]
    if options.markdown:
        table.insert(1, ["---"] * len(COLUMNS))
        print("\n".join(f"| {' | '.join(cells)} |" for cells in table))
        return
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(
        "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in table)
    )


if __name__ == "__main__":
    main()
