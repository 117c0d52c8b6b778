"""Disentangled attention in Triton: flash-attention passes over pairs, and products with the relative table.

Scores need Qᵢ·PK[slot(i − j)] and Kⱼ·PQ[slot(i − j)]. Both are products of queries or keys with the rows of a table.
They are written once to two buffers, from which the passes over pairs read whole tiles:

    by_query[i, j] = Qᵢ·PK[slot(i − j)]        by_key[j, i] = Kⱼ·PQ[slot(i − j)]

in the dtype of the inputs and multiplied by the scale of the scores. In the backward pass the same buffers hold the
gradient of the scores. Read along offsets instead of positions, they give the gradients of queries, keys and tables as
matrix products: (i, j) ↔ (i, i − j) is one to one, so nothing is scattered and the order of sums is fixed.

Offsets beyond the reach of the slots share a row. If sequences are longer than a band around the diagonal, the buffers
hold only that band, and tiles outside it read one number per query and per key ("far").
"""
