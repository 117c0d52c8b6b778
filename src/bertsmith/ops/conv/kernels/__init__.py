"""Triton's kernels of the convolutions, and the functions that launch them; import them only where they run."""
