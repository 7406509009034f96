"""From a scheduled step to hidden states: the device's tensors of a step, the model, and recorded decode steps."""

from kvpager.runner.graphs import CudaCapture, Replay, decode_sizes
from kvpager.runner.model_runner import ModelRunner
from kvpager.runner.step_tensors import StepTensors

__all__ = ["CudaCapture", "ModelRunner", "Replay", "StepTensors", "decode_sizes"]
