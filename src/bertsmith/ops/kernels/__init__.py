"""What the fused kernels of all ops share: whether Triton can run, where sequences lie, tile sizes, dropout."""
