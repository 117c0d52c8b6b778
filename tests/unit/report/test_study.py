"""Averages over many texts against plain loops, and their page and picture."""

import base64
import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_pages import check_page
from torch import Tensor

import bertsmith
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.report.pictures import save_study_picture
from bertsmith.report.study import MapStudy, main_map, study_statistics, study_texts
from bertsmith.report.study_page import headline, render_study_page
from bertsmith.text.tokenizer import Tokenizer

LENGTHS = [[5, 3], [1, 2, 8]]
MAX_LENGTH = 8


def batches() -> list[tuple[list[dict[str, Tensor]], Tensor]]:
    """Return two batches of three layers with different maps and heads; padding is NaN."""
    built = []
    for lengths in LENGTHS:
        max_length = max(lengths)
        is_token = torch.arange(max_length) < torch.tensor(lengths)[:, None]
        pairs = (is_token[:, :, None] & is_token[:, None])[:, None]

        def weights(heads: int, pairs: Tensor = pairs) -> Tensor:
            scores = torch.randn(len(pairs), heads, *pairs.shape[2:], dtype=torch.float64)
            return torch.where(pairs, scores.masked_fill(~pairs, -1e9).softmax(-1), torch.nan)

        position = torch.arange(max_length)
        band = ((position[:, None] - position).abs() <= 1) / 3.0
        convolution = torch.where(pairs, band.double(), torch.nan).expand(-1, 3, -1, -1)
        terms = torch.where(pairs, torch.randn_like(weights(2)), torch.inf)
        layers = [{"convolution": convolution}, {"attention": weights(4)}]
        built.append(([*layers, {"attention": weights(2), "content_to_position": terms}], is_token))
    return built


def studied(inputs: list[tuple[list[dict[str, Tensor]], Tensor]], *, skip_first: bool = False) -> MapStudy:
    study = MapStudy(MAX_LENGTH)
    for maps, is_token in inputs:
        is_counted = is_token.clone()
        is_counted[:, 0] &= not skip_first
        study.add(maps, is_counted)
    return study


