for (const root of document.querySelectorAll(".study")) {
  const { length, models } = JSON.parse(root.querySelector(".study-data").textContent), size = length * length;
  const names = [...root.querySelectorAll(".study-names button")], layerChoice = root.querySelector("select");
  const figures = [...root.querySelectorAll("figure")], scale = root.querySelector(".study-scale");
  const [low, high, meaning] = scale.querySelectorAll("span"), chosen = { name: names[0].dataset.map, layer: -1 };
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clamp = value => Math.max(0, Math.min(length - 1, value));
  const number = value => value.toPrecision(2).replace("-", "−");
  for (const model of models)
    for (const one of Object.values(model)) {
      const bytes = Uint8Array.from(atob(one.levels), letter => letter.charCodeAt(0));
      let offset = 0;  // a layer without the map has scale 0 and no bytes
      one.averages = one.scales.map(unit => {
        if (!unit) return null;
        const read = one.isScore ? byte => (byte - 128) / 127 * unit : byte => (byte / 255) ** 2 * unit;
        return Float32Array.from(bytes.subarray(offset, offset += size), read);
      });
    }
  // The average over all layers comes first, then the layers; a model may lack the map or the layer.
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
    // The strongest shade is the 98th percentile of the non-zero weights: one dominant token would fade the rest.
    const sizes = map => map.map(Math.abs).filter(Boolean).sort();
    const strongest = (all, share) => all.length ? all[Math.ceil(share * all.length) - 1] : 0;
    const all = models.map(model => sizes(shown(model) || new Float32Array()));
    const top = Math.max(1e-9, ...all.map(one => strongest(one, isScore ? 1 : 0.98)));
    const isClipped = all.some(one => strongest(one, 1) > top);
    const shade = isScore ? mix(["--diverging-low", "--heat-low", "--diverging-high"])
      : mix(["--heat-low", "--heat-middle", "--heat-high"]);
    low.textContent = isScore ? number(-top) : "0";
    high.textContent = (isClipped ? "≥ " : isScore ? "+" : "") + number(top);
    meaning.textContent = isScore ? "signed scores" : "shade ∝ square root of the weight";
    scale.querySelector("i").className = isScore ? "signed" : "";
    for (const button of names) button.setAttribute("aria-pressed", button.dataset.map === chosen.name);
    figures.forEach((figure, index) => drawOne(figure, shown(models[index]),
      value => shade(isScore ? (value / top + 1) / 2 : Math.sqrt(Math.min(1, Math.max(0, value) / top)))));
  }
  const points = new Map();  // selected cell of each figure, kept when another map or layer is chosen
  function drawOne(figure, map, shade) {
    const canvas = figure.querySelector("canvas"), readout = figure.querySelector(".study-readout");
    const ratio = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth, margin = 30;
    const side = width - margin - 8, cell = side / length, pen = canvas.getContext("2d");
    canvas.hidden = !map;
    canvas.onpointermove = canvas.onpointerdown = canvas.onkeydown = null;
    readout.textContent = map ? "" : "This model does not have this map.";
    if (!map) return;
    const heat = document.createElement("canvas"), image = new ImageData(length, length);
    heat.width = heat.height = length;
    map.forEach((value, index) => image.data.set([...shade(value), 255], index * 4));
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
      for (let index = 0; index < length; index += index ? step : Math.max(1, step - 1)) {
        pen.textAlign = "center";
        pen.fillText(index + 1, margin + (index + 0.5) * cell, margin - 11);
        pen.textAlign = "right";
        pen.fillText(index + 1, margin - 7, margin + (index + 0.5) * cell);
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
      const box = canvas.getBoundingClientRect(), index = value => Math.floor((value - margin) / cell);
      const query = index(event.clientY - box.top), key = index(event.clientX - box.left);
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
  let lastWidth = 0;
  new ResizeObserver(() => {
    if (root.clientWidth !== lastWidth) { lastWidth = root.clientWidth; draw(); }
  }).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
