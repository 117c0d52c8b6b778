// Answers about a whole text: labels with their scores, a number on its scale, one of several choices.
// `full` is what the whole model says where a smaller size answered, else null.

import { make, percent, titled } from "./dom.js";

const SHOWN = 6;  // bars before the rest is asked for
const opened = new Set();  // models whose rest was asked for

// Bars with a mark where the whole model's score lies.
export function bars(rows, threshold = null) {
  return make("ol", { class: "bars" }, ...rows.map(({ name, score, full, isChosen }) => make("li",
    { class: isChosen ? "chosen" : "" },
    make("span", { class: "name", textContent: name }),
    make("span", { class: "score", textContent: percent(score) }),
    make("span", { class: "track", "aria-hidden": "true" },
      make("i", { set: { "--share": Math.max(0, Math.min(1, score)) } }),
      threshold === null ? null : make("b", { class: "threshold", set: { "--share": threshold } }),
      full === undefined || full === null ? null
        : make("b", { class: "full", title: `the whole model: ${percent(full)}`, set: { "--share": full } })))));
}

function labels({ model, answer, full }) {
  const isMany = Array.isArray(answer.answer), threshold = isMany ? model.task.threshold : null;
  const rows = Object.entries(answer.scores).map(([name, score]) => ({ name: shownLabel(name), score,
    full: full?.scores[name],
    isChosen: isMany ? answer.answer.includes(name) : name === answer.answer })).sort((a, b) => b.score - a.score);
  const said = isMany ? answer.answer.map(shownLabel).join(", ") || "No label" : shownLabel(answer.answer);
  const isShort = rows.length > SHOWN + 1 && !opened.has(model.name);
  const more = isShort ? make("button", { type: "button", class: "plain more",
    textContent: `${rows.length - SHOWN} more labels`,
    onclick: () => {
      opened.add(model.name);
      more.previousElementSibling.replaceWith(bars(rows, threshold));
      more.remove();
    } }) : null;
  return { parts: [headline(said, isMany ? null : answer.score), bars(isShort ? rows.slice(0, SHOWN) : rows,
    threshold), more],
    said: isMany ? said : `${said}, ${percent(answer.score)}` };
}

export const shownLabel = name => (/[a-z]_|_[a-z]/.test(name) ? titled(name) : name);

export function headline(said, score) {
  return make("p", { class: "headline" }, make("strong", { textContent: said }),
    score === null || score === undefined ? null : make("span", { textContent: percent(score) }));
}

function number({ model, answer, full }) {
  const { lowest, highest } = model.task, value = answer.answer, told = value.toFixed(2).replace("-", "−");
  if (lowest === null || highest === null) return { parts: [headline(told)], said: told };
  const share = one => Math.max(0, Math.min(1, (one - lowest) / (highest - lowest)));
  const ends = make("div", { class: "ends" }, make("span", { textContent: lowest }),
    make("span", { textContent: highest }));
  const scale = make("div", { class: "scale", "aria-hidden": "true" },
    full ? make("b", { class: "full", title: `the whole model: ${full.answer.toFixed(2)}`,
      set: { "--share": share(full.answer) } }) : null,
    make("b", { class: "here", set: { "--share": share(value) } }));
  return { parts: [headline(told), scale, ends], said: `${told} on a scale from ${lowest} to ${highest}` };
}

function choices({ answer, full, inputs, model }) {
  const { column } = model.task.columns.find(one => one.role === "choices");
  const rows = inputs[column].map((name, index) => ({ name, score: answer.scores[index],
    full: full?.scores[index], isChosen: index === answer.answer }));
  return { parts: [headline(inputs[column][answer.answer], answer.score), bars(rows)],
    said: `${inputs[column][answer.answer]}, ${percent(answer.score)}` };
}

export const RENDERERS = { classification: labels, multi_label: labels, regression: number, choice: choices };
