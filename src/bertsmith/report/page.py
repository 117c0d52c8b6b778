"""The HTML shell every report shares: one file, no network, light and dark, and the small builders used inside it."""

from collections.abc import Mapping
from html import escape

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --surface: #ffffff; --ink: #141920; --muted: #5a6572; --line: #e1e6ec; --accent: #1d5bbf;
  --wash: #e8effa;
  --series-1: #1d5bbf; --series-2: #d2601a; --series-3: #14806a; --series-4: #8246b8;
  --series-5: #b3306b; --series-6: #7a7316; --series-7: #1a8ba8; --series-8: #6b5442;
  --heat-low: #f2f5f9; --heat-middle: #5a93da; --heat-high: #0a2048;
  --diverging-low: #b8460e; --diverging-high: #164f9f;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0e1217; --surface: #151b22; --ink: #e8ecf1; --muted: #9aa6b3; --line: #28313b; --accent: #82b4f7;
  --wash: #1c2b40;
  --series-1: #6fa9f5; --series-2: #f39a5c; --series-3: #50c5a8; --series-4: #c29af0;
  --series-5: #f07aac; --series-6: #cfc55a; --series-7: #5cc8e4; --series-8: #c4a68c;
  --heat-low: #1a222c; --heat-middle: #3677c6; --heat-high: #e2f0ff;
  --diverging-low: #f08a4b; --diverging-high: #6fa9f5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--sans); overflow-wrap: anywhere; }
main { max-width: 1120px; margin: 0 auto; padding: clamp(28px, 6vw, 72px) clamp(16px, 4vw, 40px) 48px; }
h1, h2, h3, p, dl, dd, figure, pre, ol, ul { margin: 0; padding: 0; }
h1 { font-size: clamp(26px, 4.4vw, 40px); line-height: 1.16; letter-spacing: -.022em; font-weight: 650;
  text-wrap: balance; }
h2 { font-size: 20px; line-height: 1.3; letter-spacing: -.01em; font-weight: 640; }
.kind { color: var(--muted); font-size: 14px; margin-bottom: 12px; }
.kind b { color: var(--ink); font-weight: 600; }
.lead { color: var(--muted); font-size: clamp(16px, 2vw, 18px); margin-top: 14px; max-width: 46em; }
section { margin-top: clamp(36px, 5vw, 56px); }
.note { color: var(--muted); font-size: 14.5px; max-width: 50em; margin-top: 4px; }
.section-body { margin-top: 18px; }
.panel { background: var(--surface); border: 1px solid var(--line); border-radius: 12px;
  padding: clamp(14px, 2.4vw, 24px); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); column-gap: 40px; }
.facts div { display: flex; justify-content: space-between; gap: 16px; padding: 9px 0;
  border-bottom: 1px solid var(--line); }
.facts dt { color: var(--muted); flex: none; }
.facts dd { text-align: right; font-variant-numeric: tabular-nums; min-width: 0; }
pre { font: 13.5px/1.6 var(--mono); overflow-x: auto; overflow-wrap: normal; white-space: pre; }
button, select { font: inherit; color: inherit; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
footer { max-width: 1120px; margin: 0 auto; padding: 0 clamp(16px, 4vw, 40px) 40px; color: var(--muted);
  font-size: 13.5px; }
@media (prefers-reduced-motion: no-preference) { button, select { transition: background-color .12s,
  border-color .12s; } }
"""

# A reader may hold the page against this policy: with it, even a forgotten address could not be loaded.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """One self-contained HTML document; `title` is escaped, `body`, `style` and `script` are taken as they are."""
    script_element = f"<script>{script}</script>\n" if script else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<main>
{body}
</main>
<footer>Made by Bertsmith. This page is one file and loads nothing from elsewhere.</footer>
{script_element}</body>
</html>
"""


def masthead(kind: str, name: str, headline: str, *, lead: str = "") -> str:
    """The top of a page: what kind of report, of what, its one headline sentence and an optional quieter line."""
    of = f" · <b>{escape(name)}</b>" if name else ""
    below = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<header><p class="kind">{escape(kind)}{of}</p><h1>{escape(headline)}</h1>{below}</header>'


def section(heading: str, body: str, *, note: str = "") -> str:
    """A headed part of a page; heading and note are escaped, the body is HTML."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section><h2>{escape(heading)}</h2>{below}<div class="section-body">{body}</div></section>'


def facts_table(facts: Mapping[str, str]) -> str:
    """Names and values in as many columns as the window is wide enough for; nothing when there are no facts."""
    if not facts:
        return ""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'
