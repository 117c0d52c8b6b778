"""Tables printed by benchmarks/encoder.py."""

from collections.abc import Callable

from encoder_bars import NAMES, best_peer, rate
from encoder_candidates import OURS
from encoder_timing import KINDS, Row

_LABEL, _CELL = 36, 16


def print_tables(rows: list[Row], columns: list[str]) -> None:
    """Print speed, memory, share of peak throughput and ratios for every family."""
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        at = [column for column in columns if any(row["length"] == column for row in own)]
        _print_grid(f"{family}: thousand tokens/s, training / inference", own, at, "rate", lambda rate: f"{rate:.0f}")
        if any("train_gib" in row or "infer_gib" in row for row in own):
            _print_grid("peak memory, GiB", own, at, "gib", lambda gib: f"{gib:.1f}")
        _print_grid("share of peak bf16 throughput", own, at, "share", lambda share: f"{share:.1%}")
        _print_ratios(rows, family, at)


def _print_grid(title: str, rows: list[Row], columns: list[str], metric: str, text: Callable[[float], str]) -> None:
    print(f"\n{title:<{_LABEL}}" if len(title) < _LABEL else f"\n{title}\n{'':<{_LABEL}}", end="")
    print("".join(f"{column:>{_CELL}}" for column in columns))
    cells = {(row["name"], row["length"]): row for row in rows}
    for name in dict.fromkeys(row["name"] for row in rows):
        line = f"{name:<{_LABEL}}"
        for column in columns:
            row = cells.get((name, column), {})
            line += f"{' / '.join(_cell(row, kind, metric, text) for kind in KINDS):>{_CELL}}"
        print(line)


def _cell(row: Row, kind: str, metric: str, text: Callable[[float], str]) -> str:
    if f"{kind}_{metric}" in row:
        return text(row[f"{kind}_{metric}"])
    return "error" if f"{kind}_error" in row else "–"


def _print_ratios(rows: list[Row], family: str, columns: list[str]) -> None:
    print(f"\n{'our best, training / inference':<{_LABEL}}" + "".join(f"{column:>{_CELL}}" for column in columns))
    lines: dict[str, list[str]] = {"to the best other library": [], "to our BERT": []}
    fastest: list[str] = []
    for column in columns:
        to_peer, to_bert = [], []
        for kind in KINDS:
            own = rate(rows, kind, family=family, maker=OURS, length=column)
            peer = best_peer(rows, kind, family, column)
            bert = rate(rows, kind, family="bert", maker=OURS, length=column)
            to_peer.append(_ratio(own, None if peer is None else peer[f"{kind}_rate"]))
            to_bert.append(_ratio(own, bert))
            if peer is not None:
                fastest.append(f"{column} {NAMES[kind]}: {peer['name']}")
        lines["to the best other library"].append(" / ".join(to_peer))
        lines["to our BERT"].append(" / ".join(to_bert))
    for name, cells in lines.items():
        print(f"{name:<{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells))
    if fastest:
        print(f"best other libraries: {'; '.join(fastest)}")


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else "–"
