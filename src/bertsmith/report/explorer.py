"""The look and the behaviour of the attention explorer: style and script of the pages that hold one."""

STYLE = """
.attention-panes { display: grid; gap: 20px; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 900px) { .attention-panes { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); } }
.attention-panes > .panel { display: flex; flex-direction: column; }
.attention-grid { display: grid; align-items: center; }
.attention-grid > span, .attention-grid > .layer { color: var(--muted); font-size: 11.5px; line-height: 1;
  text-align: center;
  font-variant-numeric: tabular-nums; }
.attention-grid button { padding: 0; border: 0; background: none; cursor: pointer; border-radius: 3px; min-width: 0; }
.attention-grid > .layer { padding: 4px 0; }
.attention-grid > .layer:hover, .attention-grid > .layer[aria-pressed=true] { color: var(--accent);
  background: var(--wash); }
.attention-grid canvas { display: block; width: 100%; aspect-ratio: 1; border-radius: 3px; }
.attention-grid button:hover canvas { box-shadow: 0 0 0 1.5px var(--muted); }
.attention-grid button[aria-pressed=true] canvas { box-shadow: 0 0 0 2px var(--surface), 0 0 0 4px var(--accent); }
.attention-bar { display: flex; flex-wrap: wrap; gap: 10px 14px; align-items: center; margin-bottom: 16px;
  font-size: 14px; }
.attention-bar label { display: flex; gap: 7px; align-items: center; color: var(--muted); }
.attention-bar select { color: var(--ink); background: var(--surface); border: 1px solid var(--line);
  border-radius: 7px; padding: 4px 6px; }
.attention-views { display: flex; margin-left: auto; border: 1px solid var(--line); border-radius: 7px;
  overflow: hidden; }
.attention-views button { border: 0; background: none; padding: 4px 13px; cursor: pointer; color: var(--muted); }
.attention-views button[aria-pressed=true] { background: var(--wash); color: var(--accent); }
.attention-views button:focus-visible { outline-offset: -2px; }
.attention-stage canvas { display: block; }
.attention-map { cursor: crosshair; touch-action: pan-y; margin: 0 auto; }
.attention-readout { min-height: 1.6em; margin-top: 12px; font: 13.5px/1.6 var(--mono); }
.attention-lines { display: grid; grid-template-columns: minmax(0, auto) minmax(48px, 1fr) minmax(0, auto);
  max-width: 440px;
  width: 100%; margin: 0 auto; font: clamp(11.5px, calc(var(--row) - 3px), 13.5px)/var(--row) var(--mono); }
.attention-lines button, .attention-lines div > span { display: block; width: 100%; height: var(--row);
  padding: 0 7px; border: 0; background: none;
  border-radius: 4px; white-space: pre; overflow: hidden; text-overflow: ellipsis; font: inherit; }
.attention-lines button { text-align: right; cursor: pointer; transition: none; }
.attention-lines button[aria-pressed=true] { background: var(--accent); color: var(--surface); }
.attention-scale { display: flex; align-items: center; gap: 8px; margin-top: auto; padding-top: 16px;
  color: var(--muted);
  font-size: 13px; line-height: 1.6; }
.attention-scale i { flex: 0 1 120px; height: 9px; border-radius: 3px;
  background: linear-gradient(to right, var(--heat-low), var(--heat-middle), var(--heat-high)); }
.attention-table { margin-top: 20px; max-height: 380px; overflow: auto; padding: 0; }
.attention-table table { border-collapse: collapse; width: 100%; min-width: 720px; table-layout: fixed;
  font-size: 14px; font-variant-numeric: tabular-nums; }
.attention-table th { position: sticky; top: 0; background: var(--surface); padding: 0; text-align: right;
  font-weight: 500; box-shadow: 0 1px var(--line); }
.attention-table th button { border: 0; background: none; padding: 11px 14px; cursor: pointer; color: var(--muted);
  white-space: nowrap; }
.attention-table th button::after { content: "↕"; display: inline-block; width: 1em; margin-left: 3px; opacity: .4; }
.attention-table th[aria-sort] button { color: var(--ink); }
.attention-table th[aria-sort] button::after { opacity: 1; }
.attention-table th[aria-sort=ascending] button::after { content: "↑"; }
.attention-table th[aria-sort=descending] button::after { content: "↓"; }
.attention-table td { padding: 5px 32px 5px 14px; text-align: right; border-top: 1px solid var(--line);
  white-space: nowrap; }
.attention-table th:first-child, .attention-table td:first-child { text-align: left; }
.attention-table td.share { background: linear-gradient(to right, var(--wash) calc(var(--share) * 1%), transparent 0)
  left / calc(100% - 18px) 100% no-repeat; }
.attention-table td button { border: 0; background: none; padding: 0; cursor: pointer; color: var(--accent); }
.attention-table tr.chosen { font-weight: 600; }
.attention-table tr.chosen td:first-child { box-shadow: inset 3px 0 var(--accent); }
"""

