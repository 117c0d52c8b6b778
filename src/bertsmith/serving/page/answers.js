// Predictions for whole texts: labels with scores, a number on a scale, one of several choices.
// Renderers return the elements and a summary for screen readers. `full` is the answer of the whole model if a smaller
// size is shown, otherwise null.

import { decimal, make, percent, titleCase } from "./dom.js";

const MAX_BARS = 6;  // until the user expands the list
const expanded = new Set();  // models whose list is expanded

// Score bars, with a mark at the score of the whole model.
export function bars(rows, threshold = null) {
  return make("ol", { class: "bars" }, ...rows.map(({ name, score, full, isChosen }) => make("li",
    { class: isChosen ? "chosen" : "" },
    make("span", { class: "name", textContent: name }),
    make("span", { class: "score", textContent: percent(score) }),
    make("span", { class: "track", "aria-hidden": "true" },
      make("i", { set: { "--share": Math.max(0, Math.min(1, score)) } }),
      threshold === null ? null : make("b", { class: "threshold", set: { "--share": threshold } }),
      full === undefined || full === null ? null
        : make("b", { class: "full", title: `whole model: ${percent(full)}`, set: { "--share": full } })))));
}

function labels({ model, answer, full }) {
  const isMany = Array.isArray(answer.answer), threshold = isMany ? model.task.threshold : null;
  const rows = Object.entries(answer.scores).map(([name, score]) => ({ name: formatLabel(name), score,
    full: full?.scores[name],
    isChosen: isMany ? answer.answer.includes(name) : name === answer.answer })).sort((a, b) => b.score - a.score);
  const predicted = isMany ? answer.answer.map(formatLabel).join(", ") || "No label" : formatLabel(answer.answer);
  const isShort = rows.length > MAX_BARS + 1 && !expanded.has(model.name);
  const more = isShort ? make("button", { type: "button", class: "plain more",
    textContent: `${rows.length - MAX_BARS} more labels`,
    onclick: () => {
      expanded.add(model.name);
      more.previousElementSibling.replaceWith(bars(rows, threshold));
      more.remove();
    } }) : null;
  return { elements: [headline(predicted, isMany ? null : answer.score), bars(isShort ? rows.slice(0, MAX_BARS) : rows,
    threshold), more],
    summary: isMany ? predicted : `${predicted}, ${percent(answer.score)}` };
}

export const formatLabel = name => (/[a-z]_|_[a-z]/.test(name) ? titleCase(name) : name);

export function headline(text, score) {
  return make("p", { class: "headline" }, make("strong", { textContent: text }),
    score === null || score === undefined ? null : make("span", { textContent: percent(score) }));
}

function number({ model, answer, full }) {
  const { lowest, highest } = model.task, value = answer.answer, text = decimal(value);
  if (lowest === null || highest === null) return { elements: [headline(text)], summary: text };
  const share = one => Math.max(0, Math.min(1, (one - lowest) / (highest - lowest)));
  const ends = make("div", { class: "ends" }, make("span", { textContent: lowest }),
    make("span", { textContent: highest }));
  const scale = make("div", { class: "scale", "aria-hidden": "true" },
    full ? make("b", { class: "full", title: `whole model: ${decimal(full.answer)}`,
      set: { "--share": share(full.answer) } }) : null,
    make("b", { class: "here", set: { "--share": share(value) } }));
  return { elements: [headline(text), scale, ends], summary: `${text} on a scale from ${lowest} to ${highest}` };
}

function choices({ answer, full, inputs, model }) {
  const { column } = model.task.columns.find(one => one.role === "choices");
  const rows = inputs[column].map((name, index) => ({ name, score: answer.scores[index],
    full: full?.scores[index], isChosen: index === answer.answer }));
  return { elements: [headline(inputs[column][answer.answer], answer.score), bars(rows)],
    summary: `${inputs[column][answer.answer]}, ${percent(answer.score)}` };
}

export const RENDERERS = { classification: labels, multi_label: labels, regression: number, choice: choices };
