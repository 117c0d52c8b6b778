"""Documents joined into one stream, with one separator between neighbours, and cut into sequences across their borders.

The stream consists of the documents given, in their order. Document i begins at offset o_i = Σ_{j<i} (length_j + 1). A
sequence covers a range of the stream: its runs are the intersections with documents, and a [SEP] stands before every
run but the first. A separator at the first or last position of a range is dropped, so that sequence is one token
shorter.
"""

import numpy as np

from bertsmith.data.sequences import SHORTEST, Documents, Sequences, samples


def windows(
    corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int, *, crosses_documents: bool = True
) -> Sequences:
    """Cut the stream into windows of `length` tokens with [CLS] and [SEP] (DeBERTa, and Performer for proteins)."""
    documents = documents[corpus.lengths[documents] > 0]
    sizes, body = corpus.lengths[documents], length - 2
    begin = np.arange(0, int((sizes + 1).sum()) - 1, body)
    return _sequences(corpus, documents, begin, begin + body, epoch, crosses_documents)


def full_sentences(
    corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int, *, crosses_documents: bool = True
) -> Sequences:
    """Fill sequences with whole sentences up to `length` tokens (FULL-SENTENCES of Liu et al. 2019).

    A sentence that does not fit into a sequence of its own is cut.
    """
    documents = documents[corpus.lengths[documents] > 0]
    body = length - 2
    edges = [_edges(corpus.sentence_starts(document), body) for document in documents.tolist()]
    offsets = _offsets(corpus.lengths[documents])
    # (documents, sentences) -> (sentences,), as offsets in the stream
    first = np.concatenate([offset + edge[:-1] for offset, edge in zip(offsets, edges, strict=True)])
    last = np.concatenate([offset + edge[1:] for offset, edge in zip(offsets, edges, strict=True)])
    following = np.searchsorted(last, first + body, side="right").tolist()
    opening, sentence = [], 0
    while sentence < len(following):
        opening.append(sentence)
        sentence = following[sentence]
    end = last[np.array([*opening[1:], len(following)]) - 1]
    return _sequences(corpus, documents, first[opening], end, epoch, crosses_documents)


def _edges(starts: np.ndarray, body: int) -> np.ndarray:
    """Where sentences begin, with the end of the document; sentences longer than `body` are cut into several."""
    sizes = np.diff(starts)
    counts = -(-sizes // body)
    position = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(starts[:-1], counts) + position * body, starts[-1])


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """Offset of every document in the stream."""
    return np.cumsum(sizes + 1) - (sizes + 1)


def _sequences(
    corpus: Documents, documents: np.ndarray, begin: np.ndarray, end: np.ndarray, epoch: int, crosses_documents: bool
) -> Sequences:
    """Return the sequences that cover the ranges begin:end of the stream.

    Shape: begin, end (sequences,), rising.
    """
    sizes = corpus.lengths[documents]
    offsets = _offsets(sizes)
    first = np.searchsorted(offsets + sizes, begin, side="right")
    counts = np.searchsorted(offsets, end, side="left") - first
    owner = np.repeat(np.arange(len(begin)), counts)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = first[owner] + inside  # of the document of each run
    start = np.maximum(begin[owner] - offsets[index], 0)
    stop = np.minimum(end[owner] - offsets[index], sizes[index])
    if len(begin) > 1 and (stop - start)[owner == len(begin) - 1].sum() < SHORTEST:
        is_kept = owner < len(begin) - 1
        counts = counts[:-1]
        owner, inside, index, start, stop = (array[is_kept] for array in (owner, inside, index, start, stop))
    document, is_second = documents[index], np.zeros(len(index), dtype=bool)
    if not crosses_documents:
        sample = samples(corpus, document, owner, epoch)
        return Sequences(document, start, stop, is_second, np.arange(len(document) + 1), sample)
    opens = np.concatenate([[0], np.cumsum(counts)])
    sample = samples(corpus, document[opens[:-1]], np.arange(len(counts)), epoch)
    return Sequences(document, start, stop, is_second, opens, sample, breaks=inside > 0)
