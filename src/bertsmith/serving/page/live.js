// The "Live" tab: load and latency of every model, polled once a second while the tab is visible.

import { Chart } from "./chart.js";
import { integer, make, milliseconds, plural, short } from "./dom.js";
import { fetchLive } from "./service.js";

const INTERVAL = 1000, MAX_SPAN = 180_000, MIN_SPAN = 60_000;  // milliseconds between polls, and shown in charts
const COLUMNS = ["Model", "Queue", "Tokens/s", "Median", "p99", "Size", "Rejected"];
const share = value => `${Math.round(100 * value)} %`;

export class Live {
  constructor(container, report, selectModel) {
    Object.assign(this, { container, report, selectModel, points: new Map(), isOn: false });
    document.addEventListener("visibilitychange", () => this.toggle());
  }

  use(models, model) {
    const rate = value => short(+value.toFixed(value < 10 ? 1 : 0));
    this.model = model;
    this.charts = {
      waiting: new Chart("Queue", [{ name: "tokens", value: one => one.waiting_tokens }],
        value => short(Math.round(value)), { minTop: 10, note: "Tokens waiting in the queue" }),
      tokens: new Chart("Tokens per second", [{ name: "tokens", value: one => one.tokens_per_second }], rate,
        { minTop: 10 }),
      requests: new Chart("Requests per second", [{ name: "requests", value: one => one.requests }], rate,
        { minTop: 1, note: "Answered requests" }),
      latency: new Chart("Latency", [{ name: "median", value: one => one.median_seconds },
        { name: "p99", value: one => one.slowest_seconds }], milliseconds,
        { minTop: 0.001, note: "Time in the queue and in the model" }),
      size: new Chart("Current size", [{ name: "parameters", value: one => this.sizeOf(one) }], value => share(value),
        { top: 1, isStep: true, note: "Share of the whole model's parameters" }),
      refused: new Chart("Rejected or timed out, per second", [{ name: "rejected or timed out",
        value: one => one.failures }], rate, { minTop: 1 }),
    };
    this.rows = models.length > 1 ? models.map(one => this.row(one)) : [];
    const table = models.length > 1 ? make("div", { class: "panel all" }, make("table", {},
      make("caption", { class: "visually-hidden", textContent: "All models" }),
      make("thead", {}, make("tr", {}, ...COLUMNS.map((name, index) =>
        make("th", { scope: "col", class: index ? "number" : "", textContent: name })))),
      make("tbody", {}, ...this.rows.map(one => one.element)))) : null;
    this.span = make("span", { class: "quiet" });
    this.totals = make("p", { class: "note" });
    const heading = make("div", { class: "heading" }, make("h2", { textContent: model.name }), this.span);
    const charts = make("div", { class: "charts" }, ...Object.values(this.charts).map(chart => chart.element));
    this.container.replaceChildren(...[heading, charts, this.totals, table].filter(Boolean));
    this.show();
  }

  row(model) {
    const cells = Array.from({ length: 6 }, () => make("td", { class: "number" }));
    const button = make("button", { type: "button", class: "plain", textContent: model.name,
      onclick: () => this.selectModel(model.name) });
    return { model, cells, element: make("tr", { class: model === this.model ? "chosen" : "" },
      make("th", { scope: "row" }, button), ...cells) };
  }

  sizeOf(point) {
    const size = Object.values(this.model.sizes)[0].grid?.find(one => one.width === point.width && one.depth === point.depth);
    return size ? size.parameters / this.model.parameters : point.width * point.depth;
  }

  toggle(isOn = this.isOn) {
    this.isOn = isOn;
    const isVisible = isOn && !document.hidden;
    if (isVisible && !this.timer) this.timer = setTimeout(() => this.poll(), 0);
    if (!isVisible) { clearTimeout(this.timer); this.controller?.abort(); this.timer = null; }
  }

  async poll() {
    const begin = performance.now(), { signal } = this.controller = new AbortController();
    try {
      const { models } = await fetchLive(signal), time = Date.now();
      for (const [name, state] of Object.entries(models)) this.add(name, { ...state, time });
      this.report(null);
      this.show();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.report(error);
    }
    if (this.isOn && !document.hidden) this.timer = setTimeout(() => this.poll(),
      Math.max(100, INTERVAL - (performance.now() - begin)));
  }

  // Compute rates from the counts of two successive polls.
  add(name, point) {
    const points = this.points.get(name) || [], before = points.at(-1), failed = one => one.refused + one.late;
    const seconds = before ? (point.time - before.time) / 1000 : 0;
    const per = (now, then) => (seconds > 0 && seconds < 5 ? Math.max(0, now - then) / seconds : null);
    point.requests = before ? per(point.answered, before.answered) : null;
    point.failures = before ? per(failed(point), failed(before)) : null;
    this.points.set(name, [...points.filter(one => one.time > point.time - MAX_SPAN), point]);
  }

  show() {
    const points = this.points.get(this.model.name) || [], last = points.at(-1), to = last?.time ?? Date.now();
    const span = Math.min(MAX_SPAN, Math.max(MIN_SPAN, to - (points[0]?.time ?? to))), from = to - span;
    this.span.textContent = span > MIN_SPAN
      ? `the last ${Math.floor(span / 60_000)}:${String(Math.floor(span / 1000) % 60).padStart(2, "0")} minutes`
      : "the last minute";
    const details = last ? {
      waiting: `tokens in ${plural(last.waiting_sequences, "sequence")}`,
      latency: last.slowest_seconds === null ? "no recent requests" : `p99 ${milliseconds(last.slowest_seconds)}`,
      tokens: last.running_tokens ? `${integer(last.running_tokens)} being computed` : "",
      size: `width ${share(last.width)} · depth ${share(last.depth)}`,
      refused: `total: ${integer(last.refused)} rejected, ${integer(last.late)} timed out`,
      requests: `${integer(last.answered)} in total`,
    } : {};
    for (const [name, chart] of Object.entries(this.charts)) chart.show(points, from, to, details[name] ?? "");
    for (const { model, cells } of this.rows) {
      const point = this.points.get(model.name)?.at(-1);
      if (!point) continue;
      const texts = [integer(point.waiting_tokens), short(Math.round(point.tokens_per_second)),
        point.median_seconds === null ? "–" : milliseconds(point.median_seconds),
        point.slowest_seconds === null ? "–" : milliseconds(point.slowest_seconds),
        `${share(point.width)} × ${share(point.depth)}`, integer(point.refused + point.late)];
      cells.forEach((cell, index) => { cell.textContent = texts[index]; });
    }
    const mean = field => (last[field] / last.batches).toFixed(1);
    this.totals.textContent = last?.batches ? `${integer(last.batches)} batches since the start, on average `
      + `${mean("batched_sequences")} sequences and ${mean("batched_tokens")} tokens each.` : "";
  }
}
