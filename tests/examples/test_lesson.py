"""`examples/paged_in_400_lines.py` runs, is right, and stays a lesson of 400 lines that imports torch only."""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

LESSON = Path(__file__).parents[2] / "examples" / "paged_in_400_lines.py"


def test_it_is_400_lines_and_imports_torch_only() -> None:
    source = LESSON.read_text()
    assert len(source.splitlines()) <= 400
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported == {"math", "dataclasses", "torch"}


def test_it_shows_a_preemption_and_a_fork_and_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(LESSON), run_name="__main__")
    shown = capsys.readouterr().out
    assert "B is preempted; computes A 17..17" in shown
    assert "**......  shared by both: *" in shown
    assert shown.count("as without a cache") == 4
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_its_attention_is_torchs(length: int) -> None:
    lesson: dict[str, Any] = runpy.run_path(str(LESSON))
    storage = lesson["Storage"](1, 4, 4, 2, 8)
    generator = torch.Generator().manual_seed(length)
    query, keys, values = (
        torch.randn(n, heads, 8, generator=generator, dtype=torch.float64)
        for n, heads in ((1, 4), (length, 2), (length, 2))
    )
    table = [2, 0, 3]
    storage.write(0, [table[p // 4] * 4 + p % 4 for p in range(length)], keys, values)
    ours = lesson["paged_attention"](query[0], storage, 0, table[: -(-length // 4)], length)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
    )
    assert torch.allclose(ours, theirs[:, 0], rtol=1e-12)


@pytest.mark.parametrize("num_blocks", [7, 9, 30])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_any_pool_and_budget_give_the_same_tokens(num_blocks: int, budget: int) -> None:
    lesson: dict[str, Any] = runpy.run_path(str(LESSON))
    model, pool = lesson["Model"](3), lesson["Pool"](num_blocks, 4)
    storage = lesson["Storage"](lesson["LAYERS"], num_blocks, 4, lesson["K"], lesson["D"])
    scheduler = lesson["Scheduler"](pool, storage, budget)
    prompts = [list(range(n, 2 * n + 1)) for n in (3, 9, 1, 6)]
    requests = [lesson["Sequence"](str(n), list(p), len(p), 8) for n, p in enumerate(prompts)]
    scheduler.waiting.extend(requests)
    lesson["run"](model, scheduler, show=False)
    assert len(pool.free) == num_blocks
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.new_tokens == lesson["without_cache"](model, prompt, 8)
