// The first tab: an input, what the chosen model and size say of it, the cost of that, the maps.

import { RENDERERS as WHOLE, shownLabel } from "./answers.js";
import { counted, find, make, milliseconds, percent, quiet } from "./dom.js";
import { layFields, workName } from "./fields.js";
import { Maps } from "./maps.js";
import { explore } from "./service.js";
import { RUNS, Sizes } from "./sizes.js";
import { RENDERERS as INSIDE } from "./texts.js";
import { vectors } from "./vectors.js";

const TYPING = 180, DRAGGING = 40, BETWEEN = 60;  // milliseconds of quiet before the service is asked
const BUSY = 0.02, RESTING = 1000;  // seconds in the queue from which it is left in peace for so many milliseconds
const RENDERERS = { ...WHOLE, ...INSIDE, vectors };

export class Try {
  constructor(report) {
    this.report = report;
    this.answer = find(".answer");
    this.maps = new Maps(() => this.ask(0));
  }

  use(model) {
    this.stop();
    this.model = model;
    this.work = model.works.includes(this.work) && this.work !== "vectors" ? this.work : model.works[0];
    const works = find(".works");
    works.hidden = model.works.length < 2;
    works.replaceChildren(...model.works.map(work => make("button", { type: "button", "data-work": work,
      textContent: workName(model, work),
      onclick: () => { this.work = work; this.lay(); } })));
    this.sizes = new Sizes(find(".sizing"), model, () => this.ask(DRAGGING));
    this.maps.reset(model);
    this.lay();
  }

  lay() {
    for (const button of find(".works").children) button.setAttribute("aria-pressed",
      button.dataset.work === this.work);
    this.fields = layFields(find(".fields"), this.model, this.work, () => this.ask(TYPING));
    this.answer.replaceChildren();
    this.whole = null;
    this.ask(0);
  }

  stop() {
    clearTimeout(this.waiting);
    this.asking?.abort();
  }

  ask(quiet) {
    this.stop();
    if (!this.fields) return;
    if (this.fields.inputs === null) { this.empty(); return; }
    this.waiting = setTimeout(() => this.askNow(), quiet);
  }

  empty() {
    this.answer.replaceChildren(quiet("Type something to see what the model says of it."));
    find(".counted").textContent = "";
    find(".answering [role=status]").textContent = "";
    this.maps.clear();
  }

  async askNow() {
    const { signal } = this.asking = new AbortController(), { model, work, sizes } = this, inputs = this.fields.inputs;
    const text = JSON.stringify([work, inputs]);
    const isNew = this.whole?.text !== text, names = sequenceNames(model, work, inputs);
    if (isNew) { this.whole = null; sizes.forget(); }
    // into how many windows another text is cut is known only after it was
    const sequence = this.maps.sequence(names?.length ?? (isNew ? 1 : Infinity));
    const question = { model: model.name, work, inputs };
    this.answer.setAttribute("aria-busy", "true");
    try {
      const { width, depth } = sizes;
      const found = await explore({ ...question, width, depth, maps: this.maps.isOpen, sequence }, signal);
      sizes.measured(width, depth, found.seconds);
      if (sizes.isWhole) this.whole = { text, answer: found.answer };
      else if (!this.whole) {
        const whole = await explore({ ...question, width: 1, depth: 1 }, signal);
        this.whole = { text, answer: whole.answer };
        sizes.measured(1, 1, whole.seconds);
      }
      if (signal.aborted) return;
      this.report(null);
      this.last = { found, inputs, sequence };
      this.show();
      this.answer.removeAttribute("aria-busy");
      await this.measure(question, found, signal);
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      this.report(error);
      this.answer.replaceChildren();
      find(".answering [role=status]").textContent = "";
    } finally {
      if (!signal.aborted) this.answer.removeAttribute("aria-busy");
    }
  }

  // One run says little of a time: while nothing else happens, both sizes take turns until there are enough of them.
  async measure(question, found, signal) {
    const { sizes } = this, pairs = sizes.isWhole ? [[1, 1]] : [[sizes.width, sizes.depth], [1, 1]];
    if (this.model.sizes.kind === "one") return;
    let queued = found.queued_seconds;
    while (pairs.some(pair => sizes.runs(...pair) < RUNS))
      for (const [width, depth] of pairs) {
        if (sizes.runs(width, depth) >= RUNS) continue;
        await new Promise(done => { setTimeout(done, queued < BUSY ? BETWEEN : RESTING); });
        if (signal.aborted) return;
        const again = await explore({ ...question, width, depth }, signal);
        sizes.measured(width, depth, again.seconds);
        queued = again.queued_seconds;
        sizes.tell(null);
      }
  }

  show() {
    const { model, work, fields, sizes } = this, { found, inputs } = this.last, { answer } = found;
    const full = sizes.isWhole ? null : this.whole.answer;
    const kind = work === "task" ? model.task.kind : work;
    const { parts, said } = RENDERERS[kind]({ model, answer, full, fields, inputs, again: () => this.show() });
    const legend = full && parts.some(part => part && (find("b.full, mark.full", part) || part.matches("b.full")))
      ? make("p", { class: "quiet whole-key", textContent: "the whole model" }) : null;
    this.answer.replaceChildren(...[...parts, legend].filter(Boolean));
    find(".answering [role=status]").textContent = said;
    const sequences = found.sequences > 1 ? ` in ${counted(found.sequences, "sequence")}` : "";
    const cut = found.cut ? `; the model reads up to ${counted(model.length, "token")}, the rest was left out` : "";
    const time = model.sizes.kind === "one" ? ` · ${milliseconds(found.seconds)}` : "";  // others have a place for it
    find(".counted").textContent = `${counted(found.tokens, "token")}${sequences}${time}${cut}`;
    sizes.tell({ parameters: found.parameters, ...(full ? compared(kind, answer, full) : {}) });
    this.maps.show(found, sequenceNames(model, work, inputs), this.last.sequence);
  }
}

// What the sequences of an input are called where each is a text of its own; null where they are windows of one.
function sequenceNames(model, work, inputs) {
  if (work === "vectors") return inputs;
  const choices = work === "task" && model.task.columns.find(one => one.role === "choices");
  return choices ? inputs[choices.column] : null;
}

// Whether a smaller size answers as the whole model, and what that says where it differs.
function compared(kind, answer, full) {
  if (kind === "regression") {
    const apart = Math.abs(answer.answer - full.answer);
    return { same: apart < 0.005, wholeSays: `the whole model: ${full.answer.toFixed(2)}` };
  }
  if (kind === "vectors") {
    const own = (row, index) => row.map((cosine, other) => (other === index ? -2 : cosine));
    const nearest = table => table.map(own).map(row => row.indexOf(Math.max(...row))).join();
    return { same: nearest(answer.similarities) === nearest(full.similarities), wholeSays: "other nearest texts" };
  }
  if (kind === "fill_mask") {
    const first = own => own.masks.map(candidates => candidates[0].piece).join(" ");
    return { same: first(answer) === first(full), wholeSays: `the whole model: ${first(full)}` };
  }
  const same = JSON.stringify(answer.answer) === JSON.stringify(full.answer);
  if (kind === "tagging") return { same, wholeSays: "in some words" };
  if (kind === "choice") return { same, wholeSays: `the whole model: ${full.text}` };
  const said = Array.isArray(full.answer) ? full.answer.map(shownLabel).join(", ") || "no label"
    : shownLabel(full.answer) || "no answer";
  return { same, wholeSays: `the whole model: ${said}${full.score === undefined ? "" : `, ${percent(full.score)}`}` };
}
