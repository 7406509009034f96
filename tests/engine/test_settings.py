"""Settings from `LLM` down to cache, manager and command: each is reachable, and none is typed or checked twice."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from kvpager import LLM, KVBlockManager, PagedKVCache, SamplingParams, ops
from kvpager.cache_dtypes import CACHE_DTYPES
from kvpager.cli.options import SETTINGS_HELP
from kvpager.cli.plan import make_plan
from kvpager.config import CacheConfig, EngineConfig, EngineSettings
from kvpager.errors import ConfigError
from kvpager.loader import open_model
from kvpager.runner import ModelRunner
from kvpager.verify import forward_eager

CODES = [each.name for each in CACHE_DTYPES if each.is_codes]
LARGEST_GAP = {"int8": 0.03, "fp8_e4m3": 0.15, "fp8_e5m2": 0.3}
PROMPTS = ["The for statement", "Return the file", "A class definition defines a class object. The base classes are"]


def test_a_setting_is_a_field_a_keyword_and_an_option() -> None:
    hints = get_type_hints(EngineConfig)
    assert get_type_hints(EngineSettings) == {each.name: hints[each.name] for each in fields(EngineConfig)}
    assert SETTINGS_HELP.keys() == EngineSettings.__annotations__.keys()
    assert list(inspect.signature(LLM.__init__).parameters) == ["self", "model", "config", "trace", "overrides"]


def test_overrides_go_over_a_config() -> None:
    config = EngineConfig(num_blocks=8, block_size=4)
    llm = LLM(config=config, block_size=8)
    assert llm.config == EngineConfig(num_blocks=8, block_size=8)
    assert (llm.runner.cache.block_size, llm.block_manager.block_size) == (8, 8)
    assert config.block_size == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_sizes": 4}, "there is no setting `block_sizes`; did you mean `block_size`?"),
        ({"kv_dtype": "int8"}, "there is no setting `kv_dtype`; did you mean `dtype`?"),
        ({"zzz": 1}, "there is no setting `zzz`; there are block_size, "),
        ({"kv_cache_dtype": "int4"}, "`kv_cache_dtype`: wanted float32, .*int8.*, got int4"),
        ({"kv_cache_dtype": "float16", "dtype": "float32"}, "computes in float32 it must be auto, float32, int8"),
        ({"kv_cache_dtype": "int8", "dtype": "float64"}, "computes in float64 it must be auto or float64"),
        ({"kv_cache_dtype": None}, "`kv_cache_dtype` is None; it must be a text"),
        ({"eviction_policy": "fifo"}, "`eviction_policy`: wanted `lru`.* got fifo"),
        ({"eviction_policy": 3}, "`eviction_policy` is 3; it must be a text"),
        ({"attention_backend": "none"}, "none"),
    ],
)
def test_bad_names_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"num_blocks": 4, **settings})


@pytest.mark.parametrize("name", CODES)
def test_a_cache_of_codes_decodes_as_the_cache_itself_does(name: str) -> None:
    """The engine's tokens are those of each prompt alone over a cache of codes that is used directly."""
    llm = LLM(num_blocks=64, dtype="float32", kv_cache_dtype=name)
    outputs = llm.generate(PROMPTS, max_tokens=24)
    shape = llm.model_config
    cache = PagedKVCache(shape.num_hidden_layers, 8, shape.num_key_value_heads, 16, shape.head_dim, dtype=name)
    runner = ModelRunner(llm.runner.model, cache, KVBlockManager(8, 16))
    for number, output in enumerate(outputs):
        runner.block_manager.create_sequence(number)
        tokens = list(output.prompt_token_ids)
        chosen: list[int] = []
        for _ in range(24):
            chosen.append(int(forward_eager(runner, [number], [chosen[-1:] or tokens])[0].argmax()))
        assert output.outputs[0].token_ids == tuple(chosen)
        runner.block_manager.release_sequence(number)


