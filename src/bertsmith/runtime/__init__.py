"""Run an exported ONNX folder with onnxruntime, tokenizers and numpy; PyTorch is not needed.

    from bertsmith.runtime import load

    model = load("served")
    model.predict(["a quiet, lovely film"])

The rest of the package does not import this module.
"""

from bertsmith.runtime.model import OnnxModel, load

__all__ = ["OnnxModel", "load"]
