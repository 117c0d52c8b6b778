// The second tab: how the engines fare, asked once a second while somebody looks.

import { Chart } from "./chart.js";
import { make, milliseconds, short, whole } from "./dom.js";
import { live } from "./service.js";

const EVERY = 1000, SPAN = 180_000, LEAST = 60_000;  // milliseconds between two questions, and that are shown
const COLUMNS = ["Model", "Queue", "Tokens/s", "Median", "p99", "Size", "Refused"];
const share = value => `${Math.round(100 * value)} %`;

export class Live {
  constructor(place, report, choose) {
    Object.assign(this, { place, report, choose, points: new Map(), isOn: false });
    document.addEventListener("visibilitychange", () => this.turn());
  }

  use(models, model) {
    const rate = value => short(+value.toFixed(value < 10 ? 1 : 0));
    this.model = model;
    this.charts = {
      waiting: new Chart("Queue", [{ name: "tokens", value: one => one.waiting_tokens }],
        value => short(Math.round(value)), { least: 10, note: "Tokens that wait to be worked on" }),
      tokens: new Chart("Tokens per second", [{ name: "tokens", value: one => one.tokens_per_second }], rate,
        { least: 10 }),
      requests: new Chart("Requests per second", [{ name: "requests", value: one => one.requests }], rate,
        { least: 1, note: "Calls that were answered" }),
      latency: new Chart("Latency", [{ name: "median", value: one => one.median_seconds },
        { name: "p99", value: one => one.slowest_seconds }], milliseconds,
        { least: 0.001, note: "From being asked to being answered" }),
      size: new Chart("Size in use", [{ name: "parameters", value: one => this.sizeOf(one) }], value => share(value),
        { highest: 1, isStep: true, note: "Share of the whole model's parameters" }),
      refused: new Chart("Refused or late, per second", [{ name: "refused or late", value: one => one.failures }],
        rate, { least: 1 }),
    };
    this.rows = models.length > 1 ? models.map(one => this.row(one)) : [];
    const table = models.length > 1 ? make("div", { class: "panel all" }, make("table", {},
      make("caption", { class: "unseen", textContent: "All models" }),
      make("thead", {}, make("tr", {}, ...COLUMNS.map((name, index) =>
        make("th", { scope: "col", class: index ? "number" : "", textContent: name })))),
      make("tbody", {}, ...this.rows.map(one => one.element)))) : null;
    this.span = make("span", { class: "quiet" });
    this.totals = make("p", { class: "note" });
    const heading = make("div", { class: "heading" }, make("h2", { textContent: model.name }), this.span);
    const charts = make("div", { class: "charts" }, ...Object.values(this.charts).map(chart => chart.element));
    this.place.replaceChildren(...[heading, charts, this.totals, table].filter(Boolean));
    this.show();
  }

  row(model) {
    const cells = Array.from({ length: 6 }, () => make("td", { class: "number" }));
    const button = make("button", { type: "button", class: "plain", textContent: model.name,
      onclick: () => this.choose(model.name) });
    return { model, cells, element: make("tr", { class: model === this.model ? "chosen" : "" },
      make("th", { scope: "row" }, button), ...cells) };
  }

  sizeOf(point) {
    const member = this.model.sizes.grid?.find(one => one.width === point.width && one.depth === point.depth);
    return member ? member.parameters / this.model.parameters : point.width * point.depth;
  }

  turn(isOn = this.isOn) {
    this.isOn = isOn;
    const isWanted = isOn && !document.hidden;
    if (isWanted && !this.timer) this.timer = setTimeout(() => this.ask(), 0);
    if (!isWanted) { clearTimeout(this.timer); this.asking?.abort(); this.timer = null; }
  }

  async ask() {
    const begin = performance.now(), { signal } = this.asking = new AbortController();
    try {
      const { models } = await live(signal), time = Date.now();
      for (const [name, state] of Object.entries(models)) this.add(name, { ...state, time });
      this.report(null);
      this.show();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.report(error);
    }
    if (this.isOn && !document.hidden) this.timer = setTimeout(() => this.ask(),
      Math.max(100, EVERY - (performance.now() - begin)));
  }

  // Counts since the start become rates between two questions.
  add(name, point) {
    const points = this.points.get(name) || [], before = points.at(-1), failed = one => one.refused + one.late;
    const seconds = before ? (point.time - before.time) / 1000 : 0;
    const per = (now, then) => (seconds > 0 && seconds < 5 ? Math.max(0, now - then) / seconds : null);
    point.requests = before ? per(point.answered, before.answered) : null;
    point.failures = before ? per(failed(point), failed(before)) : null;
    this.points.set(name, [...points.filter(one => one.time > point.time - SPAN), point]);
  }

  show() {
    const points = this.points.get(this.model.name) || [], last = points.at(-1), to = last?.time ?? Date.now();
    const span = Math.min(SPAN, Math.max(LEAST, to - (points[0]?.time ?? to))), from = to - span;
    this.span.textContent = span > LEAST
      ? `the last ${Math.floor(span / 60_000)}:${String(Math.floor(span / 1000) % 60).padStart(2, "0")} minutes`
      : "the last minute";
    const beside = last ? {
      waiting: `tokens in ${whole(last.waiting_sequences)} ${last.waiting_sequences === 1 ? "sequence" : "sequences"}`,
      latency: last.slowest_seconds === null ? "nothing asked lately" : `p99 ${milliseconds(last.slowest_seconds)}`,
      tokens: last.running_tokens ? `${whole(last.running_tokens)} being worked on` : "",
      size: `width ${share(last.width)} · depth ${share(last.depth)}`,
      refused: `${whole(last.refused)} refused, ${whole(last.late)} late in all`,
      requests: `${whole(last.answered)} in all`,
    } : {};
    for (const [name, chart] of Object.entries(this.charts)) chart.show(points, from, to, beside[name] ?? "");
    for (const { model, cells } of this.rows) {
      const own = this.points.get(model.name)?.at(-1);
      if (!own) continue;
      const told = [whole(own.waiting_tokens), short(Math.round(own.tokens_per_second)),
        own.median_seconds === null ? "–" : milliseconds(own.median_seconds),
        own.slowest_seconds === null ? "–" : milliseconds(own.slowest_seconds),
          `${share(own.width)} × ${share(own.depth)}`, whole(own.refused + own.late)];
      cells.forEach((cell, index) => { cell.textContent = told[index]; });
    }
    const mean = field => (last[field] / last.batches).toFixed(1);
    this.totals.textContent = last?.batches ? `${whole(last.batches)} batches since the start, in the mean of `
      + `${mean("batched_sequences")} sequences and ${mean("batched_tokens")} tokens.` : "";
  }
}
