"""Write models for other programs: Hugging Face and ONNX folders with a model card."""
