// The "Try" tab: an input, the prediction of the selected model and size, its cost, and attention maps.

import { RENDERERS as TEXT_RENDERERS, formatLabel } from "./answers.js";
import { decimal, find, make, milliseconds, note, percent, plural } from "./dom.js";
import { buildFields, operationName } from "./fields.js";
import { Maps } from "./maps.js";
import { explore } from "./service.js";
import { MIN_RUNS, Sizes } from "./sizes.js";
import { Snippet } from "./snippet.js";
import { RENDERERS as SPAN_RENDERERS } from "./texts.js";
import { vectors } from "./vectors.js";

const TYPING_DELAY = 180, SLIDER_DELAY = 40, MEASURE_DELAY = 60;  // milliseconds before a request
const BUSY_QUEUE = 0.02, BUSY_DELAY = 1000;  // seconds in the queue that count as busy; milliseconds to wait then
const RENDERERS = { ...TEXT_RENDERERS, ...SPAN_RENDERERS, vectors };

export class Try {
  constructor(report) {
    this.report = report;
    this.answer = find(".answer");
    this.maps = new Maps(() => this.schedule(0));
    this.snippet = new Snippet(find(".snippet"));
  }

  use(model) {
    this.stop();
    this.model = model;
    this.work = model.works.includes(this.work) && this.work !== "vectors" ? this.work : model.works[0];
    const operations = find(".operations");
    operations.hidden = model.works.length < 2;
    operations.replaceChildren(...model.works.map(work => make("button", { type: "button", "data-work": work,
      textContent: operationName(model, work),
      onclick: () => { this.work = work; this.build(); } })));
    this.maps.reset(model);
    this.build();
  }

  build() {
    for (const button of find(".operations").children) button.setAttribute("aria-pressed",
      button.dataset.work === this.work);
    this.sizes = new Sizes(find(".size-panel"), this.model, this.work, () => this.schedule(SLIDER_DELAY));
    this.fields = buildFields(find(".fields"), this.model, this.work, () => this.schedule(TYPING_DELAY));
    this.answer.replaceChildren();
    this.whole = null;
    this.schedule(0);
  }

  stop() {
    clearTimeout(this.timer);
    this.controller?.abort();
  }

  schedule(delay) {
    this.stop();
    if (!this.fields) return;
    this.snippet.show(this.model, this.work, this.fields.inputs, this.sizes);
    if (this.fields.inputs === null) { this.showEmpty(); return; }
    this.timer = setTimeout(() => this.predict(), delay);
  }

  showEmpty() {
    this.answer.replaceChildren(note("Type something to see the model's prediction."));
    find(".token-count").textContent = "";
    find(".answer-panel [role=status]").textContent = "";
    this.maps.clear();
  }

  async predict() {
    const { signal } = this.controller = new AbortController();
    const { model, work, sizes } = this, { inputs } = this.fields;
    const text = JSON.stringify([work, inputs]);
    const isNew = this.whole?.text !== text, names = sequenceNames(model, work, inputs);
    if (isNew) { this.whole = null; sizes.forget(); }
    // the number of windows of a new text is known only after the response
    const sequence = this.maps.sequence(names?.length ?? (isNew ? 1 : Infinity));
    const request = { model: model.name, work, inputs };
    this.answer.setAttribute("aria-busy", "true");
    try {
      const { width, depth } = sizes;
      const response = await explore({ ...request, width, depth, maps: this.maps.isOpen, sequence }, signal);
      sizes.addTime(width, depth, response.seconds);
      if (sizes.isWhole) this.whole = { text, answer: response.answer };
      else if (!this.whole) {
        const whole = await explore({ ...request, width: 1, depth: 1 }, signal);
        this.whole = { text, answer: whole.answer };
        sizes.addTime(1, 1, whole.seconds);
      }
      if (signal.aborted) return;
      this.report(null);
      this.last = { response, inputs, sequence };
      this.show();
      this.answer.removeAttribute("aria-busy");
      await this.measure(request, response, signal);
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      this.report(error);
      this.answer.replaceChildren();
      find(".answer-panel [role=status]").textContent = "";
    } finally {
      if (!signal.aborted) this.answer.removeAttribute("aria-busy");
    }
  }

