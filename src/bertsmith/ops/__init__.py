"""Math across positions: the only code that reads a layout's tensors, each with a reference beside its fast forms."""
