"""The look and the behaviour of the average maps on the page of a study."""

STYLE = """
.study [hidden] { display: none; }
.study-bar { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin-bottom: 14px; font-size: 14px;
  color: var(--muted); }
.study-names { display: flex; flex-wrap: wrap; gap: 6px; }
.study-names button { border: 1px solid var(--line); border-radius: 7px; background: var(--surface);
  padding: 4px 13px; cursor: pointer; color: var(--muted); }
.study-names button[aria-pressed=true] { background: var(--wash); color: var(--accent); border-color: var(--accent); }
.study-bar select { color: var(--ink); background: var(--surface); border: 1px solid var(--line);
  border-radius: 7px; padding: 4px 6px; margin-left: 6px; }
.study-maps { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.study-maps figcaption { font-size: 15px; font-weight: 600; margin-bottom: 12px; }
.study-map { max-width: 520px; margin: 0 auto; }
.study-map canvas { display: block; width: 100%; cursor: crosshair; touch-action: pan-y; }
.study-readout { min-height: 1.6em; margin-top: 10px; font: 13.5px/1.6 var(--mono); text-align: center; }
.study-scale { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 8px; margin-top: 14px;
  color: var(--muted); font-size: 13px; font-variant-numeric: tabular-nums; }
.study-scale i { width: 120px; height: 9px; border-radius: 3px;
  background: linear-gradient(to right, var(--heat-low), var(--heat-middle), var(--heat-high)); }
.study-scale i.signed { background: linear-gradient(to right, var(--diverging-low), var(--heat-low),
  var(--diverging-high)); }
.study-below { margin-top: 20px; }
.study-table { overflow-x: auto; padding: 0; }
.study-table table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
.study-table th, .study-table td { padding: 8px 12px; text-align: right; white-space: nowrap;
  border-top: 1px solid var(--line); }
.study-table thead th { color: var(--muted); font-weight: 500; border-top: 0; }
.study-table tbody th { font-weight: 600; }
.study-table th:first-child, .study-table td:nth-child(2), .study-table th:nth-child(2) { text-align: left; }
.study-table td.main { font-weight: 600; }
.study-table td[style] { background: color-mix(in srgb, var(--accent) calc(.45 * var(--share)), transparent); }
.study-table tr.even > * { color: var(--muted); font-weight: 400; }
"""

