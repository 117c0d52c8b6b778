"""The page of a study: average maps of one or more models side by side, mass by distance, shares, kernels."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.report import chart, kernels
from bertsmith.report.chart import Series, line_chart
from bertsmith.report.kernels import kernel_panel
from bertsmith.report.maps import NEAR, in_order, label
from bertsmith.report.page import facts_table, masthead, page, section
from bertsmith.report.study import MapStudy, main_map
from bertsmith.report.study_script import SCRIPT, STYLE

Studies = Mapping[str, MapStudy]
"""Studies of the same texts by the name of the model."""

MAPS_NOTE = (
    "Rows are queries, columns keys, by their place in the text. Each cell is the average over the texts that have "
    "both places, and over heads. Short texts share their weight out among few tokens, so the corner at the top left, "
    "which all texts have, is darker."
)
MASS_NOTE = (
    "The share of a query's weight that lies at each distance, query − key (positive: it looks back), averaged over "
    "all queries and heads. Queries near an end of the text lack some distances and add nothing to them."
)
EVEN_NOTE = "The curve “spread evenly” is what equal weights on all tokens would give."
SCORE_NOTE = "The average of each term of the score before the softmax, over the pairs of tokens at each distance."


def study_page(studies: Studies, facts: Mapping[str, str]) -> str:
    """The study as one self-contained HTML document."""
    models = list(studies)
    body = masthead("Attention study", ", ".join(models), headline(studies), lead=_lead(studies))
    together = " The models share one colour scale." if len(models) > 1 else ""
    body += section("Average maps", _explorer(studies), note=MAPS_NOTE + together)
    body += section(f"Share within ±{NEAR}", _shares_table(studies))
    names = in_order([name for study in studies.values() for name in study.names])
    for name in names:
        if not MAP_KINDS[name].is_score:
            having = {model: study for model, study in studies.items() if name in study.names}
            note = MASS_NOTE if MAP_KINDS[name].is_convolution else f"{MASS_NOTE} {EVEN_NOTE}"
            body += section(f"{label(name).capitalize()} by distance", _mass_charts(name, having), note=note)
    for model, study in studies.items():
        of = f": {model}" if len(studies) > 1 else ""
        terms = [name for name in study.names if MAP_KINDS[name].is_score]
        if terms:
            body += section(f"Scores by distance{of}", _score_chart(study, terms), note=SCORE_NOTE)
        for name in study.names:
            if MAP_KINDS[name].is_convolution:
                body += section(f"Average kernel per head{of}", kernel_panel(study.kernels(name)))
    if facts:
        body += section("Facts", facts_table(facts))
    title = f"{' and '.join(models)}: attention study"
    return page(title, body, style=chart.STYLE + kernels.STYLE + STYLE, script=SCRIPT)


def headline(studies: Studies) -> str:
    """The study in one sentence: how much of the weight each model keeps near."""
    shares = {
        model: (study, main_map(study)) for model, study in studies.items() if not MAP_KINDS[main_map(study)].is_score
    }
    if not shares:
        return "Scores of " + " and ".join(studies) + " by distance."
    even = {round(100 * study.even_near) for study, _ in shares.values()}
    rest = f"; spread evenly it would be {even.pop()}\u00a0%." if len(even) == 1 else "."
    if len(shares) == 1:
        ((model, (study, name)),) = shares.items()
        return f"{model} puts {100 * study.near(name):.0f}\u00a0% of its {label(name)} within ±{NEAR} tokens{rest}"
    told = [
        f"{model} puts {100 * study.near(name):.0f}\u00a0% of its {label(name)}"
        for model, (study, name) in shares.items()
    ]
    return f"Within ±{NEAR} tokens {' and '.join([', '.join(told[:-1]), told[-1]])}{rest}"


def _lead(studies: Studies) -> str:
    first = next(iter(studies.values()))
    tokens = " and ".join(dict.fromkeys(f"{study.queries:,}" for study in studies.values()))
    return f"Averages over {first.texts:,} texts, {tokens} tokens, at most {first.length} of each text."


def _explorer(studies: Studies) -> str:
    """The average maps side by side, with a choice of map and layer; drawn by the script."""
    names = in_order([name for study in studies.values() for name in study.names])
    data = {
        "length": max(study.length for study in studies.values()),
        "models": [{name: _packed(study, name) for name in study.names} for study in studies.values()],
    }
    packed = json.dumps(data).replace("<", "\\u003c")
    buttons = "".join(
        f'<button type="button" data-map="{escape(name)}">{escape(label(name).capitalize())}</button>' for name in names
    )
    layers = max(study.layers for study in studies.values())
    options = "".join(f'<option value="{layer}">layer {layer + 1}</option>' for layer in range(layers))
    figures = "".join(
        f'<figure class="panel"><figcaption>{escape(model)}</figcaption><div class="study-map">'
        '<canvas role="img" tabindex="0" aria-label="Average map; the arrow keys move the cell that is read out">'
        '</canvas></div><p class="study-readout" role="status"></p></figure>'
        for model in studies
    )
    one = "" if len(names) > 1 else " hidden"
    return f"""<div class="study">
