// Predictions inside a text: tagged words, a tree, the span that answers a question, tokens for masks.
// Offsets count code points, as in Python, so texts are split into code points and not into UTF-16 units.

import { bars, headline } from "./answers.js";
import { make, note, percent, plural } from "./dom.js";

const tagColour = (type, types) => `var(--series-${1 + Math.max(0, types.indexOf(type)) % 8})`;

function highlight(text, spans) {
  const characters = [...text], nodes = [], slice = (begin, end) => characters.slice(begin, end).join("");
  let last = 0;
  for (const span of [...spans].sort((a, b) => a.begin - b.begin)) {
    if (span.begin < last) continue;
    nodes.push(slice(last, span.begin), span.element(slice(span.begin, span.end)));
    last = span.end;
  }
  return make("p", { class: "text" }, ...nodes, slice(last));
}

function tags({ model, answer, full, fields }) {
  const { types } = model.task, { entities, scores, positions } = answer, count = answer.words.length;
  const chip = (type, score) => word => make("mark",
    { class: "tagged", title: percent(score), set: { "--tone": tagColour(type, types) } },
    word, make("small", { textContent: type }));
  const spans = entities
    ? entities.map(one => ({ begin: one.begin, end: one.end, element: chip(one.type, one.score) }))
    : positions.map(([begin, end], index) => ({ begin, end, element: chip(answer.answer[index], scores[index]) }));
  const elements = [highlight(fields.text("words"), spans)];
  let summary = plural(count, "tagged word");
  if (entities) summary = entities.map(one => `${one.text}: ${one.type}`).join(", ") || "No entities found.";
  if (entities && !entities.length) elements.push(note(summary));
  const lowest = percent(Math.min(1, ...scores)), highest = percent(Math.max(0, ...scores));
  elements.push(note(`Confidence per word: ${lowest} to ${highest}.`));
  if (full) {
    const differing = full.answer.filter((tag, index) => tag !== answer.answer[index]).length;
    elements.push(note(differing ? `The whole model predicts other tags for ${differing} of ${plural(count, "word")}.`
      : "The whole model predicts the same tags."));
  }
  return { elements, summary };
}

function tree({ answer, full }) {
  const box = label => make("span", { class: "constituent" }, make("small", { textContent: label }));
  const root = make("p", { class: "tree text" }), open = [{ end: answer.words.length, element: root }];
  const waiting = [...answer.constituents];
  answer.words.forEach((word, index) => {
    while (open.at(-1).end <= index) open.pop();
    while (waiting.length && waiting[0].begin === index) {
      const { label, end } = waiting.shift(), element = box(label);
      open.at(-1).element.append(element);
      open.push({ end, element });
    }
    open.at(-1).element.append(make("span", { class: "word", textContent: word }));
  });
  const elements = [root];
  if (full) elements.push(note(full.answer === answer.answer ? "The whole model predicts the same tree."
    : "The whole model predicts another tree."));
  return { elements, summary: answer.answer || "No words." };
}

function span({ answer, full, fields }) {
  const { begin, end } = answer, spans = [], predicted = answer.answer || "No answer in the passage";
  const mark = (kind, title) => word => make("mark", { class: kind, title, textContent: word });
  if (answer.answer) spans.push({ begin, end, element: mark("span", "") });
  if (full?.answer && (full.begin !== begin || full.end !== end))
    spans.push({ begin: full.begin, end: full.end, element: mark("full", "answer of the whole model") });
  const rows = answer.n_best.slice(0, 4).map(one => ({ name: one.text || "no answer", score: one.probability,
    isChosen: one.text === answer.answer, full: full?.n_best.find(other => other.text === one.text)?.probability }));
  return { elements: [headline(predicted, answer.score), highlight(fields.text("context"), spans), bars(rows)],
    summary: `${predicted}, ${percent(answer.score)}` };
}

function masks({ model, answer, full, fields }) {
  const between = fields.text("masked").split(model.mask), best = answer.masks.map(candidates => candidates[0]);
  const fillMask = (index, one) => {
    const before = between.slice(0, index + 1).join(model.mask), after = between.slice(index + 1).join(model.mask);
    fields.set("masked", (one.starts_word ? before : before.trimEnd()) + one.text + after);
  };
  const button = (index, one) => make("button", { type: "button", set: { "--share": one.score },
    "aria-label": `Fill in ${one.text}, ${percent(one.score)}`, onclick: () => fillMask(index, one) },
  make("span", { textContent: one.token }), make("small", { textContent: percent(one.score) }));
  const groups = answer.masks.map((candidates, index) => {
    const fullBest = full?.masks[index][0], isSame = fullBest?.token === candidates[0].token;
    return make("div", { class: "mask" },
      answer.masks.length > 1 ? note(`Mask ${index + 1} of ${answer.masks.length}`) : null,
      make("ul", { class: "chips" }, ...candidates.map(one => make("li", {}, button(index, one)))),
      fullBest ? note(isSame ? "The whole model ranks the same token first."
        : `The whole model ranks “${fullBest.token}” first, ${percent(fullBest.score)}.`) : null);
  });
  // masks beyond the maximum length of the model are not filled
  const slot = one => (!one ? model.mask
    : make("mark", { class: "slot", title: percent(one.score), textContent: one.text }));
  const filled = between.flatMap((text, index) => (index ? [slot(best[index - 1]), text] : [text]));
  return { elements: [make("p", { class: "text" }, ...filled), ...groups],
    summary: best.map(one => `${one.text}, ${percent(one.score)}`).join("; ") };
}

export const RENDERERS = { tagging: tags, parsing: tree, spans: span, fill_mask: masks };
