"""Models for other programs: ONNX and Hugging Face folders with a model card."""
