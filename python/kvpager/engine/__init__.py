"""The engine: prompts in, text out, every sequence's keys and values in one paged pool."""

from kvpager.engine.engine import Engine
from kvpager.engine.llm import LLM
from kvpager.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, RunStats, StreamEvent
from kvpager.engine.requests import Prompt
from kvpager.engine.stats import EngineStats
from kvpager.engine.trace import StepTrace, as_line

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "RunStats",
    "StepTrace",
    "StreamEvent",
    "as_line",
]
