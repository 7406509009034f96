"""Checks a model's output against transformers: token for token in many scenarios, and logits and attention by size."""

from kvpager.verify.compare import TOLERANCE, Comparison, Divergence, compare_with_transformers
from kvpager.verify.forward import forward_eager
from kvpager.verify.scenarios import CLOSE, Difference, Scenario, Verdict, report, run_scenarios

__all__ = [
    "CLOSE",
    "TOLERANCE",
    "Comparison",
    "Difference",
    "Divergence",
    "Scenario",
    "Verdict",
    "compare_with_transformers",
    "forward_eager",
    "report",
    "run_scenarios",
]
