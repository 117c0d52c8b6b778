"""What the rows of benchmarks/encoder.py are held to: ratios to peers and to our own BERT, with the least wanted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log

from encoder_candidates import NO_ATTENTION, OURS
from encoder_timing import KINDS, Row

NAMES = {"train": "training", "infer": "inference"}


@dataclass(frozen=True)
class Bar:
    """A ratio of two speeds at one length."""

    what: str
    length: str
    kind: str
    wanted: float | None
    """None: a ratio that is told and not judged."""
    ratio: float | None
    """None: a row is missing."""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        if self.wanted is None:
            return ""
        return "ok" if self.ratio >= self.wanted else "missed"


def best(rows: Iterable[Row], kind: str, **is_like: str) -> Row | None:
    """The fastest of the rows with these values that ran."""
    found = [row for row in rows if f"{kind}_rate" in row and all(row[key] == value for key, value in is_like.items())]
    return max(found, key=lambda row: row[f"{kind}_rate"], default=None)


def rate(rows: Iterable[Row], kind: str, **is_like: str) -> float | None:
    """The tokens a millisecond of that row."""
    row = best(rows, kind, **is_like)
    return None if row is None else row[f"{kind}_rate"]


def best_peer(rows: Iterable[Row], kind: str, family: str, length: str) -> Row | None:
    """The fastest row of any peer."""
    peers = [row for row in rows if row["maker"] not in (OURS, NO_ATTENTION)]
    return best(peers, kind, family=family, length=length)


def bars(rows: list[Row], lengths: list[str]) -> list[Bar]:
    """Every bar at the lengths that were measured."""
    found: list[Bar] = []
    for length in lengths:
        for kind in KINDS:
            found += _bars_at(rows, length, kind)
    return found


def _bars_at(rows: list[Row], length: str, kind: str) -> Iterator[Bar]:
    def own(family: str) -> float | None:
        return rate(rows, kind, family=family, maker=OURS, length=length)

    def peer(family: str, maker: str, **is_like: str) -> float | None:
        return rate(rows, kind, family=family, maker=maker, length=length, **is_like)

    def bar(what: str, wanted: float | None, above: float | None, below: float | None) -> Bar:
        return Bar(what, length, kind, wanted, above / below if above and below else None)

    tokens = int(length)
    is_training = kind == "train"
    yield bar("BERT / transformers, its better mode", 1.3, own("bert"), peer("bert", "transformers"))
    if tokens in (512, 2048):
        wanted = 2.5 if is_training else 1.3
        flash = peer("deberta-v3", "disentangled-flash")
        yield bar("DeBERTa-v3 / disentangled-flash", wanted, own("deberta-v3"), flash)
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
"""What counts as the same speed."""


def print_bars(rows: list[Row], lengths: list[str]) -> None:
    """The table of bars, those of families of which nothing was measured left out."""
    told = [bar for bar in bars(rows, lengths) if bar.ratio is not None or _concerns(bar, rows)]
    print(f"\nbars\n{'':<44}{'length':>7}{'':>11}{'wanted':>8}{'measured':>10}")
    for bar in sorted(told, key=lambda bar: (bar.what, bar.kind, int(bar.length))):
        wanted = "" if bar.wanted is None else f"{bar.wanted:.2f}"
        ratio = "–" if bar.ratio is None else f"{bar.ratio:.2f}"
        print(f"{bar.what:<44}{bar.length:>7}{NAMES[bar.kind]:>11}{wanted:>8}{ratio:>10}  {bar.verdict}")
    for kind in KINDS:
        print(f"Performer is faster than our BERT, {NAMES[kind]}: {_crossing(rows, lengths, kind)}")


_FAMILIES = {"BERT": "bert", "DeBERTa-v3": "deberta-v3", "DeBERTa": "deberta", "ConvBERT": "convbert"}


def _concerns(bar: Bar, rows: list[Row]) -> bool:
    family = _FAMILIES.get(bar.what.split(" ")[0], "performer")
    return any(row["family"] == family and row["length"] == bar.length for row in rows)


def _crossing(rows: list[Row], lengths: list[str], kind: str) -> str:
    """From which length on Performer is faster than BERT, between two lengths by a straight line through logarithms."""
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
