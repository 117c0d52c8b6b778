// Width and depth: sliders that snap to the available sizes, a table of recorded scores (widths in rows and depths in
// columns, as in the reports), and the cost of a size.

import { make, median, milliseconds, short, signed } from "./dom.js";

export const MIN_RUNS = 9;  // timed runs of a size before its latency is compared

const faster = ratio => (Math.abs(Math.log(ratio)) < 0.05 ? "as fast as the whole model"
  : ratio > 1 ? `${ratio.toFixed(1)} × faster` : `${(1 / ratio).toFixed(1)} × slower`);
const share = value => `${+(100 * value).toFixed(1)} %`;

export class Sizes {
  constructor(panel, model, work, onChange) {
    const sizes = model.sizes[work];
    Object.assign(this, { panel, model, sizes, onChange, seconds: {} });
    this.width = this.depth = 1;
    panel.hidden = sizes.kind === "one";
    if (panel.hidden) { panel.replaceChildren(); return; }
    this.sliders = { width: this.slider("width"), depth: this.slider("depth") };
    this.metrics = make("dl", { class: "metrics" });
    const sliders = make("div", { class: "sliders" }, this.sliders.width.element, this.sliders.depth.element,
      make("p", { class: "quiet", textContent: sizes.kind === "recorded"
        ? "All sizes share one set of weights and were trained together."
        : "This model is not elastic: smaller sizes show its predictions without the removed heads and layers." }));
    const table = sizes.kind === "recorded" ? this.table() : null;
    panel.replaceChildren(make("h2", { textContent: "Model size" }), make("div",
      { class: table ? "size with-table" : "size" }, sliders, table), this.metrics);
    this.show();
  }

  get hasOne() { return this.sizes.kind === "one"; }
  get isWhole() { return this.width === 1 && this.depth === 1; }
  get key() { return `${this.width} ${this.depth}`; }
  recorded(width = this.width, depth = this.depth) {
    return this.sizes.grid?.find(one => one.width === width && one.depth === depth);
  }

  slider(name) {
    const values = this.sizes[`${name}s`], output = make("output", { for: `size-${name}` });
    const input = make("input", { type: "range", id: `size-${name}`, min: 0, max: values.length - 1, step: 1,
      value: values.length - 1 });
    input.disabled = values.length < 2;
    input.addEventListener("input", () => this.choose({ [name]: values[+input.value] }));
    const [units, total] = name === "width" ? ["heads", this.model.heads] : ["layers", this.model.layers];
    const label = make("label", { for: input.id }, name === "width" ? "Width" : "Depth", output);
    return { element: make("div", { class: "slider" }, label, input), show: value => {
      const count = Math.max(1, Math.floor(total * value + 0.5));
      input.value = values.indexOf(value);
      output.textContent = `${share(value)} · ${count} of ${total} ${units}`;
      input.setAttribute("aria-valuetext", output.textContent);
    } };
  }

  // Select a size; if the grid lacks it, the nearest one with the same value on the changed axis.
  choose(change) {
    Object.assign(this, change);
    if (this.sizes.grid && !this.recorded()) {
      const fixed = "width" in change ? "width" : "depth", free = fixed === "width" ? "depth" : "width";
      const candidates = this.sizes.grid.filter(one => one[fixed] === this[fixed]);
      const distance = one => Math.abs(one[free] - this[free]);
      this[free] = candidates.sort((a, b) => distance(a) - distance(b))[0][free];
    }
    this.show();
    this.onChange();
  }

  table() {
    const { widths, depths, grid, metric } = this.sizes;
    const scores = grid.map(one => one.score), lowest = Math.min(...scores), highest = Math.max(...scores);
    this.cells = [];
    const columns = [...depths].reverse(), heading = text => make("th", { scope: "col", textContent: text });
    const rows = [...widths].reverse().map(width => make("tr", {},
      make("th", { scope: "row", textContent: share(width) }), ...columns.map(depth => {
        const size = this.recorded(width, depth);
        if (!size) return make("td", {});
        const shade = (size.score - lowest) / (highest - lowest || 1);
        const button = make("button", { type: "button", textContent: size.score.toFixed(1), set: { "--share": shade },
          "aria-label": `Width ${share(width)}, depth ${share(depth)}: ${metric} ${size.score.toFixed(1)}`,
          onclick: () => this.choose({ width, depth }) });
        this.cells.push({ button, width, depth });
        return make("td", {}, button);
      })));
    return make("div", { class: "grid-scores" }, make("table", {},
      make("caption", { textContent: `${metric} on dev` }),
      make("thead", {}, make("tr", {}, make("th", { textContent: "width ↓ depth →" }), ...columns.map(depth =>
        heading(share(depth))))), make("tbody", {}, ...rows)));
  }

  show() {
    this.sliders.width.show(this.width);
    this.sliders.depth.show(this.depth);
    for (const { button, width, depth } of this.cells || [])
      button.setAttribute("aria-pressed", width === this.width && depth === this.depth);
    this.result = null;
    this.showMetrics(null);
  }

  // Latencies depend on the text, so a new text clears them.
  forget() { this.seconds = {}; this.result = null; }
  addTime(width, depth, seconds) { (this.seconds[`${width} ${depth}`] ||= []).push(seconds); }
  runs(width, depth) { return this.seconds[`${width} ${depth}`]?.length ?? 0; }
  medianTime(key) { return this.seconds[key]?.length ? median(this.seconds[key]) : null; }

  // Before a text is timed: the latencies measured when the model was made, or nothing to tell yet.
  recordedSpeed() {
    const size = this.recorded(), whole = this.recorded(1, 1);
    return size && whole ? `about ${faster(whole.latency_ms / size.latency_ms)}` : "measuring …";
  }

  // Show cost and score of this size relative to the whole model. `result` has the parameters of the answering network
  // and the comparison of its answer; null keeps the last result.
  showMetrics(result) {
    if (this.panel.hidden) return;
    this.result = result ??= this.result;
    const { parameters } = this.model, time = this.medianTime(this.key), wholeTime = this.medianTime("1 1");
    const count = result?.parameters ?? this.recorded()?.parameters ?? (this.isWhole ? parameters : null);
    const score = this.recorded()?.score, wholeScore = this.recorded(1, 1)?.score;
    const isTimed = Math.min(this.runs(this.width, this.depth), this.runs(1, 1)) >= MIN_RUNS;
    const change = (value, from) => (this.isWhole || value === null || from === null ? ""
      : `${signed(100 * (value / from - 1), 0)} %`);
    const metric = (name, value, difference, title = "") => make("div",
      { title, class: name === "Prediction" ? "compared" : "" }, make("dt", { textContent: name }),
      make("dd", {}, make("b", { textContent: value }), make("span", { textContent: difference })));
    this.metrics.replaceChildren(
      metric("Latency of this text", time === null ? "–" : milliseconds(time),
        this.isWhole ? "" : isTimed ? faster(wholeTime / time) : this.recordedSpeed(),
        `Median of ${this.runs(this.width, this.depth)} runs; the difference is relative to the whole model`),
      metric("Parameters", count === null ? "–" : short(count), change(count, parameters)),
      ...(score === undefined ? [] : [metric(`${this.sizes.metric} on dev`, score.toFixed(1),
        this.isWhole || wholeScore === undefined ? "" : signed(score - wholeScore, 1))]),
      ...(this.isWhole ? [] : [metric("Prediction",
        result?.same === undefined ? "–" : result.same ? "the same" : "differs",
        result?.same === undefined ? "" : result.same ? "as the whole model" : result.difference)]));
  }
}
