"""A panel of small charts, the average kernel of every convolution head: layers down, heads across, taps inside."""

from bertsmith.report.maps import Kernels

STYLE = """
.kernels { overflow-x: auto; }
.kernels table { border-collapse: separate; border-spacing: 8px 5px; margin: -5px -8px; }
.kernels th, .kernels td { padding: 0; color: var(--muted); font-size: 11.5px; line-height: 1; font-weight: 400;
  text-align: center; font-variant-numeric: tabular-nums; }
.kernels th { min-width: 1.5em; }
.kernels td { min-width: 44px; width: 92px; }
.kernels .taps { display: flex; justify-content: space-between; }
.kernels svg { display: block; width: 100%; height: 38px; background: var(--heat-low); border-radius: 3px; }
.kernels rect { fill: var(--series-1); }
.kernels rect.below { fill: var(--diverging-low); }
.kernels .zero { stroke: var(--muted); stroke-width: 1; vector-effect: non-scaling-stroke; }
.kernels-note { color: var(--muted); font-size: 13px; margin-top: 12px; }
"""

NOTE = (
    "Layers down, heads across. Each bar is a tap, placed by its distance, query − key: the token itself is at 0, "
    "positive distances look back."
)
HEIGHT = 40


def kernel_panel(kernels: Kernels) -> str:
    """The panel as HTML; all bars are drawn on one scale, which is stated."""
    layers = [(index, layer) for index, layer in enumerate(kernels.layers) if len(layer)]
    highest = max(max(float(layer.max()) for _, layer in layers), 0.0)
    lowest = min(min(float(layer.min()) for _, layer in layers), 0.0)
    lowest = lowest if lowest < -1e-9 else 0.0
    most = max(len(layer) for _, layer in layers)
    heads = "".join(f'<th scope="col">{head + 1}</th>' for head in range(most))
    rows = [f"<tr><th></th>{heads}</tr>"]
    for index, layer in layers:
        charts = [
            _bars(kernels.distances, [float(tap) for tap in kernel], lowest, highest, f"layer {index + 1}, head {head}")
            for head, kernel in enumerate(layer, 1)
        ]
        rows.append(f'<tr><th scope="row">{index + 1}</th>{"".join(f"<td>{chart}</td>" for chart in charts)}</tr>')
    ends = f"<span>{_signed(kernels.distances[0])}</span><span>{_signed(kernels.distances[-1])}</span>"
    taps = f'<td><div class="taps">{ends}</div></td>' * most
    rows.append(f'<tr aria-hidden="true"><th></th>{taps}</tr>')
    scale = f"Bars go from {lowest:.2g} to {highest:.2g} in every chart."
    return (
        f'<div class="panel"><div class="kernels" tabindex="0" role="region" aria-label="Average kernel of every head">'
        f"<table>{''.join(rows)}</table></div>"
        f'<p class="kernels-note">{NOTE} {scale}</p></div>'
    )


def _signed(distance: int) -> str:
    return f"−{-distance}" if distance < 0 else str(distance)


def _bars(distances: list[int], kernel: list[float], lowest: float, highest: float, name: str) -> str:
    height = HEIGHT / ((highest - lowest) or 1.0)
    zero = highest * height
    bars = "".join(
        f'<rect class="{"below" if tap < 0 else "above"}" x="{10 * place + 1}" width="8" '
        f'y="{min(zero, zero - tap * height):.1f}" height="{abs(tap) * height:.1f}"/>'
        for place, tap in enumerate(kernel)
    )
    line = f'<line class="zero" x1="0" x2="{10 * len(kernel)}" y1="{zero:.1f}" y2="{zero:.1f}"/>' if lowest < 0 else ""
    told = ", ".join(f"{_signed(distance)}: {tap:.3f}" for distance, tap in zip(distances, kernel, strict=True))
    return (
        f'<svg viewBox="0 0 {10 * len(kernel)} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{name}"><title>{name}: {told}</title>{bars}{line}</svg>'
    )
