"""Math across positions, the only code that reads a layout's tensors; each op has a reference beside fast backends."""
