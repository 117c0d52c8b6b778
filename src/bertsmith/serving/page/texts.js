// Answers inside a text: tagged words, the span that answers a question, words for masks.
// Places are counted in characters as Python has them, so a text is taken apart into code points, not UTF-16 units.

import { bars, headline } from "./answers.js";
import { counted, make, percent, quiet } from "./dom.js";

const toned = (kind, kinds) => `var(--series-${1 + Math.max(0, kinds.indexOf(kind)) % 8})`;

function marked(text, spans) {
  const letters = [...text], parts = [];
  let last = 0;
  for (const span of [...spans].sort((a, b) => a.begin - b.begin)) {
    if (span.begin < last) continue;
    parts.push(letters.slice(last, span.begin).join(""), span.element(letters.slice(span.begin, span.end).join("")));
    last = span.end;
  }
  return make("p", { class: "text" }, ...parts, letters.slice(last).join(""));
}

function tags({ model, answer, full, fields }) {
  const kinds = model.task.types, { entities, scores, places } = answer, count = answer.words.length;
  const chip = (kind, score) => word => make("mark",
    { class: "tagged", title: percent(score), set: { "--tone": toned(kind, kinds) } },
    word, make("small", { textContent: kind }));
  const spans = entities
    ? entities.map(one => ({ begin: one.begin, end: one.end, element: chip(one.type, one.score) }))
    : places.map(([begin, end], index) => ({ begin, end, element: chip(answer.answer[index], scores[index]) }));
  const parts = [marked(fields.text("words"), spans)];
  let said = counted(count, "tagged word");
  if (entities) said = entities.map(one => `${one.text}: ${one.type}`).join(", ") || "Nothing is tagged.";
  if (entities && !entities.length) parts.push(quiet(said));
  const least = percent(Math.min(1, ...scores)), most = percent(Math.max(0, ...scores));
  parts.push(quiet(`Between ${least} and ${most} sure of the tag of a word.`));
  if (full) {
    const differing = full.answer.filter((tag, index) => tag !== answer.answer[index]).length;
    parts.push(quiet(differing ? `The whole model tags ${counted(differing, "word")} of ${count} otherwise.`
      : "The whole model tags every word the same."));
  }
  return { parts, said };
}

function span({ answer, full, fields }) {
  const { begin, end } = answer, spans = [], said = answer.answer || "No answer in the passage";
  const mark = (kind, title) => word => make("mark", { class: kind, title, textContent: word });
  if (answer.answer) spans.push({ begin, end, element: mark("span", "") });
  if (full?.answer && (full.begin !== begin || full.end !== end))
    spans.push({ begin: full.begin, end: full.end, element: mark("full", "the whole model's answer") });
  const rows = answer.n_best.slice(0, 4).map(one => ({ name: one.text || "no answer", score: one.probability,
    isChosen: one.text === answer.answer, full: full?.n_best.find(other => other.text === one.text)?.probability }));
  return { parts: [headline(said, answer.score), marked(fields.text("context"), spans), bars(rows)],
    said: `${said}, ${percent(answer.score)}` };
}

function masks({ model, answer, full, fields }) {
  const places = fields.text("masked").split(model.mask), best = answer.masks.map(candidates => candidates[0]);
  const fillIn = (index, one) => {
    const before = places.slice(0, index + 1).join(model.mask), after = places.slice(index + 1).join(model.mask);
    fields.set("masked", (one.starts_word ? before : before.trimEnd()) + one.text + after);
  };
  const button = (index, one) => make("button", { type: "button", set: { "--share": one.score },
    "aria-label": `Fill in ${one.text}, ${percent(one.score)}`, onclick: () => fillIn(index, one) },
  make("span", { textContent: one.piece }), make("small", { textContent: percent(one.score) }));
  const groups = answer.masks.map((candidates, index) => {
    const before = full?.masks[index][0], isSame = before?.piece === candidates[0].piece;
    return make("div", { class: "mask" },
      answer.masks.length > 1 ? quiet(`Mask ${index + 1} of ${answer.masks.length}`) : null,
      make("ul", { class: "chips" }, ...candidates.map(one => make("li", {}, button(index, one)))),
      before ? quiet(isSame ? "The whole model puts the same word first."
        : `The whole model puts “${before.piece}” first, ${percent(before.score)}.`) : null);
  });
  // masks that lie beyond the longest text the model reads stay as they are
  const slot = one => (!one ? model.mask
    : make("mark", { class: "slot", title: percent(one.score), textContent: one.text }));
  const shown = places.flatMap((part, index) => (index ? [slot(best[index - 1]), part] : [part]));
  return { parts: [make("p", { class: "text" }, ...shown), ...groups],
    said: best.map(one => `${one.text}, ${percent(one.score)}`).join("; ") };
}

export const RENDERERS = { tagging: tags, spans: span, fill_mask: masks };
