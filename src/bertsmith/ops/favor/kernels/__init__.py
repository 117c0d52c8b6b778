"""Triton kernels of linear attention: features live in registers and are never written to memory.

Divided by its sum, every feature is a softmax. Over the keys: feature m of all keys holds a mean of the values,
weighted by exp(w_m · k − …), as if w_m were a query of ordinary attention. Over the features: a query takes a mean of
those means, weighted by exp(w_m · q) times the sum of feature m over the keys, as if w_m were a key. Kept as means and
as logarithms of sums, half precision neither overflows nor loses small features, however long the sequence is.

All exponents here are in base 2, and −1e30 stands for the logarithm of 0.
"""
