// Input fields of a model: a text, a pair, a passage and a question, choices, or lines to compare.

import { make, titleCase } from "./dom.js";

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
const LABELS = { words: "Text", lines: "Texts, one per line", choices: "Choices, one per line" };
const NAMES = { task: { classification: "Classify", multi_label: "Assign labels", regression: "Score",
  choice: "Choose", spans: "Answer question", tagging: "Tag words", parsing: "Parse" }, vectors: "Compare texts",
fill_mask: "Fill masks" };

export const operationName = (model, work) => (work === "task"
  ? NAMES.task[model.task.kind] || titleCase(model.task.kind) : NAMES[work]);

const isList = role => role === "lines" || role === "choices";
const typed = {};  // text by role, kept when another model is selected

function columnsOf(model, work) {
  if (work === "vectors") return [{ column: "lines", role: "lines" }];
  if (work === "fill_mask") return [{ column: "text", role: "masked" }];
  return model.task.columns;
}

export function buildFields(parent, model, work, onChange) {
  const columns = columnsOf(model, work);
  const areas = columns.map(({ column, role }) => {
    const example = role === "masked" ? `The smith forges an iron ${model.mask} in the workshop.`
      : EXAMPLES[role] || EXAMPLES.text;
    const label = LABELS[role] || (role === "masked" ? `Text with ${model.mask}` : titleCase(column));
    const area = make("textarea", { id: `field-${column}`, rows: role === "question" || role === "start" ? 1 : 3,
      spellcheck: false, value: typed[role] ?? example });
    const fitHeight = () => {  // the height of the text can only be measured while the area does not fill the panel
      Object.assign(area.style, { flex: "none", height: "auto" });
      Object.assign(area.style, { flex: "", height: `${area.scrollHeight + 2}px` });
    };
    area.addEventListener("input", () => { typed[role] = area.value; fitHeight(); onChange(); });
    const children = [make("label", { for: area.id, textContent: label }), area];
    if (role === "masked") children.push(make("button", { type: "button", class: "plain",
      textContent: `Insert ${model.mask}`,
      onclick: () => {
        area.setRangeText(model.mask, area.selectionStart, area.selectionEnd, "end");
        area.dispatchEvent(new Event("input"));
        area.focus();
      } }));
    return { column, role, area, fitHeight, element: make("div", { class: `field ${role}` }, ...children) };
  });
  parent.replaceChildren(...areas.map(one => one.element));
  areas.forEach(one => one.fitHeight());
  const lines = area => area.value.split("\n").map(line => line.trim()).filter(Boolean);
  return {
    // null while a field is empty
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
    fitHeight: () => areas.forEach(one => one.fitHeight()),
  };
}
