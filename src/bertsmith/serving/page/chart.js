// A small chart of the last minutes: lines over an area, the value of now beside it.

import { draw, make } from "./dom.js";

const WIDTH = 300, HEIGHT = 84, GAP = 4000;  // milliseconds without a point that break a line

// A round number at or above the highest value, so that the scale does not tremble.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find(times => times * step >= value * 0.999) * step;
}

export class Chart {
  // `lines` are { name, value: point → number or null }, `told` writes a number.
  constructor(title, lines, told, { least = 0, highest = null, isStep = false, note = "" } = {}) {
    Object.assign(this, { title, lines, told, least, highest, isStep });
    this.now = make("b", {});
    this.beside = make("span", { class: "beside" });
    this.top = make("span", { class: "top" });
    this.area = draw("path", { class: "area", d: "" });
    this.paths = lines.map((_, index) => draw("path", { class: `line line-${index + 1}`, d: "" }));
    this.picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": title },
      draw("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }), this.area, ...this.paths);
    const legend = lines.length > 1 ? make("span", { class: "legend" },
      ...lines.map((line, index) => make("span", { class: `key-${index + 1}`, textContent: line.name }))) : null;
    this.element = make("figure", { class: "chart" }, make("figcaption", {},
      make("span", { class: "title", textContent: title, title: note }), legend),
      make("p", { class: "value" }, this.now, this.beside), make("div", { class: "plot" }, this.top, this.picture));
  }

  show(points, from, to, beside = "") {
    const values = points.flatMap(point => this.lines.map(line => line.value(point)).filter(value => value !== null));
    const highest = this.highest ?? roundUp(Math.max(this.least, ...values));
    const x = time => ((time - from) / (to - from) * WIDTH).toFixed(1);
    const y = value => (HEIGHT - 1 - Math.min(1, value / highest) * (HEIGHT - 4)).toFixed(1);
    this.lines.forEach((line, index) => {
      let path = "", area = "", before = null;
      for (const point of points) {
        const value = line.value(point);
        if (value === null) { before = null; continue; }
        const isJoined = before && point.time - before.time < GAP;
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
    const last = points.at(-1), now = this.lines.map(line => (last ? line.value(last) : null));
    this.now.textContent = now[0] === null ? "–" : this.told(now[0]);
    this.beside.textContent = beside;
    this.top.textContent = this.told(highest);
    const told = this.lines.map(({ name }, index) => `${name} ${now[index] === null ? "none" : this.told(now[index])}`);
    this.picture.setAttribute("aria-label", `${this.title} in the last minutes; now ${told.join(", ")}`);
  }
}
