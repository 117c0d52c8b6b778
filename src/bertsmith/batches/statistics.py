"""What a corpus gives away without any context: the level a model has to get below."""

import numpy as np

from bertsmith.batches.shards import TokenCorpus


def unigram_level(train: TokenCorpus, held_out: TokenCorpus, *, most_tokens: int = 50_000_000) -> float:
    """The loss, in nats a token, of guessing held-out tokens by their frequency in the training part."""
    seen = _counts(train, most_tokens)
    wanted = _counts(held_out, most_tokens)
    shares = (seen + 1) / (seen.sum() + len(seen))  # add-one: a piece never seen must not cost infinity
    return float(-(wanted * np.log(shares)).sum() / wanted.sum())


def _counts(corpus: TokenCorpus, most_tokens: int) -> np.ndarray:
    counts = np.zeros(corpus.vocabulary, dtype=np.int64)
    read, texts = 0, []
    for document, length in enumerate(corpus.lengths.tolist()):
        if read >= most_tokens:
            break
        texts.append(corpus.read(document, 0, length))
        read += length
        # many documents at a time: one count touches the whole vocabulary
        if len(texts) == 1000:
            counts += np.bincount(np.concatenate(texts), minlength=corpus.vocabulary)
            texts = []
    return counts + (np.bincount(np.concatenate(texts), minlength=corpus.vocabulary) if texts else 0)
