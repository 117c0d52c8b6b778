"""Report page of an elastic model."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_pages import HOSTILE, Outline, check_page

import bertsmith
from bertsmith.layers.subnet import Subnet
from bertsmith.models.model import Model
from bertsmith.report.charts import heat_colour
from bertsmith.report.elastic import (
    MAX_TOKENS,
    ElasticReport,
    cheapest_with,
    compare_heads,
    mean_score,
    narrowest_widths,
    render_elastic_page,
    retained_share,
    shallowest_depths,
)
from bertsmith.report.maps import compute_maps
from bertsmith.shrinking.elastic_metadata import ElasticMetadata
from bertsmith.shrinking.importance import Orders, rewire
from bertsmith.text.tokenizer import Tokenizer

WORDS = ["the", "smith", "hammers", "all", "day", "and", "night"]


def record(
    widths: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0),
    depths: tuple[float, ...] = (0.5, 0.75, 1.0),
    heads: tuple[int, ...] = (4, 4, 4, 4),
    **changes: Any,
) -> ElasticMetadata:
    """Return a record with scores that rise with the size and importances that rise with the head index."""
    grid = [
        {"width": width, "depth": depth, "score": 60 + 20 * width + 10 * depth, "parameters": int(1e6 * width * depth)}
        | {"flops": 4e9 * width * depth, "latency_ms": 1 + 8 * width * depth}
        for depth in depths
        for width in widths
    ]
    plain = {"metric": "accuracy", "teacher_score": 92.0, "depth_rule": "keep_last", "length": 17, "grid": grid}
    plain |= {"head_scores": [[0.5 + head for head in range(count)] for count in heads]}
    plain |= {"head_order": [list(reversed(range(count))) for count in heads], "neuron_order": [[0]] * len(heads)}
    return ElasticMetadata.parse({**plain, **changes}, source="test")


def rows(names: tuple[str, ...]) -> list[dict[str, Any]]:
    training: list[dict[str, Any]] = [{"kind": "training", "step": step, "loss": 1 / step} for step in (1, 2, 3, 4)]
    held_out = {"kind": "held_out", "metric": "accuracy", "loss": 0.5}
    return training + [
        {**held_out, "step": step, "score": 70.0 + step, **dict.fromkeys(names, 60.0 + 3 * step)} for step in (2, 4)
    ]


def report(of: ElasticMetadata, **changes: Any) -> ElasticReport:
    return ElasticReport(**{"title": "run", "model": "base", "task": "classification", "record": of, **changes})


def full(**changes: Any) -> ElasticReport:
    stages = {
        "width": rows(("width 0.25 depth 1", "width 1 depth 1")),
        "depth": rows(("width 0.25 depth 0.5", "width 1 depth 1")),
    }
    defaults = {"facts": {"Data": "desk"}, "commands": ("bertsmith fit run",), "settings": "seed = 1", "stages": stages}
    return report(record(), **{**defaults, **changes})


def check(text: str) -> Outline:
    return check_page(text, scripts=1)


def cells(outline: Outline) -> list[dict[str, str | None]]:
    return [
        attributes
        for tag, attributes in outline.elements
        if tag == "td" and "--share" in (attributes.get("style") or "")
    ]


def test_every_size_has_score_and_costs() -> None:
    of = record()
    outline = check(render_elastic_page(report(of)))
    assert len(cells(outline)) == 12
    for size in of.grid:
        assert f"{size.score:.2f}{100 * size.score / 92:.1f}\u00a0%{size.parameters / 1e6:.2f} M" in outline.visible
        assert f"{size.latency_ms:.2f} ms" in outline.visible
    assert "Half the size keeps 92.4\u00a0% of the score" in outline.visible  # 85 of 92
    assert "base, fine-tuned for classification, has accuracy 92.00." in outline.visible
    assert "The sub-network of width 1, depth 0.5 has 85.00 with 50\u00a0% of the parameters" in outline.visible
    assert "The smallest (width 0.25, depth 0.5) has 70.00 with 12\u00a0% of the parameters" in outline.visible
    shares = [float((attributes["style"] or "").partition(":")[2]) for attributes in cells(outline)]
    assert shares[0] == 1.0  # the widest and deepest comes first and is the best
    assert shares[-1] == 0.0
    assert shares == sorted(shares[:3], reverse=True) + shares[3:]


@pytest.mark.parametrize(
    ("scores", "headline"),
    [
        ((92.0, 91.08), "Half the size keeps 99.0\u00a0% of the score"),
        ((90.0, 92.5), "Half the size keeps all of the score"),
        ((90.0, math.nan), "Accuracy"),  # an undefined score keeps nothing
    ],
)
def test_headline_names_the_share_of_the_score_at_half_the_size(scores: tuple[float, float], headline: str) -> None:
    of = record(widths=(0.5, 1.0), depths=(1.0,))
    pairs = zip(of.grid, reversed(scores), strict=True)  # the narrow one comes first
    outline = check(
        render_elastic_page(report(record(grid=[{**size.plain(), "score": score} for size, score in pairs])))
    )
    assert headline in outline.visible
    assert outline.count("div", "alert") == math.isnan(scores[1])


def test_headline_counts_operations_if_no_size_has_half_the_parameters() -> None:
    of = record(widths=(0.5, 1.0), depths=(1.0,))
    grid = [{**size.plain(), "parameters": 600_000 + int(400_000 * size.width)} for size in of.grid]
    assert (
        "Half the operations keep 87.0\u00a0% of the score"
        in check(render_elastic_page(report(record(grid=grid)))).visible
    )
    grid = [{**size.plain(), "flops": 1e9 + size.width} for size in record(grid=grid).grid]
    assert "80\u00a0% of the size keeps 87.0\u00a0%" in check(render_elastic_page(report(record(grid=grid)))).visible


def test_degenerate_model_is_an_alert_without_shares_in_the_headline() -> None:
    outline = check(render_elastic_page(report(record(), alerts=["degenerate: always the same answer"])))
    assert outline.count("div", "alert") == 1
    assert "of the score" not in outline.visible
    assert f"Accuracy {mean_score(record()):.2f} on average over 12 sizes of one model" in outline.visible


def test_small_differences_look_small() -> None:
    close = [{**size.plain(), "score": 90 + size.width} for size in record().grid]
    shares = [
        float((attributes["style"] or "").partition(":")[2])
        for attributes in cells(Outline(render_elastic_page(report(record(grid=close)))))
    ]
    assert min(shares) > 0.9


def test_markers_lie_at_cost_and_score() -> None:
    outline = Outline(render_elastic_page(report(record(teacher_score=90.0))))
    circles = [attributes for tag, attributes in outline.elements if tag == "circle"]
    assert len(circles) == 24  # by latency and by operations
    largest = circles[0]
    assert float((largest["cx"] or "").rstrip("%")) == pytest.approx(90.0)  # 9 ms on an axis up to 10
    assert float(largest["cy"] or "") == pytest.approx(0.0)  # the best score is the top of the chart
    radii = [float(attributes["r"] or "") for attributes in circles[:4]]
    assert radii == sorted(radii, reverse=True)  # wider sub-networks have larger markers
    assert outline.count("path", "curve") == 6
    assert "width 1, depth 1: 90.00 at 9 latency, ms" in outline.titles


def test_training_curves_follow_the_logs() -> None:
    outline = check(render_elastic_page(full()))
    labels = [str(attributes.get("aria-label")) for tag, attributes in outline.elements if tag == "svg"]
    assert any("mean from 72 to 74; width 1, depth 1 from 66 to 72; width 0.25, depth 1 from" in one for one in labels)
    assert any("width 0.25, depth 0.5 from 66 to 72" in one for one in labels)
    for words in ("Widths: training loss", "Widths and depths: Accuracy on dev", "bertsmith fit run", "seed = 1"):
        assert words in outline.visible


@pytest.mark.parametrize("stages", [{}, {"width": [], "depth": []}, {"width": [{"kind": "notice", "step": 1}]}])
def test_page_without_logs(stages: dict[str, Any]) -> None:
    outline = check(render_elastic_page(full(stages=stages)))
    assert "Training curves" not in outline.visible
    assert "All sizes" in outline.visible


@pytest.mark.parametrize(
    "of",
    [
        record(widths=(1.0,)),
        record(depths=(1.0,)),
        record(widths=(1.0,), depths=(1.0,)),
        record(heads=(1,)),
        record(heads=(2, 6, 3)),
        record(teacher_score=0.0),
        record(teacher_score=-12.5, metric="pearson"),
        record(teacher_score=math.nan),
        record(head_scores=[[0.0] * 4] * 4),
        record(head_scores=[[math.nan, 1.0, 2.0, 3.0]] * 4),
        record(grid=[{**size.plain(), "score": math.nan} for size in record().grid]),
        record(grid=[size.plain() for size in record().grid[3:]]),
    ],
    ids=[
        "width",
        "depth",
        "one",
        "layer",
        "uneven",
        "nought",
        "negative",
        "nan",
        "zero",
        "nan head",
        "nan score",
        "gap",
    ],
)
def test_page_accepts_any_record(of: ElasticMetadata) -> None:
    outline = check(render_elastic_page(full(record=of)))
    heads = sum(len(scores) for scores in of.head_scores)
    assert outline.visible.count("Importance") == 1
    assert (
        sum("of the layer's sum, rank" in (attributes.get("title") or "") for _, attributes in outline.elements)
        == heads
    )
    assert ("Narrowest width" in outline.visible) == (len(of.grid) > 1)
    assert ("By latency" in outline.visible) == (len(of.grid) > 1)


def test_hostile_names_are_escaped() -> None:
    hostile = full(
        title=HOSTILE,
        model=HOSTILE,
        task=HOSTILE,
        record=record(metric=HOSTILE),
        order=HOSTILE,
        facts={HOSTILE: HOSTILE},
    )
    hostile_parts = {"commands": (HOSTILE,), "settings": HOSTILE, "stages": {HOSTILE: rows(())}}
    outline = check(render_elastic_page(ElasticReport(**{**vars(hostile), **hostile_parts})))
    assert outline.count("script") == 1  # the script of the page itself
    assert outline.count("b") == 1 + 12  # the name in the masthead, and the scores
    assert outline.visible.count("alert('x')") > 8


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 12])
def test_narrowest_widths_match_the_cuts(heads: int) -> None:
    order = np.random.default_rng(heads).permutation(heads).tolist()
    of = record(heads=(heads,), head_order=[order])
    (narrowest,) = narrowest_widths(of)
    for width in (0.25, 0.5, 0.75, 1.0):
        remaining = [number for number in range(heads) if narrowest[number] <= width]
        count = max(1, math.floor(heads * width + 0.5))
        assert sorted(order[:count]) == remaining


@pytest.mark.parametrize(
    ("rule", "shallowest"), [("keep_last", [0.75, 0.5, 1.0, 0.5]), ("drop_last", [0.5, 0.75, 0.5, 1.0])]
)
def test_shallowest_depths_follow_the_depth_rule(rule: str, shallowest: list[float]) -> None:
    assert shallowest_depths(record(depth_rule=rule)) == shallowest
    outline = Outline(render_elastic_page(report(record(depth_rule=rule))))
    titles = [
        str(attributes.get("title"))
        for tag, attributes in outline.elements
        if "layer" in (attributes.get("class") or "")
    ]
    assert [one for one in titles if one != "None"] == [
        f"layer {number}: kept down to depth {depth:g}" for number, depth in enumerate(shallowest, start=1)
    ]


def test_heads_kept_longest_are_darkest() -> None:
    text = render_elastic_page(report(record()))
    shades = {
        title: style
        for style, title in re.findall(r'style="background:([^"]+)" title="layer 1, head (\d: kept[^"]+)"', text)
    }
    assert shades["4: kept down to width 0.25"] == heat_colour(1.0)
    assert shades["1: kept down to width 1"] == heat_colour(0.0)
    assert len(set(shades.values())) == 4


def test_retained_share_requires_a_positive_score() -> None:
    assert retained_share(record(), 46.0) == 0.5
    assert retained_share(record(teacher_score=0.0), 46.0) is None
    assert retained_share(record(teacher_score=-1.0), 46.0) is None


def test_cheapest_sub_network_that_is_good_enough() -> None:
    good = cheapest_with(record(), 0.9)
    assert good is not None
    assert (good.width, good.depth) == (1.0, 0.5)  # width 0.75 at full depth is as good, but 50 % more expensive
    assert cheapest_with(record(), 1.5) is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "a", "##a"]
    (Path(folder) / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return Tokenizer.load(Path(folder))


def tiny(tokenizer: Tokenizer, name: str = "bert-tiny") -> Model:
    sizes = {"vocabulary": 64, "width": 32, "layers": 4, "heads": 4, "max_length": 32}
    model = bertsmith.build(bertsmith.preset(name, **sizes), seed=0).eval()
    model.tokenizer = tokenizer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that attention is not nearly uniform
    return model


def test_heads_are_compared_by_their_index_before_rewiring(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    text = " ".join(WORDS)
    _, before = compute_maps(model, text)
    orders = [torch.randperm(4, generator=torch.Generator().manual_seed(layer)) for layer in range(4)]
    rewire(model, Orders(tuple(orders), (torch.arange(model.encoder.units[0].neurons),) * 4))
    of = record(widths=(0.5, 1.0), head_order=[order.tolist() for order in orders])
    comparison = compare_heads(model, of, text)
    assert comparison is not None
    assert [layer for layer, _ in comparison.layers] == [1, 3]
    _, small = compute_maps(bertsmith.extract(model, Subnet(width=0.5, depth=0.5)), text)
    for position, (layer, pairs) in enumerate(comparison.layers):
        assert [pair.index for pair in pairs] == orders[layer][:2].tolist()
        for head, pair in enumerate(pairs):
            np.testing.assert_allclose(pair.whole, before["attention"][layer][pair.index], atol=1e-5)
            np.testing.assert_allclose(pair.small, small["attention"][position][head], atol=1e-6)
    assert len(comparison.whole_statistics) == 16
    assert len(comparison.small_statistics) == 4
    outline = check(render_elastic_page(report(of, heads=comparison)))
    assert "mean entropy" in outline.visible
    assert f"head {orders[1][0] + 1}" in outline.visible
    first = comparison.layers[0][1][0]
    assert f"entropy {first.whole_statistics.entropy:.2f} → {first.small_statistics.entropy:.2f}" in outline.visible
    assert "of the weight is on separators" in outline.visible


def test_long_texts_are_cut_to_their_beginning(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    for text in (" ".join(WORDS * 20), "a" * 90):
        comparison = compare_heads(model, record(), text)
        assert comparison is not None
        assert 3 <= len(comparison.tokens) <= MAX_TOKENS


def test_no_comparison_without_text_sizes_or_finite_weights(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    assert compare_heads(model, record(), "  ") is None
    assert compare_heads(model, record(widths=(1.0,), depths=(1.0,)), "the smith") is None
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    assert compare_heads(model, record(), "the smith") is None