  // A single run is too noisy: while the page is idle, run both sizes alternately until there are enough runs.
  async measure(request, response, signal) {
    const { sizes } = this, pairs = sizes.isWhole ? [[1, 1]] : [[sizes.width, sizes.depth], [1, 1]];
    if (sizes.hasOne) return;
    let queued = response.queued_seconds;
    while (pairs.some(pair => sizes.runs(...pair) < MIN_RUNS))
      for (const [width, depth] of pairs) {
        if (sizes.runs(width, depth) >= MIN_RUNS) continue;
        await new Promise(done => { setTimeout(done, queued < BUSY_QUEUE ? MEASURE_DELAY : BUSY_DELAY); });
        if (signal.aborted) return;
        const { seconds, queued_seconds: wait } = await explore({ ...request, width, depth }, signal);
        sizes.addTime(width, depth, seconds);
        queued = wait;
        sizes.showMetrics(null);
      }
  }

  show() {
    const { model, work, fields, sizes } = this, { response, inputs } = this.last, { answer } = response;
    const full = sizes.isWhole ? null : this.whole.answer;
    const kind = work === "task" ? model.task.kind : work;
    const { elements, summary } = RENDERERS[kind]({ model, answer, full, fields, inputs, render: () => this.show() });
    const hasMark = element => element && (find("b.full, mark.full", element) || element.matches("b.full"));
    const legend = full && elements.some(hasMark)
      ? make("p", { class: "quiet whole-legend", textContent: "whole model" }) : null;
    this.answer.replaceChildren(...[...elements, legend].filter(Boolean));
    find(".answer-panel [role=status]").textContent = summary;
    const sequences = response.sequences > 1 ? ` in ${plural(response.sequences, "sequence")}` : "";
    const cut = response.cut ? `; truncated to the maximum length of ${plural(model.length, "token")}` : "";
    // other models show the latency with the size
    const time = sizes.hasOne ? ` · ${milliseconds(response.seconds)}` : "";
    find(".token-count").textContent = `${plural(response.tokens, "token")}${sequences}${time}${cut}`;
    sizes.showMetrics({ parameters: response.parameters, ...(full ? compare(kind, answer, full) : {}) });
    this.maps.show(response, sequenceNames(model, work, inputs), this.last.sequence);
  }
}

// Names of the sequences if each is a text of its own; null if they are windows of one text.
function sequenceNames(model, work, inputs) {
  if (work === "vectors") return inputs;
  const choices = work === "task" && model.task.columns.find(one => one.role === "choices");
  return choices ? inputs[choices.column] : null;
}

// Compare the answer of a smaller size with that of the whole model; `difference` describes the latter.
function compare(kind, answer, full) {
  if (kind === "regression") {
    const same = Math.abs(answer.answer - full.answer) < 0.005;
    return { same, difference: `whole model: ${decimal(full.answer)}` };
  }
  if (kind === "vectors") {
    const withoutSelf = (row, index) => row.map((cosine, other) => (other === index ? -2 : cosine));
    const nearest = table => table.map(withoutSelf).map(row => row.indexOf(Math.max(...row))).join();
    return { same: nearest(answer.similarities) === nearest(full.similarities),
      difference: "whole model: other nearest texts" };
  }
  if (kind === "fill_mask") {
    const best = ({ masks }) => masks.map(candidates => candidates[0].token).join(" ");
    return { same: best(answer) === best(full), difference: `whole model: ${best(full)}` };
  }
  const same = JSON.stringify(answer.answer) === JSON.stringify(full.answer);
  if (kind === "tagging") return { same, difference: "whole model: other tags for some words" };
  if (kind === "parsing") return { same, difference: "whole model: another tree" };
  if (kind === "choice") return { same, difference: `whole model: ${full.text}` };
  const predicted = Array.isArray(full.answer) ? full.answer.map(formatLabel).join(", ") || "no label"
    : formatLabel(full.answer) || "no answer";
  return { same, difference: `whole model: ${predicted}${full.score === undefined ? "" : `, ${percent(full.score)}`}` };
}
