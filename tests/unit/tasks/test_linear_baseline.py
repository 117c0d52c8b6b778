"""The linear baseline finds the solution of scikit-learn."""

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_union

from bertsmith.tasks import linear_baseline
from bertsmith.tasks.linear_baseline import INVERSE_PENALTY, LinearBaseline, character_ngrams, word_ngrams
from bertsmith.text.support_desk import support_desk


def test_weights_and_predictions_equal_those_of_scikit_learn() -> None:
    rows = support_desk("train")[:160]
    texts, labels = [row["text"] for row in rows], [row["label"] for row in rows]
    unseen = [row["text"] for row in support_desk("dev")[:100]]
    grams = make_union(
        *(TfidfVectorizer(analyzer=analyzer, sublinear_tf=True) for analyzer in (word_ngrams, character_ngrams))
    )
    features, peer = grams.fit_transform(texts), LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    peer.fit(features, labels)

    model = LinearBaseline(texts, labels)

    own, other = model.bags(unseen), grams.transform(unseen)
    sums = torch.zeros(len(unseen)).index_add(
        0, torch.repeat_interleave(torch.diff(own.offsets, append=torch.tensor([len(own.indices)]))), own.weights
    )
    np.testing.assert_allclose(sums.numpy(), np.asarray(other.sum(axis=1)).ravel(), rtol=1e-5)
    scores = own.times(model.matrix) + model.bias
    expected = peer.decision_function(other)
    centred = scores - scores.mean(-1, keepdim=True)
    np.testing.assert_allclose(centred.numpy(), expected - expected.mean(-1, keepdims=True), atol=0.05)
    agreement = np.mean(np.array(model.predict(unseen)) == peer.predict(other))
    assert agreement >= 0.98


def test_texts_without_known_ngrams_get_a_label() -> None:
    model = LinearBaseline(["good day", "bad day", "good"], ["yes", "no", "yes"])
    assert model.predict(["", "???", "good"]) == ["yes", "yes", "yes"]
    assert linear_baseline.word_ngrams("") == []
