"""The protein benchmark: baseline, harder test split, similarity of amino acids and BLOSUM62."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

import bertsmith
from bertsmith.errors import InputError
from bertsmith.text.learn import learn_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import proteins
from proteins import AMINO_ACIDS, AttentionShares


def test_matrix_is_blosum62() -> None:
    matrix = proteins.blosum62()
    assert (matrix == matrix.T).all()
    assert matrix.shape == (20, 20)
    assert np.trace(matrix) == 116
    assert matrix[np.triu_indices(20, 1)].sum() == -271
    pairs = {"WW": 11, "DE": 2, "IV": 3, "FY": 3, "KR": 2, "GI": -4}
    for (first, second), value in pairs.items():
        assert matrix[AMINO_ACIDS.index(first), AMINO_ACIDS.index(second)] == value


def test_baseline_is_add_one_frequencies() -> None:
    found = proteins.empirical_baseline(["AAB"], ["AB", "B"], alphabet="ABC")
    # add-one: A 3/6, B 2/6, C 1/6
    nats = -(math.log(1 / 2) + 2 * math.log(1 / 3)) / 3
    assert found.perplexity == pytest.approx(math.exp(nats))
    assert (found.accuracy, found.guess, found.residues) == (pytest.approx(1 / 3), "A", 3)
    with pytest.raises(InputError, match="the proteins have the letters J; allowed: ABC"):
        proteins.empirical_baseline(["AAJ"], ["A"], alphabet="ABC")


def test_hard_proteins_share_few_kmers_with_train() -> None:
    train = ["ACDEFGHIKLMNPQRSTVWY"]
    known, fresh, half = "DEFGHIKLMNPQ", "YWVTSRQPNMLK", "ACDEFGHIKLMN" + "WWWWWWWWWWWWW"
    assert proteins.hard_proteins(train, [known, fresh, half]) == [1, 2]
    assert proteins.hard_proteins(train, [known], most=1.0) == [0]


def test_shares_count_arcs_or_weights() -> None:
    # two heads over the letters A, A, R
    maps = np.array(
        [
            [[0.5, 0.3, 0.2], [0.0, 0.1, 0.9], [0.4, 0.4, 0.2]],
            [[0.1, 0.1, 0.2], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
        ]
    )
    arcs, weights = AttentionShares("arcs"), AttentionShares("weights")
    for _ in range(60):
        arcs.add(maps, "AAR")
        weights.add(maps, "AAR")
    assert arcs.sums is not None
    assert arcs.sums[:, :2].tolist() == [[240, 60], [0, 60]]  # first head: 4 arcs to A, 1 to R
    with pytest.raises(InputError, match="1 heads have 100 weights"):
        arcs.shares()
    weights_sums = weights.sums / 60
    np.testing.assert_allclose(weights_sums[:, :2], [[1.7, 1.3], [0.5, 1.5]])
    assert not weights_sums[:, 2:].any()


def test_similarity_is_the_correlation_over_heads() -> None:
    shares = np.random.default_rng(0).random((6, 20))
    shares[:, 1] = 2 * shares[:, 0] + 1
    shares[:, 2] = -shares[:, 0]
    similarity = proteins.similarity_of(shares)
    assert similarity[0, 1] == pytest.approx(1)
    assert similarity[0, 2] == pytest.approx(-1)
    with pytest.raises(InputError, match="all heads attend equally to A"):
        proteins.similarity_of(np.ones((3, 20)) * np.arange(20) + np.eye(3, 20, k=1))


def test_agreement_with_itself_is_perfect_and_with_noise_is_not() -> None:
    own = proteins.agreement_with_blosum(proteins.blosum62().astype(float), shuffles=200)
    assert own.correlation == pytest.approx(1)
    assert own.p_value == pytest.approx(1 / 201)
    assert own.within_minus_between > 0
    assert max(own.ranks.values()) <= 20
    noise = np.random.default_rng(1).standard_normal((20, 20))
    other = proteins.agreement_with_blosum(noise + noise.T, shuffles=200)
    assert abs(other.correlation) < 0.3
    assert other.p_value > 0.01


@pytest.mark.parametrize("preset", ["bert-tiny", "performer-protein-small"])
def test_attention_of_a_model_and_the_picture(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tokenizer = learn_tokenizer([], "characters", 100, alphabet=proteins.ALPHABET, progress=False)
    config = bertsmith.preset(preset, vocabulary=tokenizer.size, layers=2, width=32, heads=2, max_length=40)
    model = bertsmith.build(config, seed=0)
    model.tokenizer = tokenizer
    draw = np.random.default_rng(2)
    texts = ["".join(draw.choice(list(AMINO_ACIDS), size=60)) for _ in range(10)]
    shares = proteins.attention_shares(model, texts, "weights", length=40)
    assert shares.shape == (4, 20)
    np.testing.assert_allclose(shares.sum(1), 1)
    similarity = proteins.similarity_of(shares)
    agreement = proteins.agreement_with_blosum(similarity, shuffles=50)
    proteins.draw(similarity, agreement, tmp_path / "similarity.png")
    assert (tmp_path / "similarity.png").stat().st_size > 1000
