"""Triton kernels of linear attention: features stay in registers and are never written to memory.

Normalised features are softmax weights. Over the keys, feature m gives a mean of the values, weighted by
exp(w_m · k − …), as if w_m were a query of softmax attention. Over the features, a query gets a mean of these means,
weighted by exp(w_m · q) times the sum of feature m over the keys, as if w_m were a key. Stored as means and logarithms
of sums, half precision neither overflows nor loses small features, however long the sequence is.

All exponents are in base 2, and −1e30 represents the logarithm of 0.
"""
