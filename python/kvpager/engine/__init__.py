"""The engine: prompts in, text out, every sequence's keys and values in one paged pool."""

from kvpager.engine.llm import LLM
from kvpager.engine.outputs import CompletionOutput, RequestOutput, RunStats, StreamEvent
from kvpager.engine.requests import Prompt

__all__ = ["LLM", "CompletionOutput", "Prompt", "RequestOutput", "RunStats", "StreamEvent"]
