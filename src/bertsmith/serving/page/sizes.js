// Width and depth: sliders that snap to the sizes there are, the recorded scores as a table, and what a size costs.

import { make, median, milliseconds, short, signed } from "./dom.js";

export const RUNS = 9;  // of a size, before its time is compared

const share = value => `${+(100 * value).toFixed(1)} %`;

export class Sizes {
  constructor(place, model, changed) {
    const { sizes } = model;
    Object.assign(this, { place, model, sizes, changed, seconds: {}, isSmall: false });
    this.width = this.depth = 1;
    place.hidden = sizes.kind === "one";
    if (place.hidden) { place.replaceChildren(); return; }
    this.sliders = { width: this.slider("width"), depth: this.slider("depth") };
    this.figures = make("dl", { class: "figures" });
    const sliders = make("div", { class: "sliders" }, this.sliders.width.element, this.sliders.depth.element,
      make("p", { class: "quiet", textContent: sizes.kind === "recorded"
        ? "Every size was trained together with the others, in one set of weights."
        : "This model was not trained to be cut: smaller sizes show what is left of it." }));
    const table = sizes.kind === "recorded" ? this.table() : null;
    place.replaceChildren(make("h2", { textContent: "Size" }), make("div",
      { class: table ? "size with-table" : "size" }, sliders, table), this.figures);
    this.show();
  }

  get isWhole() { return this.width === 1 && this.depth === 1; }
  get key() { return `${this.width} ${this.depth}`; }
  member(width = this.width, depth = this.depth) {
    return this.sizes.grid?.find(one => one.width === width && one.depth === depth);
  }

  slider(name) {
    const values = this.sizes[`${name}s`], shown = make("output", { for: `size-${name}` });
    const input = make("input", { type: "range", id: `size-${name}`, min: 0, max: values.length - 1, step: 1,
      value: values.length - 1 });
    input.disabled = values.length < 2;
    input.addEventListener("input", () => this.choose({ [name]: values[+input.value] }));
    const units = name === "width" ? ["head", this.model.heads] : ["layer", this.model.layers];
    const label = make("label", { for: input.id }, name === "width" ? "Width" : "Depth", shown);
    return { element: make("div", { class: "slider" }, label, input), show: value => {
      const kept = Math.max(1, Math.floor(units[1] * value + 0.5));
      input.value = values.indexOf(value);
      shown.textContent = `${share(value)} · ${kept} of ${units[1]} ${units[0]}s`;
      input.setAttribute("aria-valuetext", shown.textContent);
    } };
  }

  // The pair that was asked for, or, where the grid has holes, the nearest one with the value that was moved.
  choose(change) {
    Object.assign(this, change);
    if (this.sizes.grid && !this.member()) {
      const held = "width" in change ? "width" : "depth", free = held === "width" ? "depth" : "width";
      const fitting = this.sizes.grid.filter(one => one[held] === this[held]);
      this[free] = fitting.sort((a, b) => Math.abs(a[free] - this[free]) - Math.abs(b[free] - this[free]))[0][free];
    }
    this.show();
    this.changed();
  }

  table() {
    const { widths, depths, grid, metric } = this.sizes;
    const scores = grid.map(one => one.score), least = Math.min(...scores), most = Math.max(...scores);
    this.cells = [];
    const rows = [...depths].reverse().map(depth => make("tr", {}, make("th",
      { scope: "row", textContent: `depth ${share(depth)}` }),
      ...widths.map(width => {
        const member = this.member(width, depth);
        if (!member) return make("td", {});
        const shade = (member.score - least) / (most - least || 1);
        const button = make("button", { type: "button", textContent: member.score.toFixed(1), set: { "--share": shade },
          "aria-label": `Width ${share(width)}, depth ${share(depth)}: ${metric} ${member.score.toFixed(1)}`,
          onclick: () => this.choose({ width, depth }) });
        this.cells.push({ button, width, depth });
        return make("td", {}, button);
      })));
    return make("div", { class: "grid-scores" }, make("table", {},
      make("caption", { textContent: `${metric} on dev` }),
      make("tbody", {}, ...rows, make("tr", {}, make("th", { textContent: "width" }),
        ...widths.map(width => make("th", { scope: "col", textContent: share(width) }))))));
  }

  show() {
    this.sliders.width.show(this.width);
    this.sliders.depth.show(this.depth);
    for (const { button, width, depth } of this.cells || [])
      button.setAttribute("aria-pressed", width === this.width && depth === this.depth);
    this.known = null;
    this.tell(null);
  }

  // Times are of one text: another one starts anew.
  forget() { this.seconds = {}; this.known = null; }
  measured(width, depth, seconds) { (this.seconds[`${width} ${depth}`] ||= []).push(seconds); }
  runs(width, depth) { return this.seconds[`${width} ${depth}`]?.length ?? 0; }
  timed(key) { return this.seconds[key]?.length ? median(this.seconds[key]) : null; }

  // What this size costs and how far it is from the whole; `known` is what an answer of it said, null for none yet.
  tell(known) {
    if (this.place.hidden) return;
    this.known = known ??= this.known;
    const { parameters } = this.model, time = this.timed(this.key), whole = this.timed("1 1");
    const own = known?.parameters ?? this.member()?.parameters ?? (this.isWhole ? parameters : null);
    const score = this.member()?.score, best = this.member(1, 1)?.score;
    const isTimed = Math.min(this.runs(this.width, this.depth), this.runs(1, 1)) >= RUNS;
    const change = (value, from) => (this.isWhole || value === null || from === null ? ""
      : `${signed(100 * (value / from - 1), 0)} %`);
    const figure = (name, value, difference, title = "") => make("div",
      { title, class: name === "Answer" ? "compared" : "" }, make("dt", { textContent: name }),
      make("dd", {}, make("b", { textContent: value }), make("span", { textContent: difference })));
    this.figures.replaceChildren(
      figure("Latency of this text", time === null ? "–" : milliseconds(time),
        isTimed ? change(time, whole) : this.isWhole ? "" : "measuring …",
        `The median of ${this.runs(this.width, this.depth)} runs; the difference is to the whole model`),
      figure("Parameters", own === null ? "–" : short(own), change(own, parameters)),
      ...(score === undefined ? [] : [figure(`${this.sizes.metric} on dev`, score.toFixed(1),
        this.isWhole || best === undefined ? "" : signed(score - best, 1))]),
      ...(this.isWhole ? [] : [figure("Answer", known?.same === undefined ? "–" : known.same ? "the same" : "differs",
        known?.same === undefined ? "" : known.same ? "as the whole model" : known.wholeSays)]));
  }
}
