"""Render the jinja2 templates: every page is one self-contained file without network access, in light and dark."""

from functools import cache
from importlib.resources import files
from itertools import pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bertsmith.errors import shorten

SIZE_TOLERANCE = 0.1  # relative difference to a fraction that is named in words


def render(template: str, **context: object) -> str:
    """Render a template with typed records and plain values; everything except charts is escaped."""
    return _environment().get_template(template).render(**context)


def read_asset(name: str) -> str:
    """Return a style sheet or script of templates/."""
    return (files("bertsmith.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bertsmith.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = lambda name: Markup(read_asset(name))
    environment.filters |= {
        "fmt": format,
        "megabytes": format_megabytes,
        "duration": format_duration,
        "shorten": shorten,
    }
    return environment


def format_duration(seconds: float) -> str:
    """Format a time in its two largest units: 42 s, 3 min 5 s, 2 h 14 min, 3 d 4 h."""
    whole = round(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, size), (smaller, smaller_size) in pairwise(units):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def format_megabytes(size: float) -> str:
    """Format a size in megabytes: one decimal, more for small sizes.

    >>> format_megabytes(86.64), format_megabytes(0.0314)
    ('86.6', '0.0314')
    """
    return f"{size:.1f}" if size >= 10 else f"{size:.3g}"


def format_size_share(share: float) -> str:
    """Format a share of a size, with words for the usual ones.

    >>> format_size_share(0.52), format_size_share(0.33), format_size_share(0.4)
    ('half the size', 'a third of the size', '40\xa0% of the size')
    """
    for words, fraction in {"half": 1 / 2, "a third of": 1 / 3, "a quarter of": 1 / 4}.items():
        if abs(share / fraction - 1) <= SIZE_TOLERANCE:
            return f"{words} the size"
    return f"{100 * share:.0f}\u00a0% of the size"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: 1 token, 1,024 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