SCRIPT = """
for (const root of document.querySelectorAll(".attention")) {
  const find = selector => root.querySelector(selector);
  const data = JSON.parse(find(".attention-data").textContent);
  const { tokens, layers, heads } = data, length = tokens.length, AVERAGE = -1;
  const bytes = Uint8Array.from(atob(data.maps), letter => letter.charCodeAt(0));
  const chosen = { layer: 0, head: 0, view: "map", query: Math.min(1, length - 1), key: Math.min(1, length - 1) };
  const layerChoice = find(".choose-layer"), headChoice = find(".choose-head"), grid = find(".attention-grid");
  const stage = find(".attention-stage"), readout = find(".attention-readout");
  const rows = [...root.querySelectorAll("tbody tr")], views = [...root.querySelectorAll(".attention-views button")];
  const make = (tag, attributes, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
      name.startsWith("aria-") || name === "role" ? element.setAttribute(name, value) : element[name] = value;
    element.append(...children);
    return element;
  };
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const told = weight => weight < 0.005 ? "under 0.01" : weight.toFixed(2);
  const shown = (token, most) => token.length > most ? token.slice(0, most - 1) + "…" : token;

  function weights(layer, head) {
    const one = index => bytes.subarray(index * length * length, (index + 1) * length * length);
    if (head !== AVERAGE) return Float32Array.from(one(layer * heads + head), byte => byte / 255);
    const sum = new Float32Array(length * length);
    for (let other = 0; other < heads; other++)
      one(layer * heads + other).forEach((byte, place) => { sum[place] += byte / 255 / heads; });
    return sum;
  }

  // Shade grows with the square root of the weight: most weights are small, and would all look empty.
  let shades = [];
  function mixShades() {
    const stops = ["--heat-low", "--heat-middle", "--heat-high"].map(colour)
      .map(hex => [1, 3, 5].map(start => parseInt(hex.slice(start, start + 2), 16)));
    shades = Array.from({ length: 256 }, (_, level) => {
      const at = 2 * Math.sqrt(level / 255), from = Math.min(1, Math.floor(at));
      return stops[from].map((low, channel) => low + (stops[from + 1][channel] - low) * (at - from));
    });
  }
  function paint(canvas, map) {
    canvas.width = canvas.height = length;
    const image = new ImageData(length, length);
    map.forEach((weight, place) => image.data.set([...shades[Math.round(weight * 255)], 255], place * 4));
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  const thumbnails = [];
  grid.style.gridTemplateColumns = `1.9em repeat(${heads}, minmax(0, 116px))`;
  grid.style.gap = heads > 6 ? "3px" : "9px";
  grid.append(make("span", {}));
  for (let head = 0; head < heads; head++) grid.append(make("span", { textContent: head + 1 }));
  for (let layer = 0; layer < layers; layer++)
    for (let head = AVERAGE; head < heads; head++) {
      const label = `Layer ${layer + 1}, ${head === AVERAGE ? "average of its heads" : "head " + (head + 1)}`;
      const button = make("button", { type: "button", "aria-label": label, title: label });
      button.onclick = () => choose({ layer, head });
      if (head === AVERAGE) { button.className = "layer"; button.textContent = layer + 1; }
      else button.append(make("canvas", { style: length < 24 ? "image-rendering: pixelated" : "" }));
      thumbnails.push({ button, layer, head });
      grid.append(button);
    }
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  grid.addEventListener("keydown", event => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const layer = clamp(chosen.layer + step[0], 0, layers - 1), head = clamp(chosen.head + step[1], AVERAGE, heads - 1);
    choose({ layer, head });
    thumbnails.find(one => one.layer === chosen.layer && one.head === chosen.head).button.focus();
  });

  function drawMap(map) {
    const canvas = make("canvas", { className: "attention-map", tabIndex: 0, role: "img",
      "aria-label": "Attention map: rows attend to columns. The arrow keys move the cell that is read out." });
    stage.replaceChildren(canvas);
    const pen = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    const names = tokens.map(token => shown(token, 12)), longest = Math.max(...names.map(name => name.length));
    const setFont = pixels => { pen.font = `${pixels}px ${colour("--mono")}`; };
    const room = pixels => { setFont(pixels); return Math.ceil(pen.measureText("m".repeat(longest)).width) + 8; };
    const letters = clamp((stage.clientWidth - room(10)) / length - 0.5, 10, 12.5), margin = room(letters);
    const cell = Math.min(38, (stage.clientWidth - margin) / length), side = margin + cell * length;
    const heat = paint(document.createElement("canvas"), map), stride = Math.ceil((letters - 0.5) / cell);
    Object.assign(canvas, { width: side * ratio, height: side * ratio });
    canvas.style.width = canvas.style.height = side + "px";
    function draw() {
      const { query, key } = chosen, weight = map[query * length + key];
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, side, side);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(heat, margin, margin, cell * length, cell * length);
      setFont(letters);
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      // A label is left out where two would overlap, or where the pointed one needs the room.
      const labels = (pointed, direction) => names.forEach((name, index) => {
        if (index !== pointed && (index % stride || Math.abs(index - pointed) * cell < letters - 0.5)) return;
        pen.fillStyle = colour(index === pointed ? "--accent" : "--muted");
        pen.fillText(name, -6, direction * (index + 0.5) * cell);
      });
      pen.translate(margin, margin);
      labels(query, 1);
      pen.rotate(Math.PI / 2);  // down is now to the left, so the upper edge runs backwards
      labels(key, -1);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.strokeStyle = colour("--series-2");
      pen.lineWidth = 1.5;
      pen.strokeRect(margin + key * cell, margin + query * cell, cell, cell);
      readout.textContent = `${tokens[query]} (${query + 1}) → ${tokens[key]} (${key + 1}): ${told(weight)}`;
    }
    const point = (query, key) => {
      Object.assign(chosen, { query: clamp(query, 0, length - 1), key: clamp(key, 0, length - 1) });
      draw();
    };
    canvas.onpointermove = canvas.onpointerdown = event => {
      const box = canvas.getBoundingClientRect(), place = value => Math.floor((value - margin) / cell);
      const query = place(event.clientY - box.top), key = place(event.clientX - box.left);
      if (query >= 0 && key >= 0) point(query, key);
    };
    canvas.onkeydown = event => {
      const step = STEPS[event.key];
      if (step) { event.preventDefault(); point(chosen.query + step[0], chosen.key + step[1]); }
    };
    draw();
  }

  function drawLines(map) {
    const row = clamp(520 / length, 15, 26), canvas = make("canvas", {}), ratio = window.devicePixelRatio || 1;
    const left = tokens.map((token, query) => make("button", { type: "button", textContent: token, title: token,
      onpointerenter: () => point(query), onfocus: () => point(query), onclick: () => point(query) }));
    const right = tokens.map(token => make("span", { textContent: token, title: token }));
    const columns = [left, [canvas], right].map(column => make("div", {}, ...column));
    const lines = make("div", { className: "attention-lines" }, ...columns);
    lines.style.setProperty("--row", row + "px");
    stage.replaceChildren(lines);
    const width = canvas.parentElement.clientWidth, height = row * length, pen = canvas.getContext("2d");
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    Object.assign(canvas.style, { width: width + "px", height: height + "px" });
    pen.scale(ratio, ratio);
    function line(query, key, alpha, thickness) {
      const from = (query + 0.5) * row, to = (key + 0.5) * row;
      pen.globalAlpha = alpha;
      pen.lineWidth = thickness;
      pen.beginPath();
      pen.moveTo(4, from);
      pen.bezierCurveTo(width / 2, from, width / 2, to, width - 4, to);
      pen.stroke();
    }
    function point(query) {
      chosen.query = query;
      pen.clearRect(0, 0, width, height);
      pen.strokeStyle = colour("--muted");
      map.forEach((weight, place) => {
        if (weight > 0.05) line(Math.floor(place / length), place % length, 0.3 * weight, 1);
      });
      pen.strokeStyle = colour("--accent");
      const looks = map.subarray(query * length, (query + 1) * length);
      looks.forEach((weight, key) => {
        if (weight > 0.005) line(query, key, Math.sqrt(weight), 1 + 3 * weight);
        const share = Math.round(65 * Math.sqrt(weight));
        right[key].style.background = `color-mix(in srgb, var(--accent) ${share}%, transparent)`;
      });
      left.forEach((button, index) => button.setAttribute("aria-pressed", index === query));
      const most = [...looks.keys()].sort((a, b) => looks[b] - looks[a]).slice(0, 3);
      const answer = most.map(key => `${tokens[key]} (${key + 1}): ${told(looks[key])}`);
      readout.textContent = `${tokens[query]} (${query + 1}) → ${answer.join(", ")}`;
    }
    point(chosen.query);
  }

  function draw() {
    (chosen.view === "map" ? drawMap : drawLines)(weights(chosen.layer, chosen.head));
  }
  function choose(change) {
    Object.assign(chosen, change);
    layerChoice.value = chosen.layer;
    headChoice.value = chosen.head;
    for (const { button, layer, head } of thumbnails) {
      const isChosen = layer === chosen.layer && head === chosen.head;
      button.setAttribute("aria-pressed", isChosen);
      button.tabIndex = isChosen ? 0 : -1;  // one stop for the Tab key; the arrows move inside the grid
    }
    for (const row of rows)
      row.classList.toggle("chosen", +row.dataset.layer === chosen.layer && +row.dataset.head === chosen.head);
    for (const button of views) button.setAttribute("aria-pressed", button.dataset.view === chosen.view);
    draw();
  }
  function repaint() {
    mixShades();
    for (const { button, layer, head } of thumbnails)
      if (head !== AVERAGE) paint(button.firstChild, weights(layer, head));
    choose({});
  }

  layerChoice.onchange = () => choose({ layer: +layerChoice.value });
  headChoice.onchange = () => choose({ head: +headChoice.value });
  for (const button of views) button.onclick = () => choose({ view: button.dataset.view });
  for (const row of rows)
    row.querySelector("button").onclick = () => choose({ layer: +row.dataset.layer, head: +row.dataset.head });
  root.querySelectorAll("th").forEach((header, column) => header.firstChild.onclick = () => {
    const before = header.getAttribute("aria-sort") || (column ? "ascending" : "descending");  // figures: largest first
    const order = before === "ascending" ? "descending" : "ascending";
    root.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", order);
    const value = row => +row.cells[column].dataset.value;
    rows.sort((a, b) => (order === "ascending" ? 1 : -1) * (value(a) - value(b)));
    find("tbody").append(...rows);
  });
  let seen = 0;
  new ResizeObserver(() => { if (stage.clientWidth !== seen) { seen = stage.clientWidth; draw(); } }).observe(stage);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  repaint();
}
"""
