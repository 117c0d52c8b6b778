"""Maps of a text: weights and scores, layers with different maps, kernels, the explorer page and its data, pictures."""

import base64
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_pages import check_page

from bertsmith.errors import InputError
from bertsmith.report.attention import Explorer, describe_heads, render_attention_page
from bertsmith.report.maps import Maps, average_kernels, head_statistics, map_statistics, text_maps
from bertsmith.report.pictures import save_attention_picture

TOKENS = ["[CLS]", "</script><b>", "é", "日本", "$x", "[SEP]"]


def attention(heads: int, length: int = 6) -> np.ndarray:
    weights = np.exp(np.random.default_rng(heads).normal(size=(heads, length, length)))
    return weights / weights.sum(-1, keepdims=True)


def banded(kernels: np.ndarray, length: int = 6) -> np.ndarray:
    """Return the maps of convolution heads by a plain loop; tap t is at key = query + t − (taps − 1) / 2."""
    heads, kernel_size = kernels.shape
    maps = np.zeros((heads, length, length))
    for head in range(heads):
        for query in range(length):
            for tap in range(kernel_size):
                key = query + tap - kernel_size // 2
                if 0 <= key < length:
                    maps[head, query, key] = kernels[head, tap]
    return maps


def mixed(length: int = 6) -> dict[str, list[np.ndarray]]:
    """Return three layers: convolution, convolution and attention with different heads, attention with a score term."""
    none = np.zeros((0, length, length))
    terms = np.random.default_rng(3).normal(size=(2, length, length)) * 4
    return {
        "convolution": [banded(np.full((3, 3), 1 / 3), length), banded(np.full((1, 3), 1 / 3), length), none],
        "attention": [none, attention(4, length), attention(2, length)],
        "content_to_position": [none, none, terms],
    }


