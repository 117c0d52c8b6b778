// Answers inside a text: tagged words, the span that answers a question, words for masks.
// Places are counted in characters as Python has them, so a text is taken apart into code points, not UTF-16 units.

import { bars, headline } from "./answers.js";
import { counted, make, percent } from "./dom.js";

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

const chip = (kind, score, tone) => word => make("mark", { class: "tagged", title: percent(score), set: { "--tone": tone } },
  word, make("small", { textContent: kind }));

function tags({ model, answer, full, fields }) {
  const kinds = model.task.types, text = fields.text("words");
  const spans = answer.entities
    ? answer.entities.map(one => ({ begin: one.begin, end: one.end, element: chip(one.type, one.score, toned(one.type, kinds)) }))
    : answer.places.map(([begin, end], index) => ({ begin, end,
      element: chip(answer.answer[index], answer.scores[index], toned(answer.answer[index], kinds)) }));
  const counts = answer.entities?.length ?? answer.words.length;
  const said = answer.entities ? (counts ? answer.entities.map(one => `${one.text}: ${one.type}`).join(", ") : "Nothing is tagged")
    : counted(counts, "tagged word");
  const differing = full ? full.answer.filter((tag, index) => tag !== answer.answer[index]).length : 0;
  const note = full ? make("p", { class: "quiet", textContent: differing
    ? `The whole model tags ${counted(differing, "word")} of ${answer.words.length} otherwise.` : "The whole model tags every word the same." }) : null;
  const least = Math.min(1, ...answer.scores);
  return { parts: [marked(text, spans), answer.entities && !counts ? make("p", { class: "quiet", textContent: "Nothing is tagged." }) : null,
    make("p", { class: "quiet", textContent: `Between ${percent(least)} and ${percent(Math.max(0, ...answer.scores))} sure of the tag of a word.` }), note], said };
}

function span({ answer, full, fields }) {
  const text = fields.text("context"), isNone = !answer.answer;
  const spans = [];
  if (full && full.answer && (full.begin !== answer.begin || full.end !== answer.end))
    spans.push({ begin: full.begin, end: full.end, element: word => make("mark", { class: "full", title: "the whole model's answer", textContent: word }) });
  if (!isNone) spans.unshift({ begin: answer.begin, end: answer.end, element: word => make("mark", { class: "span", textContent: word }) });
  const rows = answer.n_best.slice(0, 4).map(one => ({ name: one.text || "no answer", score: one.probability,
    isChosen: one.text === answer.answer, full: full?.n_best.find(other => other.text === one.text)?.probability }));
  const said = isNone ? "No answer in the passage" : answer.answer;
  return { parts: [headline(said, answer.score), marked(text, spans), bars(rows)], said: `${said}, ${percent(answer.score)}` };
}

function masks({ model, answer, full, fields }) {
  const text = fields.text("masked"), places = text.split(model.mask);
  const fillIn = (index, one) => {
    const before = places.slice(0, index + 1).join(model.mask), after = places.slice(index + 1).join(model.mask);
    fields.set("masked", (one.starts_word ? before : before.trimEnd()) + one.text + after);
  };
  const groups = answer.masks.map((candidates, index) => {
    const before = full?.masks[index];
    return make("div", { class: "mask" },
      answer.masks.length > 1 ? make("p", { class: "quiet", textContent: `Mask ${index + 1} of ${answer.masks.length}` }) : null,
      make("ul", { class: "chips" }, ...candidates.map(one => make("li", {}, make("button", { type: "button",
        "aria-label": `Fill in ${one.text}, ${percent(one.score)}`, set: { "--share": one.score }, onclick: () => fillIn(index, one) },
      make("span", { textContent: one.piece }), make("small", { textContent: percent(one.score) }))))),
      before ? make("p", { class: "quiet", textContent: before[0].piece === candidates[0].piece
        ? "The whole model puts the same word first." : `The whole model puts “${before[0].piece}” first, ${percent(before[0].score)}.` }) : null);
  });
  const best = answer.masks.map(candidates => candidates[0]);
  let number = 0;
  const shown = make("p", { class: "text" }, ...places.flatMap((part, index) => (index && best[number]
    ? [make("mark", { class: "slot", title: percent(best[number].score), textContent: best[number++].text }), part]
    : index ? [model.mask, part] : [part])));
  return { parts: [shown, ...groups], said: best.map(one => `${one.text}, ${percent(one.score)}`).join("; ") };
}

export const RENDERERS = { tagging: tags, spans: span, fill_mask: masks };
