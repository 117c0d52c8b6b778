"""The look of the explorer: style of the pages that hold one."""

STYLE = """
.attention-panes { display: grid; gap: 20px; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 900px) { .attention-panes { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); } }
.attention-panes > .panel { display: flex; flex-direction: column; }
.attention-grid { display: grid; align-items: center; }
.attention-grid > span, .attention-grid > .layer { color: var(--muted); font-size: 11.5px; line-height: 1;
  text-align: center;
  font-variant-numeric: tabular-nums; }
.attention-grid button { padding: 0; border: 0; background: none; cursor: pointer; border-radius: 3px; min-width: 0; }
.attention-grid > .layer { padding: 4px 0; }
.attention-grid > .layer:hover, .attention-grid > .layer[aria-pressed=true] { color: var(--accent);
  background: var(--wash); }
.attention-grid canvas { display: block; width: 100%; aspect-ratio: 1; border-radius: 3px; }
.attention-grid button:hover canvas { box-shadow: 0 0 0 1.5px var(--muted); }
.attention-grid button[aria-pressed=true] canvas { box-shadow: 0 0 0 2px var(--surface), 0 0 0 4px var(--accent); }
.attention-bar { display: flex; flex-wrap: wrap; gap: 10px 14px; align-items: center; margin-bottom: 16px;
  font-size: 14px; }
.attention-bar label { display: flex; gap: 7px; align-items: center; color: var(--muted); }
.attention-bar select { color: var(--ink); background: var(--surface); border: 1px solid var(--line);
  border-radius: 7px; padding: 4px 6px; }
.attention-views { display: flex; margin-left: auto; border: 1px solid var(--line); border-radius: 7px;
  overflow: hidden; }
.attention-views button { border: 0; background: none; padding: 4px 13px; cursor: pointer; color: var(--muted); }
.attention-views button[aria-pressed=true] { background: var(--wash); color: var(--accent); }
.attention-views button:focus-visible { outline-offset: -2px; }
.attention-stage canvas { display: block; }
.attention-map { cursor: crosshair; touch-action: pan-y; margin: 0 auto; }
.attention-readout { min-height: 1.6em; margin-top: 12px; font: 13.5px/1.6 var(--mono); }
.attention-lines { display: grid; grid-template-columns: minmax(0, auto) minmax(48px, 1fr) minmax(0, auto);
  max-width: 440px;
  width: 100%; margin: 0 auto; font: clamp(11.5px, calc(var(--row) - 3px), 13.5px)/var(--row) var(--mono); }
.attention-lines button, .attention-lines div > span { display: block; width: 100%; height: var(--row);
  padding: 0 7px; border: 0; background: none;
  border-radius: 4px; white-space: pre; overflow: hidden; text-overflow: ellipsis; font: inherit; }
.attention-lines button { text-align: right; cursor: pointer; transition: none; }
.attention-lines button[aria-pressed=true] { background: var(--accent); color: var(--surface); }
.attention-scale { display: flex; align-items: center; gap: 8px; margin-top: auto; padding-top: 16px;
  color: var(--muted);
  font-size: 13px; line-height: 1.6; white-space: nowrap; }
.attention-scale span { white-space: normal; }
.attention-scale i { flex: 0 1 120px; height: 9px; border-radius: 3px;
  background: linear-gradient(to right, var(--heat-low), var(--heat-middle), var(--heat-high)); }
.attention-scale i.signed { background: linear-gradient(to right, var(--diverging-low), var(--heat-low),
  var(--diverging-high)); }
.attention [hidden] { display: none; }
.attention-maps { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 14px; }
.attention-maps button { border: 1px solid var(--line); border-radius: 7px; background: var(--surface);
  padding: 4px 13px; cursor: pointer; color: var(--muted); font-size: 14px; }
.attention-maps button::first-letter { text-transform: uppercase; }
.attention-maps button[aria-pressed=true] { background: var(--wash); color: var(--accent);
  border-color: var(--accent); }
.attention-kernels { font-size: 15px; font-weight: 600; margin: 24px 0 10px; }
.attention-table { margin-top: 20px; max-height: 380px; overflow: auto; padding: 0; }
.attention-table table { border-collapse: collapse; width: 100%; min-width: 720px; table-layout: fixed;
  font-size: 14px; font-variant-numeric: tabular-nums; }
.attention-table th { position: sticky; top: 0; background: var(--surface); padding: 0; text-align: right;
  font-weight: 500; box-shadow: 0 1px var(--line); }
.attention-table th button { border: 0; background: none; padding: 11px 14px; cursor: pointer; color: var(--muted);
  white-space: nowrap; }
.attention-table th button::after { content: "↕"; display: inline-block; width: 1em; margin-left: 3px; opacity: .4; }
.attention-table th[aria-sort] button { color: var(--ink); }
.attention-table th[aria-sort] button::after { opacity: 1; }
.attention-table th[aria-sort=ascending] button::after { content: "↑"; }
.attention-table th[aria-sort=descending] button::after { content: "↓"; }
.attention-table td { padding: 5px 32px 5px 14px; text-align: right; border-top: 1px solid var(--line);
  white-space: nowrap; }
.attention-table th:first-child, .attention-table td:first-child { text-align: left; }
.attention-table td.share { background: linear-gradient(to right, var(--wash) calc(var(--share) * 1%), transparent 0)
  left / calc(100% - 18px) 100% no-repeat; }
.attention-table td button { border: 0; background: none; padding: 0; cursor: pointer; color: var(--accent); }
.attention-table tr.chosen { font-weight: 600; }
.attention-table tr.chosen td:first-child { box-shadow: inset 3px 0 var(--accent); }
"""
