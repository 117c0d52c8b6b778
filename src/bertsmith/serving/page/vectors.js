// Similarity of texts: the nearest neighbours of one text, and the cosine of every pair.

import { decimal, make, note } from "./dom.js";

let selected = 0;  // index of the text whose neighbours are shown

export function vectors({ answer, full, inputs, render }) {
  const table = answer.similarities, count = inputs.length;
  if (count < 2) {
    const summary = `One vector of ${answer.width} dimensions. Enter a second line to compare texts.`;
    return { elements: [note(summary)], summary };
  }
  selected = Math.min(selected, count - 1);
  const others = inputs.map((text, index) => ({ text, index, cosine: table[selected][index],
    full: full?.similarities[selected]?.[index] }))
    .filter(one => one.index !== selected).sort((a, b) => b.cosine - a.cosine);
  const select = index => { selected = index; render(); };
  const nearest = make("ol", { class: "bars nearest" }, ...others.map(one => make("li", {},
    make("button", { type: "button", class: "name", textContent: one.text,
      title: "Show the nearest texts to this one", onclick: () => select(one.index) }),
    make("span", { class: "score", textContent: decimal(one.cosine) }),
    make("span", { class: "track", "aria-hidden": "true" }, make("i", { set: { "--share": Math.max(0, one.cosine) } }),
      one.full === undefined ? null : make("b", { class: "full", title: `whole model: ${decimal(one.full)}`,
        set: { "--share": Math.max(0, one.full) } })))));
  const head = make("tr", {}, make("th", {}), ...inputs.map((text, index) => make("th",
    { scope: "col", title: text, textContent: index + 1 })));
  const lowest = Math.min(...table.flat()), shade = cosine => (cosine - lowest) / (1 - lowest || 1);
  const rows = table.map((row, index) => make("tr", { class: index === selected ? "chosen" : "" },
    make("th", { scope: "row", title: inputs[index] }, make("button", { type: "button", class: "plain",
      "aria-pressed": index === selected, textContent: index + 1,
      "aria-label": `Show the nearest texts to text ${index + 1}`, onclick: () => select(index) })),
    ...row.map((cosine, other) => make("td", { title: `${inputs[index]} · ${inputs[other]}`,
      textContent: decimal(cosine), set: { "--share": shade(cosine) } }))));
  const matrix = make("div", { class: "matrix", tabIndex: 0, role: "region",
    "aria-label": "Cosine similarity of every pair" },
  make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  const heading = make("p", { class: "quiet" }, "Nearest to ", make("q", { textContent: inputs[selected] }));
  return {
    elements: [heading, nearest, matrix],
    summary: `Nearest to text ${selected + 1}: ${others[0].text}, ${decimal(others[0].cosine)}`,
  };
}
