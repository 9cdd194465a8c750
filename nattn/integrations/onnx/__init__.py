"""The attention of ONNX models, computed by nattn within onnx's reference evaluator."""

from .attention import Attention
from .evaluator import evaluator

__all__ = ["Attention", "evaluator"]
