"""Text to token ids and back, at once and as tokens come; stop strings; chat templates."""

from kvpager.tokenizer.chat import Message
from kvpager.tokenizer.text import IncrementalDecoder, OutputText, StopFinder
from kvpager.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "Message", "OutputText", "StopFinder", "Tokenizer"]
