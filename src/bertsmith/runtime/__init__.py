"""Runs an exported ONNX folder with onnxruntime, tokenizers and numpy alone: no PyTorch, no other part of Bertsmith.

from bertsmith.runtime import load

model = load("served")
model.predict(["a quiet, lovely film"])
"""

from bertsmith.runtime.model import OnnxModel, load

__all__ = ["OnnxModel", "load"]
