"""Report page of an attention study: average maps of one or more models, mass by distance, kernels."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.report.attention import KernelTable, kernel_table
from bertsmith.report.charts import Point, Series, line_chart
from bertsmith.report.maps import NEAR, label, order_names
from bertsmith.report.page import render
from bertsmith.report.study import MapStudy, main_map

Studies = Mapping[str, MapStudy]
"""Studies of the same texts, by model name."""


@dataclass(frozen=True)
class ShareRow:
    """The share of a map within ±NEAR: over all layers and by layer, in percent; None if a layer lacks the map."""

    model: str
    map: str
    total: float
    layers: Sequence[float | None]


@dataclass(frozen=True)
class ChartSection:
    """A heading with charts of one map or model."""

    heading: str
    note: str
    charts: Sequence[str]


@dataclass(frozen=True)
class KernelSection:
    """The kernels of one convolution map."""

    heading: str
    table: KernelTable


def render_study_page(studies: Studies, facts: Mapping[str, str]) -> str:
    """Return the study as one self-contained HTML document."""
    names = order_names([name for study in studies.values() for name in study.names])
    return render(
        "study.html",
        models=list(studies),
        headline=headline(studies),
        lead=_lead(studies),
        data=_explorer_data(studies),
        maps=[(name, label(name).capitalize()) for name in names],
        layers=max(study.layers for study in studies.values()),
        near=NEAR,
        shares=_share_rows(studies),
        uniform_shares=_uniform_shares(studies),
        charts=[*_mass_sections(studies, names), *_score_sections(studies)],
        kernels=_kernel_sections(studies),
        facts=facts,
    )


def headline(studies: Studies) -> str:
    """Return the study in one sentence: the share of the weight of each model within ±NEAR tokens."""
    main = {model: (study, main_map(study)) for model, study in studies.items()}
    shares = {model: pair for model, pair in main.items() if not MAP_KINDS[pair[1]].is_score}
    if not shares:
        return "Scores of " + " and ".join(studies) + " by distance."
    uniform = {round(100 * study.uniform_near) for study, _ in shares.values()}
    rest = f"; uniform weights would put {uniform.pop()}\u00a0% there." if len(uniform) == 1 else "."
    clauses = [
        f"{model} puts {100 * study.near(name):.0f}\u00a0% of its {label(name)}"
        for model, (study, name) in shares.items()
    ]
    if len(clauses) == 1:
        return f"{clauses[0]} within ±{NEAR} tokens{rest}"
    return f"Within ±{NEAR} tokens, {', '.join(clauses[:-1])} and {clauses[-1]}{rest}"


def _lead(studies: Studies) -> str:
    first = next(iter(studies.values()))
    tokens = " and ".join(dict.fromkeys(f"{study.queries:,}" for study in studies.values()))
    return f"Averages over {first.texts:,} texts with {tokens} tokens, at most {first.length} tokens of each text."


def _explorer_data(studies: Studies) -> dict[str, object]:
    """Return the average maps for templates/study.js."""
    return {
        "length": max(study.length for study in studies.values()),
        "models": [{name: _pack(study, name) for name in study.names} for study in studies.values()],
    }


def _pack(study: MapStudy, name: str) -> dict[str, object]:
    """Pack the average over all layers and then the average of each layer, one byte per cell.

    A weight is (level / 255)² and a score (level − 128) / 127 times the scale of the average, its largest absolute
    value. The square keeps small weights distinct. A layer without the map has scale 0 and no bytes.
    """
    is_score, scales, levels = MAP_KINDS[name].is_score, [], []
    layers: list[int | None] = [None, *range(len(study.heads(name)))]
    for layer in layers:
        if layer is not None and not study.heads(name)[layer]:
            scales.append(0.0)
            continue
        average = study.average(name, layer)
        scale = float(np.abs(average).max()) or 1.0
        scales.append(scale)
        share = average / scale
        levels.append(128 + np.rint(127 * share) if is_score else np.rint(255 * np.sqrt(share.clip(0))))
    data = np.stack(levels).astype(np.uint8).tobytes()
    return {"isScore": is_score, "scales": scales, "levels": base64.b64encode(data).decode("ascii")}


def _share_rows(studies: Studies) -> list[ShareRow]:
    rows = []
    layers = max(study.layers for study in studies.values())
    for model, study in studies.items():
        for name in study.names:
            if MAP_KINDS[name].is_score:
                continue
            heads = [*study.heads(name), *[0] * layers]
            by_layer = [100 * study.near(name, layer) if heads[layer] else None for layer in range(layers)]
            rows.append(ShareRow(model, label(name), 100 * study.near(name), by_layer))
    return rows


def _uniform_shares(studies: Studies) -> list[tuple[str, str]]:
    """Return models and the share of uniform weights; models with an equal share, as of one tokenizer, share a row."""
    models: dict[str, list[str]] = {}
    for model, study in studies.items():
        models.setdefault(f"{100 * study.uniform_near:.1f} %", []).append(model)
    return [(", ".join(names) if len(models) > 1 else "", share) for share, names in models.items()]


def _mass_sections(studies: Studies, names: Sequence[str]) -> list[ChartSection]:
    note = (
        "Share of a query's weight at each distance, query − key (positive distances look back), averaged over all "
        "queries and heads. Queries near the ends of a text have no tokens at some distances."
    )
    sections = []
    for name in names:
        if MAP_KINDS[name].is_score:
            continue
        with_map = {model: study for model, study in studies.items() if name in study.names}
        heading = f"{label(name).capitalize()} by distance"
        if MAP_KINDS[name].is_convolution:
            sections.append(ChartSection(heading, note, [_convolution_chart(name, with_map)]))
        else:
            uniform = " The curve “uniform” is the result of uniform weights."
            sections.append(ChartSection(heading, note + uniform, _attention_charts(name, with_map)))
    return sections


def _convolution_chart(name: str, studies: Studies) -> str:
    """Draw the mass by distance, up to the width of the kernels."""
    reach = 1 + max(abs(tap) for study in studies.values() for tap in study.kernels(name).distances)
    curves = [
        Series(model, [point for point in _points(study.distances, study.mass(name)) if abs(point[0]) <= reach])
        for model, study in studies.items()
    ]
    return line_chart(curves, x_label="query − key", y_label="share of the mass", height=220, y_from_zero=True)


def _attention_charts(name: str, studies: Studies) -> list[str]:
    """Draw the mass by distance, and the share within ±NEAR by layer."""
    first = next(iter(studies.values()))
    curves = [Series(model, _points(study.distances, study.mass(name))) for model, study in studies.items()]
    curves.append(Series("uniform", _points(first.distances, first.uniform_mass)))
    shares = [
        Series(
            model,
            [(layer + 1.0, 100 * study.near(name, layer)) for layer, heads in enumerate(study.heads(name)) if heads],
        )
        for model, study in studies.items()
    ]
    uniform = 100 * first.uniform_near
    return [
        line_chart(curves, x_label="query − key", y_label="share of the mass", height=300, y_from_zero=True),
        line_chart(
            shares,
            x_label="layer",
            y_label=f"percent within ±{NEAR}",
            reference=(f"uniform {uniform:.2f}", uniform),
            height=220,
            y_from_zero=True,
            label_at_start=True,
        ),
    ]


def _score_sections(studies: Studies) -> list[ChartSection]:
    note = "Mean of each term of the attention score (before the softmax) over all token pairs at each distance."
    sections = []
    for model, study in studies.items():
        terms = [name for name in study.names if MAP_KINDS[name].is_score]
        if terms:
            curves = [Series(label(name), _points(study.distances, study.mean(name))) for name in terms]
            chart = line_chart(curves, x_label="query − key", y_label="mean score", height=300)
            sections.append(ChartSection(_heading("Scores by distance", model, studies), note, [chart]))
    return sections


def _kernel_sections(studies: Studies) -> list[KernelSection]:
    return [
        KernelSection(_heading("Average kernel per head", model, studies), kernel_table(study.kernels(name)))
        for model, study in studies.items()
        for name in study.names
        if MAP_KINDS[name].is_convolution
    ]


def _heading(heading: str, model: str, studies: Studies) -> str:
    return f"{heading}: {model}" if len(studies) > 1 else heading


def _points(distances: np.ndarray, values: np.ndarray) -> list[Point]:
    return [(float(distance), float(value)) for distance, value in zip(distances, values, strict=True)]