def decode(page: str) -> dict[str, dict[str, object]]:
    match = re.search(r'class="attention-data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data = json.loads(match.group(1))
    for one in data["maps"]:
        levels = np.frombuffer(base64.b64decode(one["levels"]), dtype=np.uint8)
        shape = (sum(one["heads"]), len(data["tokens"]), len(data["tokens"]))
        values = (levels.astype(float) - 128) / 127 * one["scale"] if one["isScore"] else levels / 255
        one["values"] = values.reshape(shape)
    assert data["tokens"] == TOKENS
    return {one["label"]: one for one in data["maps"]}


def test_packed_maps_decode_to_the_input() -> None:
    maps = mixed()
    decoded = decode(render_attention_page(TOKENS, maps, title="t", facts={}))
    assert list(decoded) == ["attention", "convolution", "content to position"]
    for name, layers in maps.items():
        one = decoded[name.replace("_", " ")]
        assert one["heads"] == [len(layer) for layer in layers]
        scale = np.abs(layers[2]).max() if name == "content_to_position" else 1
        assert one["scale"] == pytest.approx(scale)
        assert one["isScore"] == (name == "content_to_position")
        assert np.abs(one["values"] - np.concatenate(layers)).max() < scale / 250  # type: ignore[operator]


def test_page_has_a_button_a_scale_and_a_table_for_every_map() -> None:
    page = render_attention_page(TOKENS, mixed(), title="t", facts={})
    check_page(page, scripts=2)
    assert re.findall(r'<button type="button" data-map="\d">([^<]+)<', page) == [
        "attention",
        "convolution",
        "content to position",
    ]
    assert len(re.findall(r'class="attention-scale" data-map="\d"( hidden)?', page)) == 3
    rows = [table.count("<tr data-layer") for table in page.split('class="panel attention-table"')[1:]]
    assert rows == [6, 4, 2]
    assert "signed scores" in page
    assert "Average kernel per head" in page
    assert "3 layers of 2–4 attention and 1–3 convolution heads on 6 tokens." in page
    plain = render_attention_page(TOKENS, {"attention": [attention(4)]}, title="t", facts={})
    assert '<button type="button" data-map' not in plain
    assert "Average kernel" not in plain
    assert "1 layer of 4 heads on 6 tokens." in plain


@pytest.mark.parametrize("name", ["convolution", "content_to_content"])
def test_models_without_attention_have_a_page_and_statistics(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    maps: Maps = {name: mixed()[name if name == "convolution" else "content_to_position"]}
    assert "<tr data-layer" in render_attention_page(TOKENS, maps, title="t", facts={})
    (one,) = text_maps(TOKENS, maps)
    statistics = map_statistics(TOKENS, one)
    assert [len(layer) for layer in statistics] == one.heads
    assert set(vars(next(layer for layer in statistics if layer)[0])) == (
        {"mean", "std", "lowest", "highest"} if one.is_score else {"entropy", "distance", "near", "first", "separator"}
    )
    save_attention_picture(TOKENS, one, tmp_path / "grid.png", title="$x^$")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_score_terms_add_no_heads() -> None:
    terms = {"attention": [attention(2)], "content_to_position": [attention(2) - 1]}
    assert describe_heads(text_maps(TOKENS, terms)) == "2 heads"


@pytest.mark.parametrize("sign", [1, -1])
def test_depthwise_kernels_are_scores(sign: int) -> None:
    shown = text_maps(TOKENS, {"attention": [attention(2)], "depthwise_convolution": [sign * attention(3)]})
    assert [(one.is_score, one.is_convolution) for one in shown] == [(False, False), (True, True)]
    assert describe_heads(shown) == "2 attention and 3 depthwise convolution heads"


def test_kernels_are_trimmed_to_their_taps() -> None:
    expected = np.random.default_rng(5).normal(size=(2, 3))
    none = np.zeros((0, 6, 6))
    (one,) = text_maps(TOKENS, {"depthwise_convolution": [banded(expected), none]})
    kernels = average_kernels(one)
    assert kernels.distances == [-1, 0, 1]
    # distances are query − key, taps are at key − query
    np.testing.assert_allclose(kernels.layers[0], expected[:, ::-1], atol=1e-6)
    assert kernels.layers[1].shape == (0, 3)


def test_causal_kernel_looks_back_only() -> None:
    causal = np.eye(6) * 0.25 + np.eye(6, k=-1) * 0.5 + np.eye(6, k=-2) * 0.125
    kernels = average_kernels(text_maps(TOKENS, {"convolution": [causal[None]]})[0])
    assert kernels.distances == [0, 1, 2]
    np.testing.assert_allclose(kernels.layers[0], [[0.25, 0.5, 0.125]])


def test_statistics_of_known_heads() -> None:
    tokens = ["[CLS]", "a", "b", "c", "d", "[SEP]"]
    identity, to_first, uniform = np.eye(6), np.zeros((6, 6)), np.full((6, 6), 1 / 6)
    to_first[:, 0] = 1
    first, second, third = head_statistics(tokens, [np.stack([identity, to_first, uniform])])[0]
    assert (first.entropy, first.distance, first.near) == (0, 0, 1)
    assert (second.first, second.separator, second.distance) == (1, 0, 2.5)
    assert second.near == pytest.approx(5 / 6)  # the last token is five positions away
    assert third.entropy == pytest.approx(math.log(6))
    assert third.separator == pytest.approx(1 / 6)


def test_separator_column_requires_a_separator() -> None:
    for tokens, has_separator in ((["a", "[SEP]"], True), (["a", "b"], False)):
        (table,) = Explorer.from_arrays(tokens, {"attention": [attention(1, 2)]}).tables
        assert ("On separator" in table.headings) == has_separator


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({"attention": [np.ones((1, 3, 3))]}, "for 2 tokens"),
        ({"attention": [np.ones((2, 2))]}, "is not"),
        ({"attention": [np.full((1, 2, 2), np.nan)]}, "not finite"),
        ({"attention": [np.zeros((0, 2, 2))]}, "no map"),
        ({}, "no map"),
    ],
)
def test_invalid_maps_are_rejected(maps: dict[str, list[np.ndarray]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Explorer.from_arrays(["a", "b"], maps)


def test_weights_outside_their_range_are_rejected() -> None:
    with pytest.raises(ValueError, match="'attention' holds weights below 0 or above 1"):
        text_maps(["a", "b"], {"attention": [np.full((1, 2, 2), 1.5)]})
    (rounded,) = text_maps(["a", "b"], {"attention": [np.full((1, 2, 2), 1.004)]})
    assert rounded.layers[0].max() == 1


def test_picture_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.colors", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    (one,) = text_maps(["a"], {"attention": [np.ones((1, 1, 1))]})
    with pytest.raises(InputError, match=re.escape("pip install 'bertsmith[report]'")):
        save_attention_picture(["a"], one, tmp_path / "grid.png", title="")
    assert not list(tmp_path.iterdir())


def test_page_of_a_base_model_is_small() -> None:
    maps = {"attention": [attention(12, 40)] * 12}
    page = render_attention_page(["token"] * 40, maps, title="base", facts={})
    assert len(page.encode()) < 1_500_000
    assert check_page(page, scripts=2).count("tr") == 1 + 12 * 12