SCRIPT = """
for (const root of document.querySelectorAll(".study")) {
  const { length, models } = JSON.parse(root.querySelector(".study-data").textContent), size = length * length;
  const names = [...root.querySelectorAll(".study-names button")], layerChoice = root.querySelector("select");
  const figures = [...root.querySelectorAll("figure")], scale = root.querySelector(".study-scale");
  const [low, high, told] = scale.querySelectorAll("span"), chosen = { name: names[0].dataset.map, layer: -1 };
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clamp = value => Math.max(0, Math.min(length - 1, value));
  const number = value => value.toPrecision(2).replace("-", "−");
  for (const model of models)
    for (const one of Object.values(model)) {
      const bytes = Uint8Array.from(atob(one.levels), letter => letter.charCodeAt(0));
      let place = 0;  // a layer without the map has a scale of 0 and no bytes
      one.averages = one.scales.map(most => {
        if (!most) return null;
        const read = one.isScore ? byte => (byte - 128) / 127 * most : byte => (byte / 255) ** 2 * most;
        return Float32Array.from(bytes.subarray(place, place += size), read);
      });
    }
  // The average over all layers stands first, then the layers; a model may lack the map or the layer.
  const shown = model => model[chosen.name]?.averages[chosen.layer + 1];

  function mix(names) {
    const stops = names.map(colour).map(hex => [1, 3, 5].map(start => parseInt(hex.slice(start, start + 2), 16)));
    return at => {
      const from = Math.min(1, Math.floor(2 * at));
      return stops[from].map((one, channel) => one + (stops[from + 1][channel] - one) * (2 * at - from));
    };
  }
  function draw() {
    const isScore = models.some(model => model[chosen.name]?.isScore);
    // A token that every other one looks at would leave all the rest pale: the strongest shade starts at the 98th
    // percentile of the weights that are there.
    const sizes = map => map.map(Math.abs).filter(Boolean).sort();
    const strongest = (all, share) => all.length ? all[Math.ceil(share * all.length) - 1] : 0;
    const all = models.map(model => sizes(shown(model) || new Float32Array()));
    const most = Math.max(1e-9, ...all.map(one => strongest(one, isScore ? 1 : 0.98)));
    const isCut = all.some(one => strongest(one, 1) > most);
    const shade = isScore ? mix(["--diverging-low", "--heat-low", "--diverging-high"])
      : mix(["--heat-low", "--heat-middle", "--heat-high"]);
    low.textContent = isScore ? number(-most) : "0";
    high.textContent = (isScore ? "+" : "") + number(most) + (isCut ? " and more" : "");
    told.textContent = isScore ? "signed scores" : "shade grows with the root of the weight";
    scale.querySelector("i").className = isScore ? "signed" : "";
    for (const button of names) button.setAttribute("aria-pressed", button.dataset.map === chosen.name);
    figures.forEach((figure, index) => drawOne(figure, shown(models[index]),
      value => shade(isScore ? (value / most + 1) / 2 : Math.sqrt(Math.min(1, Math.max(0, value) / most)))));
  }
  const points = new Map();  // the cell pointed at in each figure; it stays when another map or layer is chosen
  function drawOne(figure, map, shade) {
    const canvas = figure.querySelector("canvas"), readout = figure.querySelector(".study-readout");
    const ratio = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth, margin = 30;
    const side = width - margin - 8, cell = side / length, pen = canvas.getContext("2d");
    canvas.hidden = !map;
    canvas.onpointermove = canvas.onpointerdown = canvas.onkeydown = null;
    readout.textContent = map ? "" : "No such map here.";
    if (!map) return;
    const heat = document.createElement("canvas"), image = new ImageData(length, length);
    heat.width = heat.height = length;
    map.forEach((value, place) => image.data.set([...shade(value), 255], place * 4));
    heat.getContext("2d").putImageData(image, 0, 0);
    Object.assign(canvas, { width: width * ratio, height: (margin + side + 2) * ratio });
    canvas.style.height = margin + side + 2 + "px";
    const step = [1, 2, 4, 8, 16, 32, 64, 128].find(one => length / one <= 8) || 256;
    function paint() {
      const pointed = points.get(figure);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, width);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(heat, margin, margin, side, side);
      pen.font = `11.5px ${colour("--sans")}`;
      pen.fillStyle = colour("--muted");
      pen.textBaseline = "middle";
      for (let place = 0; place < length; place = place ? place + step : step - 1) {
        pen.textAlign = "center";
        pen.fillText(place + 1, margin + (place + 0.5) * cell, margin - 11);
        pen.textAlign = "right";
        pen.fillText(place + 1, margin - 7, margin + (place + 0.5) * cell);
      }
      if (!pointed) return;
      pen.strokeStyle = colour("--series-2");
      pen.lineWidth = 1.5;
      pen.strokeRect(margin + pointed.key * cell, margin + pointed.query * cell, cell, cell);
      readout.textContent = `query ${pointed.query + 1} → key ${pointed.key + 1}: `
        + map[pointed.query * length + pointed.key].toPrecision(2).replace("-", "−");
    }
    const point = (query, key) => { points.set(figure, { query: clamp(query), key: clamp(key) }); paint(); };
    canvas.onpointermove = canvas.onpointerdown = event => {
      const box = canvas.getBoundingClientRect(), place = value => Math.floor((value - margin) / cell);
      const query = place(event.clientY - box.top), key = place(event.clientX - box.left);
      if (query >= 0 && key >= 0) point(query, key);
    };
    canvas.onkeydown = event => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      const { query, key } = points.get(figure) || { query: 0, key: 0 };
      point(query + step[0], key + step[1]);
    };
    paint();
  }

  for (const button of names) button.onclick = () => { chosen.name = button.dataset.map; draw(); };
  layerChoice.onchange = () => { chosen.layer = +layerChoice.value; draw(); };
  let seen = 0;
  new ResizeObserver(() => { if (root.clientWidth !== seen) { seen = root.clientWidth; draw(); } }).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
"""
