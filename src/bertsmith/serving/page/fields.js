// The fields a model reads: a text, a pair, a passage and a question, choices, lines to compare.

import { make, titled } from "./dom.js";

const EXAMPLES = {
  text: "My parcel was due on Monday and there is still no sign of it.",
  pair: "Where is my order?",
  question: "Where does the smith forge the gate?",
  context: "The smith forges an iron gate in the cold workshop by the river, and Anna carries seven lanterns to the "
    + "harbour.",
  start: "The smith then",
  choices: "in the workshop\nby the harbour\nnowhere at all",
  words: "Anna Berg carries seven lanterns from Oslo to the harbour of New Rome.",
  lines: ["Where is my parcel?", "My delivery has not arrived.", "How do I reset my password?",
    "I cannot log in to my account.", "The app crashes when I open it."].join("\n"),
};
const SHOWN = { words: "Text", lines: "Texts, one a line", choices: "Choices, one a line" };
const NAMES = { task: { classification: "Classify", multi_label: "Labels", regression: "Score", choice: "Choose",
  spans: "Find the answer", tagging: "Tag" }, vectors: "Compare texts", fill_mask: "Fill masks" };

export const workName = (model, work) => (work === "task" ? NAMES.task[model.task.kind] || titled(model.task.kind)
  : NAMES[work]);

const isList = role => role === "lines" || role === "choices";
const remembered = {};  // what was typed, by role, so that another model goes on with it

function columnsOf(model, work) {
  if (work === "vectors") return [{ column: "lines", role: "lines" }];
  if (work === "fill_mask") return [{ column: "text", role: "masked" }];
  return model.task.columns;
}

export function layFields(place, model, work, changed) {
  const columns = columnsOf(model, work);
  const areas = columns.map(({ column, role }) => {
    const first = role === "masked" ? `The smith forges an iron ${model.mask} in the workshop.`
      : EXAMPLES[role] || EXAMPLES.text;
    const usual = SHOWN[role] || (role === "masked" ? `Text with ${model.mask}` : titled(column));
    const area = make("textarea", { id: `field-${column}`, rows: role === "question" || role === "start" ? 1 : 3,
      spellcheck: false, value: remembered[role] ?? first });
    const grow = () => {  // as high as its text, measured while it does not also fill the panel
      Object.assign(area.style, { flex: "none", height: "auto" });
      Object.assign(area.style, { flex: "", height: `${area.scrollHeight + 2}px` });
    };
    area.addEventListener("input", () => { remembered[role] = area.value; grow(); changed(); });
    const children = [make("label", { for: area.id, textContent: usual }), area];
    if (role === "masked") children.push(make("button", { type: "button", class: "plain",
      textContent: `Put ${model.mask} here`,
      onclick: () => {
        area.setRangeText(model.mask, area.selectionStart, area.selectionEnd, "end");
        area.dispatchEvent(new Event("input"));
        area.focus();
      } }));
    return { column, role, area, grow, element: make("div", { class: `field ${role}` }, ...children) };
  });
  place.replaceChildren(...areas.map(one => one.element));
  areas.forEach(one => one.grow());
  const lines = area => area.value.split("\n").map(line => line.trim()).filter(Boolean);
  return {
    // null while something is missing
    get inputs() {
      if (areas.some(({ area }) => !area.value.trim())) return null;
      if (work === "vectors") return lines(areas[0].area);
      if (work === "fill_mask") return areas[0].area.value;
      return Object.fromEntries(areas.map(({ column, role, area }) => [column,
        isList(role) ? lines(area) : area.value]));
    },
    text: role => areas.find(one => one.role === role)?.area.value ?? "",
    set(role, value) {
      const { area } = areas.find(one => one.role === role);
      area.value = value;
      area.dispatchEvent(new Event("input"));
    },
    grow: () => areas.forEach(one => one.grow()),
  };
}