<script type="application/json" class="study-data">{packed}</script>
<noscript><p class="note">The maps are drawn by JavaScript, which is switched off here.</p></noscript>
<div class="study-bar"><div class="study-names" role="group" aria-label="Map"{one}>{buttons}</div>
<label>Average over <select><option value="-1">all layers</option>{options}</select></label></div>
<div class="study-maps">{figures}</div>
<p class="study-scale"><span></span> <i></i> <span></span> <span></span></p>
</div>"""


def _packed(study: MapStudy, name: str) -> dict[str, object]:
    """The average maps of a name for the script: over all layers, then layer by layer, one byte a cell each.

    A weight is (level / 255)², a score (level − 128) / 127 of the average's own scale, its largest absolute value: most
    weights are small beside the largest, and the square keeps them apart.
    """
    has_scores, scales, levels = MAP_KINDS[name].is_score, [], []
    places: list[int | None] = [None, *range(len(study.heads(name)))]
    for layer in places:
        if layer is not None and not study.heads(name)[layer]:
            scales.append(0.0)
            continue
        average = study.average(name, layer)
        scale = float(np.abs(average).max()) or 1.0
        scales.append(scale)
        share = average / scale
        levels.append(128 + np.rint(127 * share) if has_scores else np.rint(255 * np.sqrt(share.clip(0))))
    data = np.stack(levels).astype(np.uint8).tobytes()
    return {"isScore": has_scores, "scales": scales, "levels": base64.b64encode(data).decode("ascii")}


def _shares_table(studies: Studies) -> str:
    """The share of every model and map within ±NEAR, in all and layer by layer."""
    layers = max(study.layers for study in studies.values())
    header = "".join(f'<th scope="col">{layer + 1}</th>' for layer in range(layers))
    rows = []
    for model, study in studies.items():
        for name in study.names:
            if MAP_KINDS[name].is_score:
                continue
            heads = study.heads(name)
            cells = "".join(
                _share_cell(study.near(name, layer) if layer < len(heads) and heads[layer] else None)
                for layer in range(layers)
            )
            rows.append(
                f'<tr><th scope="row">{escape(model)}</th><td>{escape(label(name))}</td>'
                f"{_share_cell(study.near(name), is_main=True)}{cells}</tr>"
            )
    # models with one tokenizer read the same tokens, and need one line
    even: dict[str, list[str]] = {}
    for model, study in studies.items():
        even.setdefault(_share_cell(study.even_near, is_main=True), []).append(model)
    for cell, models in even.items():
        name = ", ".join(models) if len(even) > 1 else ""
        rows.append(
            f'<tr class="even"><th scope="row">{escape(name)}</th><td>spread evenly</td>{cell}'
            f'<td colspan="{layers}"></td></tr>'
        )
    return (
        '<div class="panel study-table" tabindex="0" role="region" aria-label="Shares"><table><thead><tr>'
        f'<th scope="col">Model</th><th scope="col">Map</th><th scope="col">All layers</th>{header}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _share_cell(share: float | None, *, is_main: bool = False) -> str:
    if share is None:
        return "<td>–</td>"
    if is_main:
        return f'<td class="main">{100 * share:.1f} %</td>'
    return f'<td style="--share:{100 * share:.0f}%">{100 * share:.0f}</td>'


def _mass_charts(name: str, studies: Studies) -> str:
    curves = [Series(model, _points(study.distances, study.mass(name))) for model, study in studies.items()]
    first = next(iter(studies.values()))
    if MAP_KINDS[name].is_convolution:  # only its own distances; and its share within ±NEAR tells its width only
        reach = 1 + max(abs(tap) for study in studies.values() for tap in study.kernels(name).distances)
        curves = [Series(one.name, [point for point in one.points if abs(point[0]) <= reach]) for one in curves]
        narrow = line_chart(curves, x_label="query − key", y_label="share of the mass", height=220, from_zero=True)
        return f'<div class="panel">{narrow}</div>'
    even = Series("spread evenly", _points(first.distances, first.even_mass))
    large = line_chart([*curves, even], x_label="query − key", y_label="share of the mass", height=300, from_zero=True)
    shares = [
        Series(
            model,
            [(layer + 1.0, 100 * study.near(name, layer)) for layer, heads in enumerate(study.heads(name)) if heads],
        )
        for model, study in studies.items()
    ]
    small = line_chart(
        shares,
        x_label="layer",
        y_label=f"per cent within ±{NEAR}",
        reference=("spread evenly", 100 * first.even_near),
        height=220,
        from_zero=True,
    )
    return f'<div class="panel">{large}</div><div class="panel study-below">{small}</div>'


def _score_chart(study: MapStudy, terms: Sequence[str]) -> str:
    curves = [Series(label(name), _points(study.distances, study.mean(name))) for name in terms]
    return f'<div class="panel">{line_chart(curves, x_label="query − key", y_label="mean score", height=300)}</div>'


def _points(distances: np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
    return [(float(distance), float(value)) for distance, value in zip(distances, values, strict=True)]
