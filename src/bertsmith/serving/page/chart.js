// A small line chart of the last minutes, with the current value.

import { draw, make } from "./dom.js";

const WIDTH = 300, HEIGHT = 84, MAX_GAP = 4000;  // milliseconds between points; a longer gap breaks the line

// Round up to a number with few digits, so that the scale rarely changes.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find(times => times * step >= value * 0.999) * step;
}

export class Chart {
  // `lines` are { name, value: point → number or null }; `format` turns a number into text. The scale ends at `top`; by
  // default at the highest value, at least `minTop`.
  constructor(title, lines, format, { minTop = 0, top = null, isStep = false, note = "" } = {}) {
    Object.assign(this, { title, lines, format, minTop, top, isStep });
    this.current = make("b", {});
    this.detail = make("span", { class: "detail" });
    this.topLabel = make("span", { class: "top" });
    this.area = draw("path", { class: "area", d: "" });
    this.paths = lines.map((_, index) => draw("path", { class: `line line-${index + 1}`, d: "" }));
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": title },
      draw("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }), this.area, ...this.paths);
    const legend = lines.length > 1 ? make("span", { class: "legend" },
      ...lines.map((line, index) => make("span", { class: `key-${index + 1}`, textContent: line.name }))) : null;
    this.element = make("figure", { class: "chart" }, make("figcaption", {},
      make("span", { class: "title", textContent: title, title: note }), legend),
      make("p", { class: "value" }, this.current, this.detail),
      make("div", { class: "plot" }, this.topLabel, this.svg));
  }

  show(points, from, to, detail = "") {
    const values = points.flatMap(point => this.lines.map(line => line.value(point)).filter(value => value !== null));
    const top = this.top ?? roundUp(Math.max(this.minTop, ...values));
    const x = time => ((time - from) / (to - from) * WIDTH).toFixed(1);
    const y = value => (HEIGHT - 1 - Math.min(1, value / top) * (HEIGHT - 4)).toFixed(1);
    this.lines.forEach((line, index) => {
      let path = "", area = "", before = null;
      for (const point of points) {
        const value = line.value(point);
        if (value === null) { before = null; continue; }
        const isJoined = before && point.time - before.time < MAX_GAP;
        if (isJoined && this.isStep) path += `H${x(point.time)}`;
        path += `${isJoined ? "L" : "M"}${x(point.time)} ${y(value)}`;
        if (index === 0) {
          if (!isJoined) area += `${before ? `L${x(before.time)} ${HEIGHT}Z` : ""}M${x(point.time)} ${HEIGHT}`;
          else if (this.isStep) area += `H${x(point.time)}`;
          area += `L${x(point.time)} ${y(value)}`;
        }
        before = { time: point.time };
      }
      this.paths[index].setAttribute("d", path);
      if (index === 0) this.area.setAttribute("d", area && before ? `${area}L${x(before.time)} ${HEIGHT}Z` : "");
    });
    const last = points.at(-1), current = this.lines.map(line => (last ? line.value(last) : null));
    const texts = current.map(value => (value === null ? null : this.format(value)));
    this.current.textContent = texts[0] ?? "–";
    this.detail.textContent = detail;
    this.topLabel.textContent = this.format(top);
    const currently = this.lines.map(({ name }, index) => `${name} ${texts[index] ?? "none"}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title} over the last minutes; currently ${currently}`);
  }
}
