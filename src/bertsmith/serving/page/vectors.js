// Texts by how alike they are: those nearest to one of them, and all pairs as a table.

import { make, quiet } from "./dom.js";

let chosen = 0;  // the line whose nearest are shown

const told = cosine => cosine.toFixed(2).replace("-", "−");

export function vectors({ answer, full, inputs, again }) {
  const table = answer.similarities, count = inputs.length;
  if (count < 2) {
    const said = `One vector of ${answer.width} numbers. Give another line to compare it with.`;
    return { parts: [quiet(said)], said };
  }
  chosen = Math.min(chosen, count - 1);
  const others = inputs.map((text, index) => ({ text, index, cosine: table[chosen][index],
    full: full?.similarities[chosen]?.[index] }))
    .filter(one => one.index !== chosen).sort((a, b) => b.cosine - a.cosine);
  const choose = index => { chosen = index; again(); };
  const nearest = make("ol", { class: "bars nearest" }, ...others.map(one => make("li", {},
    make("button", { type: "button", class: "name", textContent: one.text,
      title: "Show what is nearest to this text", onclick: () => choose(one.index) }),
    make("span", { class: "score", textContent: told(one.cosine) }),
    make("span", { class: "track", "aria-hidden": "true" }, make("i", { set: { "--share": Math.max(0, one.cosine) } }),
      one.full === undefined ? null : make("b", { class: "full", title: `the whole model: ${told(one.full)}`,
        set: { "--share": Math.max(0, one.full) } })))));
  const head = make("tr", {}, make("th", {}), ...inputs.map((text, index) => make("th",
    { scope: "col", title: text, textContent: index + 1 })));
  const least = Math.min(...table.flat()), shade = cosine => (cosine - least) / (1 - least || 1);
  const rows = table.map((row, index) => make("tr", { class: index === chosen ? "chosen" : "" },
    make("th", { scope: "row", title: inputs[index] }, make("button", { type: "button", class: "plain",
      "aria-pressed": index === chosen, textContent: index + 1,
      "aria-label": `Show what is nearest to text ${index + 1}`, onclick: () => choose(index) })),
    ...row.map((cosine, other) => make("td", { title: `${inputs[index]} · ${inputs[other]}`,
      textContent: told(cosine), set: { "--share": shade(cosine) } }))));
  const matrix = make("div", { class: "matrix", tabIndex: 0, role: "region", "aria-label": "Cosine of every pair" },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  return {
    parts: [make("p", { class: "quiet" }, "Nearest to ", make("q", { textContent: inputs[chosen] })), nearest, matrix],
    said: `Nearest to text ${chosen + 1}: ${others[0].text}, ${told(others[0].cosine)}`,
  };
}
