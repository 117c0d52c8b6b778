"""Disentangled attention in Triton: flash-style passes over pairs, and products with the relative table beside them.

Scores need Qᵢ·PK[slot(i − j)] and Kⱼ·PQ[slot(i − j)]. Both are products of states with the rows of a table, written
once to memory at the place (state, other side's place) where a pass over pairs reads them in whole tiles: two buffers,

    by_query[i, j] = Qᵢ·PK[slot(i − j)]        by_key[j, i] = Kⱼ·PQ[slot(i − j)]

in the dtype of the inputs and times what all scores are multiplied by. In the backward pass the same two buffers take
the gradient of the scores, each from its own side. Read along offsets instead of places they give the gradients of
states and tables as matrix products: (i, j) ↔ (i, i − j) is one to one, so nothing is scattered and nothing adds up by
chance order.

Beyond the reach of the slots all pairs share a row. Where sequences are longer than a band around the diagonal the
buffers hold only that band, and tiles outside it read one number per query and per key ("far").
"""