def plain(
    inputs: list[tuple[list[dict[str, Tensor]], Tensor]], name: str, layers: list[int], *, first: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return average map, mass and mean by distance, computed by loops over texts, heads, queries and keys."""
    cells, counts = np.zeros((MAX_LENGTH, MAX_LENGTH)), np.zeros((MAX_LENGTH, MAX_LENGTH))
    sums, pairs, queries = np.zeros(2 * MAX_LENGTH - 1), np.zeros(2 * MAX_LENGTH - 1), 0
    heads = sum(inputs[0][0][layer][name].shape[1] for layer in layers)
    for maps, is_token in inputs:
        for text in range(len(is_token)):
            length = int(is_token[text].sum())
            for query in range(first, length):
                queries += 1
                for key in range(first, length):
                    counts[query, key] += 1
                    pairs[query - key + MAX_LENGTH - 1] += 1
                    for layer in layers:
                        value = float(maps[layer][name][text, :, query, key].sum()) / heads
                        cells[query, key] += value
                        sums[query - key + MAX_LENGTH - 1] += value
    return cells / np.maximum(counts, 1), sums / queries, sums / np.maximum(pairs, 1)


@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize(
    ("name", "layers", "layer"),
    [
        ("attention", [1, 2], None),
        ("attention", [2], 2),
        ("convolution", [0], None),
        ("content_to_position", [2], 2),
    ],
)
def test_study_equals_loops(name: str, layers: list[int], layer: int | None, skip_first: bool) -> None:
    inputs = batches()
    study = studied(inputs, skip_first=skip_first)
    average, mass, mean = plain(inputs, name, layers, first=int(skip_first))
    np.testing.assert_allclose(study.average(name, layer), average, atol=1e-12)
    np.testing.assert_allclose(study.mass(name, layer), mass, atol=1e-12)
    np.testing.assert_allclose(study.mean(name, layer), mean, atol=1e-12)
    for own in layers if name == "attention" else ():
        kept = [maps[own][name][..., int(skip_first) :, int(skip_first) :] > 0 for maps, _ in inputs]  # NaN is not
        support = sum(part.sum((0, 2, 3)) for part in kept) / study.queries
        np.testing.assert_allclose(study.support_by_head(name, own), support)
    near = mass[np.abs(study.distances) <= 4].sum() / mass.sum()
    if name != "content_to_position":
        assert study.near(name, layer) == pytest.approx(near)


def test_attention_mass_sums_to_one_and_heads_weigh_equally() -> None:
    study = studied(batches())
    assert study.names == ["attention", "convolution", "content_to_position"]
    assert study.heads("attention") == [0, 4, 2]
    assert (study.texts, study.queries) == (5, 19)
    assert study.mass("attention").sum() == pytest.approx(1)
    assert study.uniform_mass.sum() == pytest.approx(1)
    by_head = study.near_by_head("attention", 1) + study.near_by_head("attention", 2)
    assert study.near("attention") == pytest.approx(np.mean(by_head))
    with pytest.raises(ValueError, match="no map"):
        study.mass("attention", 0)


def test_uniform_share_equals_uniform_attention() -> None:
    study = MapStudy(MAX_LENGTH)
    for _, is_token in batches():
        uniform = torch.where(is_token[:, None], 1 / is_token.sum(-1)[:, None, None], 0.0)
        study.add([{"attention": uniform[:, None].expand(-1, 1, is_token.shape[1], -1)}], is_token)
    assert study.near("attention") == pytest.approx(study.uniform_near)
    np.testing.assert_allclose(study.mass("attention"), study.uniform_mass, atol=1e-7)
    assert study.uniform_near == pytest.approx((19 - 12 / 8) / 19)  # in the text of 8 tokens 12 pairs are further apart


def test_kernels_are_recovered() -> None:
    kernels = studied(batches()).kernels("convolution")
    assert kernels.distances == [-1, 0, 1]
    np.testing.assert_allclose(kernels.layers[0], np.full((3, 3), 1 / 3), atol=1e-7)
    assert [len(layer) for layer in kernels.layers] == [3, 0, 0]


def test_non_finite_map_is_rejected() -> None:
    with pytest.raises(InputError, match="attention map of layer 2 has non-finite values"):
        MapStudy(2).add([{}, {"attention": torch.full((1, 1, 2, 2), torch.nan)}], torch.ones(1, 2, dtype=torch.bool))


@pytest.fixture
def model(corpus_folder: Path) -> Model:
    tokenizer = Tokenizer.load(corpus_folder)
    built = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, width=16, heads=2, max_length=24))
    built.tokenizer = tokenizer
    return built


TEXTS = ["the smith forges", "a traveller carries the letter by the river before sunrise " * 4, "x", "my neighbour"]


def test_batching_and_order_do_not_change_the_study(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout is off, and the training mode of the model is restored."""
    model.train()
    done: list[int] = []
    together = study_texts(model, TEXTS, length=20, progress=done.append)
    assert model.training
    assert sum(done) == len(TEXTS)
    monkeypatch.setattr("bertsmith.report.study.MAX_BATCH", 1)
    alone = study_texts(model, TEXTS[::-1], length=20)
    assert together.queries == alone.queries
    np.testing.assert_allclose(together.average("attention"), alone.average("attention"), atol=1e-7)
    np.testing.assert_allclose(together.mass("attention", 1), alone.mass("attention", 1), atol=1e-7)
    assert together.mass("attention").sum() == pytest.approx(1, abs=1e-6)


def test_batch_size_is_bounded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("bertsmith.report.study.MAX_WEIGHTS", 2 * 2 * 4 * 20**2 * 2)  # two texts of the full length
    study_texts(model, [TEXTS[1]] * 5, length=20, progress=sizes.append)
    assert max(sizes) <= 2
    assert sum(sizes) == 5


def test_special_tokens_can_be_left_out(model: Model) -> None:
    with_special, without = (study_texts(model, TEXTS, length=20, counts_special=flag) for flag in (True, False))
    assert with_special.queries - without.queries == 2 * len(TEXTS)
    assert without.mass("attention").sum() < with_special.mass("attention").sum()
    with pytest.raises(InputError, match="no tokens to count"):
        study_texts(model, ["", " "], length=20, counts_special=False)
    with pytest.raises(InputError, match="--length is 25; allowed: 3 to 24"):
        study_texts(model, TEXTS, length=25)


def convolution_study() -> MapStudy:
    """Return the study of a model without attention."""
    study = MapStudy(MAX_LENGTH)
    convolution = torch.eye(MAX_LENGTH).expand(3, 2, MAX_LENGTH, MAX_LENGTH) * 0.5
    study.add([{"convolution": convolution}] * 2, torch.ones(3, MAX_LENGTH, dtype=torch.bool))
    return study


def test_page_shows_every_model_and_map(model: Model, tmp_path: Path) -> None:
    mixed = studied(batches())
    first = study_texts(model, TEXTS, length=MAX_LENGTH)
    pure = convolution_study()
    assert main_map(pure) == "convolution"
    studies = {"</script><i>": first, "mixed": mixed, "pure": pure}
    page = render_study_page(studies, {"texts": "4"})
    check_page(page, scripts=2)
    for expected in ("Attention by distance", "Convolution by distance", "Scores by distance: mixed"):
        assert expected in page
    assert page.count("Average kernel per head") == 2
    assert f"{100 * mixed.near('attention'):.1f} %" in page
    match = re.search(r'class="study-data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data = json.loads(match.group(1))
    packed = data["models"][1]["attention"]
    assert packed["scales"][1] == 0  # the first layer lacks the map
    levels = np.frombuffer(base64.b64decode(packed["levels"]), np.uint8).reshape(-1, MAX_LENGTH, MAX_LENGTH)
    assert len(levels) == 3
    shares = (levels[2] / 255) ** 2 * packed["scales"][3]
    np.testing.assert_allclose(shares, mixed.average("attention", 2), atol=0.01)
    pytest.importorskip("matplotlib")
    save_study_picture(studies, tmp_path / "study.png")
    save_study_picture({"pure": pure}, tmp_path / "pure.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_headline_follows_the_shares() -> None:
    mixed = studied(batches())
    near, uniform = f"{100 * mixed.near('attention'):.0f}\u00a0%", f"{100 * mixed.uniform_near:.0f}\u00a0%"
    uniform = f"uniform weights would put {uniform} there."
    assert headline({"m": mixed}) == f"m puts {near} of its attention within ±4 tokens; {uniform}"
    assert headline({"a": mixed, "b": mixed}).startswith(f"Within ±4 tokens, a puts {near} of its attention and b puts")


def test_statistics_are_json_ready_and_complete() -> None:
    statistics = json.loads(json.dumps(asdict(study_statistics(studied(batches())))))
    assert statistics["distances"] == list(range(-7, 8))
    attention = statistics["maps"]["attention"]
    assert set(attention["near_by_layer"]) == {"2", "3"}
    assert len(attention["near_by_head"]["2"]) == len(attention["support_by_head"]["2"]) == 4
    assert sum(attention["mass_by_distance"]) == pytest.approx(1, abs=1e-6)
    assert statistics["maps"]["convolution"]["kernels"]["distances"] == [-1, 0, 1]
    assert statistics["maps"]["content_to_position"]["kind"] == "scores"
