"""Targets for benchmarks/encoder.py: speed ratios to other libraries and to our BERT."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log

from encoder_candidates import NO_ATTENTION, OURS
from encoder_timing import KINDS, Row

NAMES = {"train": "training", "infer": "inference"}


@dataclass(frozen=True)
class Bar:
    """A ratio of two speeds at one length, with its target."""

    name: str
    length: str
    kind: str
    target: float | None
    """Minimum ratio; None if the ratio is only reported."""
    ratio: float | None
    """None if a row is missing."""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        if self.target is None:
            return ""
        return "ok" if self.ratio >= self.target else "missed"


def best(rows: Iterable[Row], kind: str, **values: str) -> Row | None:
    """Return the fastest successful row with these values."""
    matching = [
        row for row in rows if f"{kind}_rate" in row and all(row[key] == value for key, value in values.items())
    ]
    return max(matching, key=lambda row: row[f"{kind}_rate"], default=None)


def rate(rows: Iterable[Row], kind: str, **values: str) -> float | None:
    """Return the tokens per millisecond of the fastest row with these values."""
    row = best(rows, kind, **values)
    return None if row is None else row[f"{kind}_rate"]


def best_peer(rows: Iterable[Row], kind: str, family: str, length: str) -> Row | None:
    """Return the fastest row of another library."""
    peers = [row for row in rows if row["maker"] not in (OURS, NO_ATTENTION)]
    return best(peers, kind, family=family, length=length)


def bars(rows: list[Row], lengths: list[str]) -> list[Bar]:
    """Return every target at the measured lengths."""
    return [bar for length in lengths for kind in KINDS for bar in _bars_at(rows, length, kind)]


def _bars_at(rows: list[Row], length: str, kind: str) -> Iterator[Bar]:
    def own(family: str) -> float | None:
        return rate(rows, kind, family=family, maker=OURS, length=length)

    def peer(family: str, maker: str, **values: str) -> float | None:
        return rate(rows, kind, family=family, maker=maker, length=length, **values)

    def bar(name: str, target: float | None, above: float | None, below: float | None) -> Bar:
        return Bar(name, length, kind, target, above / below if above and below else None)

    tokens = int(length)
    is_training = kind == "train"
    yield bar("BERT / transformers, its better mode", 1.3, own("bert"), peer("bert", "transformers"))
    if tokens in (512, 2048):
        target = 2.5 if is_training else 1.3
        flash = peer("deberta-v3", "disentangled-flash")
        yield bar("DeBERTa-v3 / disentangled-flash", target, own("deberta-v3"), flash)
    if tokens == 512:
        yield bar("DeBERTa-v3 / our BERT", 0.6, own("deberta-v3"), own("bert"))
    yield bar("DeBERTa v1 / our v3", _SAME, own("deberta"), own("deberta-v3"))
    if tokens == 512:
        compiled = peer("convbert", "transformers", mode="compiled")
        yield bar("ConvBERT / transformers compiled", 1.6 if is_training else None, own("convbert"), compiled)
        yield bar("ConvBERT / our BERT", 1.0, own("convbert"), own("bert"))
    eager, compiled = (peer("performer", "performer-pytorch", mode=mode) for mode in ("eager", "compiled"))
    if is_training or eager is not None:
        yield bar("Performer / performer-pytorch", 2.5 if is_training else None, own("performer"), eager)
    if compiled is not None:
        yield bar("Performer / performer-pytorch compiled", None, own("performer"), compiled)
    if tokens >= 8192:
        yield bar("Performer / no attention", 1 / 1.25, own("performer"), peer("performer", NO_ATTENTION))
    if tokens >= 4096:
        yield bar("Performer / our BERT", 1.0, own("performer"), own("bert"))


_SAME = 0.95
"""Minimum ratio of two speeds that count as equal."""


def print_bars(rows: list[Row], lengths: list[str]) -> None:
    """Print the targets of all measured families."""
    shown = [bar for bar in bars(rows, lengths) if bar.ratio is not None or _concerns(bar, rows)]
    print(f"\ntargets\n{'':<44}{'length':>7}{'':>11}{'target':>8}{'measured':>10}")
    for bar in sorted(shown, key=lambda bar: (bar.name, bar.kind, int(bar.length))):
        target = "" if bar.target is None else f"{bar.target:.2f}"
        ratio = "–" if bar.ratio is None else f"{bar.ratio:.2f}"
        print(f"{bar.name:<44}{bar.length:>7}{NAMES[bar.kind]:>11}{target:>8}{ratio:>10}  {bar.verdict}")
    for kind in KINDS:
        print(f"Performer is faster than our BERT, {NAMES[kind]}: {_crossing(rows, lengths, kind)}")


_FAMILIES = {"BERT": "bert", "DeBERTa-v3": "deberta-v3", "DeBERTa": "deberta", "ConvBERT": "convbert"}


def _concerns(bar: Bar, rows: list[Row]) -> bool:
    family = _FAMILIES.get(bar.name.split(" ")[0], "performer")
    return any(row["family"] == family and row["length"] == bar.length for row in rows)


def _crossing(rows: list[Row], lengths: list[str], kind: str) -> str:
    """Describe the length above which Performer is faster than BERT, interpolated in log-log space."""
    ratios: list[tuple[int, float]] = []
    for length in sorted(map(int, lengths)):
        performer, bert = (
            rate(rows, kind, family=family, maker=OURS, length=str(length)) for family in ("performer", "bert")
        )
        if performer and bert:
            ratios.append((length, performer / bert))
    if not ratios:
        return "not measured"
    if ratios[-1][1] < 1:
        return f"at no length up to {ratios[-1][0]:,} ({ratios[-1][1]:.2f} there)"
    slower = [index for index, (_, ratio) in enumerate(ratios) if ratio < 1]
    if not slower:
        return f"at every length from {ratios[0][0]:,} on"
    (before, low), (after, high) = ratios[slower[-1] : slower[-1] + 2]
    share = -log(low) / (log(high) - log(low))
    return f"from about {exp(log(before) + share * log(after / before)):,.0f} tokens on"
