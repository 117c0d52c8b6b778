// Choose among the candidates for other limits, engines and precisions, by the rule of the search: the best measured
// candidate, unless an estimated one may be better in the first criterion or equally good and at least 5 % cheaper.
const MIN_COST_RATIO = 0.95, STEPS = 60;
const FLAGS = { latency: "latency-ms", size: "size-mb", memory: "memory-mb", floor: "at-least" };

for (const root of document.querySelectorAll(".fit")) {
  const data = JSON.parse(root.querySelector(".fit-data").textContent), { rows } = data;
  const form = root.querySelector("form"), outcome = root.querySelector(".chosen"), chart = root.querySelector(".axes");
  const figure = chart.closest("figure"), command = root.querySelector(".command");
  const markers = new Map([...chart.querySelectorAll("[data-key]")].map(marker => [+marker.dataset.key, marker]));
  const tableRows = [...document.querySelectorAll(".candidates tr[data-key]")];
  const initial = { ...data.limits, floor: data.floor }, limits = { ...initial };
  const make = (tag, className, ...children) => {
    const element = document.createElement(tag);
    element.className = className;
    element.append(...children);
    return element;
  };
  const megabytes = value => (value >= 10 ? value.toFixed(1) : value.toPrecision(3).replace(/\.?0+$/, ""));
  const show = { latency: value => `${value} ms`, size: value => `${value} MB`, floor: String };

  // Round away from the limits, so that a slider at a candidate's value includes it.
  const round = (value, digits, way) => {
    const unit = 10 ** (Math.floor(Math.log10(Math.abs(value) || 1)) + 1 - digits);
    return +(way(value / unit) * unit).toPrecision(digits);
  };
  const unique = values => [...new Set(values)].sort((a, b) => a - b);
  const positive = name => {
    const all = rows.map(row => row[name]), low = Math.min(...all), high = Math.max(...all);
    const steps = Array.from({ length: STEPS }, (_, step) => round(low * (high / low) ** (step / (STEPS - 1)), 2, Math.ceil));
    return [...unique([...steps, ...(initial[name] === null ? [] : [initial[name]])]), null];
  };
  const scores = rows.map(row => row.score), lowest = Math.min(...scores), highest = Math.max(...scores);
  const floors = Array.from({ length: STEPS }, (_, step) =>
    Math.floor((lowest + (highest - lowest) * step / (STEPS - 1)) * 10) / 10);
  const values = { latency: positive("latency"), size: positive("size"),
    floor: [null, ...unique([...floors, ...(initial.floor === null ? [] : [initial.floor])])] };

  function meets(row, isInitial) {
    if (row.missed && (isInitial || limits.latency !== null && limits.latency <= (initial.latency ?? Infinity))) return false;
    return ["latency", "size", "memory"].every(name => limits[name] === null || row[name] === null
      || row[name] <= limits[name]) && (limits.floor === null || row.score >= limits.floor);
  }
  function preference(row) {
    if (limits.floor === null) return [row.score, -row.latency, -row.size];
    return data.prefer === "fast" ? [-row.latency, -row.size, row.score] : [-row.size, -row.latency, row.score];
  }
  function compare(a, b) {
    const [first, second] = [preference(a), preference(b)], at = first.findIndex((value, index) => value !== second[index]);
    return at < 0 ? 0 : second[at] - first[at];
  }
  function mayBeat(row, best) {
    const [first, second] = preference(row), [bar, secondBar] = preference(best);
    return first > bar || (first === bar && second > MIN_COST_RATIO * secondBar);
  }
  const isAllowed = (name, value) => form.querySelector(`[name=${name}][value="${value}"]`).checked;
  const isChanged = () => Object.keys(initial).some(name => limits[name] !== initial[name])
    || form.querySelector("[type=checkbox]:not(:checked)") !== null;
  function choose(fitting) {
    if (!isChanged()) return rows.find(row => row.isChosen);
    const [best] = fitting.filter(row => row.isMeasured).sort(compare);
    const [estimated] = fitting.filter(row => !row.isMeasured && (!best || mayBeat(row, best))).sort(compare);
    return estimated || best;
  }

  function describe(row) {
    if (!row) return [make("p", "none", "No candidate meets these limits.")];
    const whole = rows[data.whole], faster = whole && whole.latency / row.latency;
    const metric = (name, value, note) => make("div", "", make("dt", "", name), make("dd", "", value, make("small", "", note)));
    const mark = row.isMeasured ? "" : "~", cut = row.vocabulary === "cut" ? ", cut vocabulary" : "";
    const points = whole ? row.score - whole.score : 0, smaller = whole && Math.round(100 * row.size / whole.size);
    return [make("p", "network", `${row.network}, ${row.engine} ${row.precision}${cut}`,
      make("small", row.isMeasured ? "measured" : "estimated", row.isMeasured ? "measured" : "estimated")),
    make("dl", "", metric(data.metric, row.score.toFixed(2), !whole || row === whole || Math.abs(points) < 0.005 ? ""
      : `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(2)}`),
    metric("latency", `${mark}${row.latency.toFixed(2)} ms`, !whole || row === whole ? ""
      : faster >= 1 ? `${faster.toFixed(1)} × faster` : `${(1 / faster).toFixed(1)} × slower`),
    metric("size", `${mark}${megabytes(row.size)} MB`, !whole || smaller === 100 ? "" : `${smaller} %`))];
  }
  function describeCommand() {
    const given = Object.keys(FLAGS).filter(name => limits[name] !== null).map(name => `--${FLAGS[name]} ${limits[name]}`);
    const chosen = name => {
      const boxes = [...form.querySelectorAll(`[name=${name}]`)], checked = boxes.filter(box => box.checked);
      return checked.length === boxes.length ? [] : checked.map(box => `--${name} ${box.value}`);
    };
    return given.length ? [data.command, ...given, ...chosen("engine"), ...chosen("precision"), data.out].join(" ") : null;
  }

  const svg = (tag, className) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    element.setAttribute("class", className);
    return element;
  };
  chart.querySelectorAll(".reference, .reference + .label, .ring, .label.strong").forEach(element => element.remove());
  const lines = { latency: svg("line", "reference"), floor: svg("line", "reference") };
  const lineLabels = { latency: svg("text", "label"), floor: svg("text", "label") };
  const ring = svg("circle", "ring"), ringLabel = svg("text", "label strong");
  ring.setAttribute("r", 10);
  ringLabel.setAttribute("y", -12);
  ringLabel.textContent = "chosen";
  chart.prepend(...Object.values(lines));
  chart.append(...Object.values(lineLabels));
  const height = chart.clientHeight, xEnd = +figure.dataset.xEnd, [yLow, yHigh] = figure.dataset.yEnds.split(" ").map(Number);
  const set = (element, attributes) => { for (const name in attributes) element.setAttribute(name, attributes[name]); };
  function drawLines() {
    const x = 100 * (limits.latency ?? 0) / xEnd, isRight = x > 70, display = x > 0 && x <= 100 ? "inline" : "none";
    set(lines.latency, { x1: `${x}%`, x2: `${x}%`, y1: 0, y2: height, display });
    set(lineLabels.latency, { x: `${x}%`, dx: isRight ? -6 : 6, y: height - 8, display,
      "text-anchor": isRight ? "end" : "start" });
    lineLabels.latency.textContent = `budget ${limits.latency} ms`;
    const y = limits.floor === null ? NaN : height * (yHigh - limits.floor) / (yHigh - yLow), isInside = y >= 0 && y <= height;
    set(lines.floor, { x1: 0, x2: "100%", y1: y || 0, y2: y || 0, display: isInside ? "inline" : "none" });
    set(lineLabels.floor, { x: "100%", y: y || 0, dy: y < 16 ? 18 : -8, "text-anchor": "end",
      display: isInside ? "inline" : "none" });
    lineLabels.floor.textContent = `at least ${limits.floor}`;
  }

  function update() {
    for (const label of form.querySelectorAll(".limit")) {
      const name = label.dataset.limit, value = limits[name];
      label.querySelector("output").textContent = value === null ? (name === "floor" ? "any" : "no limit") : show[name](value);
    }
    const allowed = rows.filter(row => isAllowed("engine", row.engine) && isAllowed("precision", row.precision));
    const fitting = allowed.filter(row => meets(row, !isChanged())), chosen = choose(fitting);
    outcome.replaceChildren(...describe(chosen));
    const text = describeCommand();
    command.hidden = text === null;
    if (text) command.firstElementChild.textContent = text;
    for (const [key, marker] of markers) marker.classList.toggle("missed", !fitting.includes(rows[key]));
    const marker = chosen && markers.get(rows.indexOf(chosen));
    if (marker) {
      chart.insertBefore(marker, lineLabels.latency);  // above the other markers
      const isRight = parseFloat(marker.getAttribute("x")) > 60;
      set(ringLabel, { x: isRight ? -14 : 14, "text-anchor": isRight ? "end" : "start" });
      marker.append(ring, ringLabel);
    } else { ring.remove(); ringLabel.remove(); }
    for (const row of tableRows) {
      const candidate = rows[row.dataset.key], isMet = fitting.includes(candidate);
      row.classList.toggle("chosen", candidate === chosen);
      row.classList.toggle("missed", !isMet);
      row.lastElementChild.textContent = candidate === chosen ? "chosen"
        : `${candidate.isMeasured ? "" : "~"}${isMet ? "met" : "missed"}`;
    }
    drawLines();
  }
  function reset() {
    Object.assign(limits, initial);
    for (const label of form.querySelectorAll(".limit")) {
      const name = label.dataset.limit, input = label.querySelector("input");
      input.max = values[name].length - 1;
      input.value = values[name].indexOf(initial[name]);
    }
    for (const box of form.querySelectorAll("[type=checkbox]")) box.checked = true;
    update();
  }
  form.addEventListener("input", event => {
    const limit = event.target.closest("[data-limit]")?.dataset.limit;
    if (limit) limits[limit] = values[limit][+event.target.value];
    update();
  });
  form.addEventListener("reset", event => { event.preventDefault(); reset(); });
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = outcome.hidden = false;
  reset();
}