@pytest.mark.parametrize("name", CODES)
def test_a_cache_of_codes_stays_near_the_numbers(name: str) -> None:
    """Log-probabilities of a prompt's tokens differ from those of a float32 cache by rounding: int8 1 in 254 of a row's
    largest, fp8 1 in 16 or 1 in 8 of each number, in each of 4 layers."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for kept in ("auto", name):
        llm = LLM(num_blocks=64, dtype="float32", kv_cache_dtype=kept)
        output = llm.generate(PROMPTS[2], params)[0]
        assert output.prompt_logprobs is not None
        found.append([next(iter(each.values())).logprob for each in output.prompt_logprobs if each])
    gap = (torch.tensor(found[0]) - torch.tensor(found[1])).abs().max()
    assert 0 < gap < LARGEST_GAP[name]


@pytest.mark.parametrize("name", ["auto", *CODES])
def test_one_formula_of_bytes(name: str) -> None:
    """Cache, engine and plan count the same bytes, scales included, and a budget is never exceeded."""
    budget = 2**20 + 77
    llm = LLM(kv_cache_memory_bytes=budget, dtype="float32", kv_cache_dtype=name)
    cache, config = llm.runner.cache, llm.config
    per_block = config.bytes_per_block(llm.model_config, "float32")
    assert cache.storage.nbytes == cache.num_blocks * per_block <= budget < (cache.num_blocks + 1) * per_block
    assert cache.bytes_per_block == per_block
    plan = make_plan(open_model(None), config)
    assert (plan.num_blocks, plan.bytes_per_block, plan.cache_bytes) == (
        cache.num_blocks,
        per_block,
        cache.storage.nbytes,
    )
    default = EngineConfig(kv_cache_dtype=name, max_num_seqs=10**6, dtype="float32")
    num_blocks = make_plan(open_model(None), default).num_blocks
    assert num_blocks == 2**30 // per_block


def test_bytes_of_a_block_by_hand() -> None:
    """3 layers, 2 heads of 5 elements, blocks of 3: 30 codes padded to 32, and 6 scales of 4 bytes, for K and for V."""

    class Shape:
        num_hidden_layers, num_key_value_heads, head_dim = 3, 2, 5

    config = CacheConfig(block_size=3, num_blocks=1, kv_cache_dtype="int8")
    assert config.bytes_per_block(Shape(), "float16") == 2 * 3 * (32 + 6 * 4)
    assert CacheConfig(block_size=3, num_blocks=1).bytes_per_block(Shape(), "float16") == 2 * 3 * 30 * 2


def one_off(number: int) -> list[int]:
    return [100 + number, *range(3, 18)]


def hits_through_llm(policy: str) -> list[int | None]:
    llm = LLM(num_blocks=12, block_size=4, eviction_policy=policy)
    order = [list(range(40, 56))] * 2 + [one_off(number) for number in range(6)] + [list(range(40, 56))]
    return [llm.generate([prompt], max_tokens=1)[0].num_cached_tokens for prompt in order]


def hits_at_the_manager(policy: str) -> list[int]:
    manager = KVBlockManager(12, 4, enable_prefix_caching=True, eviction_policy=policy)
    order = [list(range(40, 56))] * 2 + [one_off(number) for number in range(6)] + [list(range(40, 56))]
    found = []
    for number, prompt in enumerate(order):
        found.append(manager.admit(number, prompt).num_computed_tokens)
        manager.commit(number, len(prompt))
        manager.release_sequence(number)
    return found


def test_the_eviction_policy_reaches_the_manager() -> None:
    """A prefix that came back once outlives six prompts that never do, with SLRU alone."""
    for policy in ("lru", "slru"):
        assert hits_through_llm(policy) == hits_at_the_manager(policy)
    assert hits_through_llm("slru")[-1] == 12
    assert hits_through_llm("lru")[-1] == 0


def test_the_page_of_abilities_names_them_all() -> None:
    """docs/abilities.md has each setting, each keyword of manager and cache, and each operation."""
    page = (Path(__file__).parents[2] / "docs" / "abilities.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    keywords = [
        name
        for made in (KVBlockManager, PagedKVCache)
        for name, each in inspect.signature(made).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not name.startswith("_")
    ]
    assert {*EngineSettings.__annotations__, *keywords, *ops.__all__} - named == set()
