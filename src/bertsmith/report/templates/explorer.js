// Draw the maps of `data` into the markup of explorer.html inside `root`; return a function that removes all listeners.
// `state` holds the selection; pass the same object for the next text to keep the selected head. makeSortable is in
// tables.js, which pages load before this file.
function explore(root, data, state = {}) {
  const find = selector => root.querySelector(selector), abort = new AbortController();
  const { tokens, layers } = data, length = tokens.length, AVERAGE = -1;
  const total = numbers => numbers.reduce((sum, number) => sum + number, 0);
  // `starts` is the index of the first head of every layer among all heads of a map.
  const maps = data.maps.map(one => ({ ...one, maxHeads: Math.max(...one.heads),
    starts: one.heads.map((_, layer) => total(one.heads.slice(0, layer))),
    bytes: Uint8Array.from(atob(one.levels), letter => letter.charCodeAt(0)) }));
  const text = tokens.join(" "), isFirst = state.layer === undefined;
  const before = { map: 0, view: "map", ...state }, map = maps[before.map] ? before.map : 0;
  const layer = isFirst ? null : Math.min(before.layer, layers - 1), head = isFirst || before.head === AVERAGE ? null : before.head;
  const cell = state.text === text ? {} : strongest(maps[map], layer, head);
  const chosen = Object.assign(state, before, { text, map, layer, head: before.head }, isFirst ? cell
    : { query: cell.query ?? before.query, key: cell.key ?? before.key });

  // The cell with the greatest weight or score between two different words, in a layer and head if these are given: most
  // heads attend to themselves and to special tokens such as [CLS] anyway.
  function strongest({ bytes, heads, starts, isScore }, onlyLayer, onlyHead) {
    const isWord = tokens.map(token => !/^(\[[A-Z]+\d*\]|<[/|a-z_]+>)$/.test(token)), size = length * length;
    const best = { layer: Math.max(0, heads.findIndex(Boolean)), head: 0, query: Math.min(1, length - 1),
      key: Math.min(1, length - 1) };
    let highest = 0;
    for (let layer = onlyLayer ?? 0; layer <= (onlyLayer ?? layers - 1); layer++)
      for (let head = onlyHead ?? 0; head <= Math.min(onlyHead ?? Infinity, heads[layer] - 1); head++)
        for (let query = 0; query < length; query++)
          for (let key = 0; key < length; key++) {
            const byte = bytes[(starts[layer] + head) * size + query * length + key];
            const value = isScore ? Math.abs(byte - 128) : byte;
            if (value > highest && query !== key && isWord[query] && isWord[key]) {
              highest = value;
              Object.assign(best, { layer, head, query, key });
            }
          }
    return best;
  }

  const layerChoice = find(".choose-layer"), headChoice = find(".choose-head"), grid = find(".attention-grid");
  const stage = find(".attention-stage"), readout = find(".attention-readout");
  const rows = [...root.querySelectorAll(".attention-table tbody tr")];
  const views = [...root.querySelectorAll(".attention-views button")];
  const mapChoices = [...root.querySelectorAll(".attention-maps button")];
  const make = (tag, attributes, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
      if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
      else element[name] = value;
    element.append(...children);
    return element;
  };
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const formatted = value => maps[chosen.map].isScore ? value.toFixed(2).replace("-", "−")
    : value < 0.005 ? "under 0.01" : value.toFixed(2);
  const shorten = (token, limit) => token.length > limit ? token.slice(0, limit - 1) + "…" : token;

  // Weights lie between 0 and 1, scores between −scale and +scale of the map.
  function values(layer, head) {
    const { bytes, heads, starts, isScore, scale } = maps[chosen.map], count = heads[layer], size = length * length;
    const read = isScore ? byte => (byte - 128) / 127 * scale : byte => byte / 255;
    const one = index => bytes.subarray((starts[layer] + index) * size, (starts[layer] + index + 1) * size);
    if (head !== AVERAGE) return Float32Array.from(one(head), read);
    const sum = new Float32Array(size);
    for (let other = 0; other < count; other++)
      one(other).forEach((byte, cell) => { sum[cell] += read(byte) / count; });
    return sum;
  }
  const strength = value => Math.abs(value) / maps[chosen.map].scale;

  // The shade of a weight is proportional to its square root, because most weights are small. Scores have two colours,
  // linear from zero.
  let shades = {};
  function mixShades() {
    const mixed = (names, position) => {
      const stops = names.map(colour).map(hex => [1, 3, 5].map(start => parseInt(hex.slice(start, start + 2), 16)));
      return Array.from({ length: 256 }, (_, level) => {
        const at = 2 * position(level), from = Math.min(1, Math.floor(at));
        return stops[from].map((low, channel) => low + (stops[from + 1][channel] - low) * (at - from));
      });
    };
    shades = { weights: mixed(["--heat-low", "--heat-middle", "--heat-high"], level => Math.sqrt(level / 255)),
      scores: mixed(["--diverging-low", "--heat-low", "--diverging-high"], level => Math.max(0, level - 1) / 254) };
  }
  function paint(canvas, map) {
    const { isScore, scale } = maps[chosen.map], mixed = isScore ? shades.scores : shades.weights;
    const level = isScore ? value => 128 + Math.round(value / scale * 127) : value => Math.round(value * 255);
    canvas.width = canvas.height = length;
    const image = new ImageData(length, length);
    map.forEach((value, cell) => image.data.set([...mixed[level(value)], 255], cell * 4));
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  const thumbnails = [];
  function buildGrid() {
    const { heads, maxHeads } = maps[chosen.map];
    thumbnails.length = 0;
    grid.replaceChildren(make("span", {}));
    grid.style.gridTemplateColumns = `1.9em repeat(${maxHeads}, minmax(0, 116px))`;
    grid.style.gap = maxHeads > 6 ? "3px" : "9px";
    for (let head = 0; head < maxHeads; head++) grid.append(make("span", { textContent: head + 1 }));
    for (let layer = 0; layer < layers; layer++)
      for (let head = AVERAGE; head < maxHeads; head++) {
        if (head >= heads[layer] || !heads[layer]) {  // layers may differ in heads or lack the map
          grid.append(make("span", { textContent: head === AVERAGE ? layer + 1 : "" }));
          continue;
        }
        const label = `Layer ${layer + 1}, ${head === AVERAGE ? "average of its heads" : "head " + (head + 1)}`;
        const button = make("button", { type: "button", "aria-label": label, title: label });
        const canvas = make("canvas", { style: length < 24 ? "image-rendering: pixelated" : "" });
        button.onclick = () => choose({ layer, head });
        if (head === AVERAGE) { button.className = "layer"; button.textContent = layer + 1; }
        else button.append(paint(canvas, values(layer, head)));
        thumbnails.push({ button, layer, head });
        grid.append(button);
      }
    const option = (layer, count) => make("option", { value: layer, textContent: layer + 1, disabled: !count });
    layerChoice.replaceChildren(...heads.map((count, layer) => option(layer, count)));
    for (const one of root.querySelectorAll(".attention-scale, .attention-table"))
      one.hidden = +one.dataset.map !== chosen.map;
    mapChoices.forEach((button, index) => button.setAttribute("aria-pressed", index === chosen.map));
  }
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  grid.addEventListener("keydown", event => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const { heads } = maps[chosen.map];
    let layer = chosen.layer + step[0];
    while (layer >= 0 && layer < layers && !heads[layer]) layer += step[0];  // skip layers that lack the map
    if (layer < 0 || layer >= layers) layer = chosen.layer;
    choose({ layer, head: clamp(chosen.head + step[1], AVERAGE, heads[layer] - 1) });
    thumbnails.find(one => one.layer === chosen.layer && one.head === chosen.head).button.focus();
  });

  function drawMap(map) {
    const canvas = make("canvas", { className: "attention-map", tabIndex: 0, role: "img",
      "aria-label": "Map: rows attend to columns. Use the arrow keys to move the selected cell." });
    stage.replaceChildren(canvas);
    const pen = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    const names = tokens.map(token => shorten(token, 12)), longest = Math.max(...names.map(name => name.length));
    const setFont = pixels => { pen.font = `${pixels}px ${colour("--mono")}`; };
    const room = pixels => { setFont(pixels); return Math.ceil(pen.measureText("m".repeat(longest)).width) + 8; };
    const letters = clamp((stage.clientWidth - room(10)) / length - 0.5, 10, 12.5), margin = room(letters);
    const cell = Math.min(52, (stage.clientWidth - margin) / length), side = margin + cell * length;
    const heat = paint(document.createElement("canvas"), map), stride = Math.ceil((letters - 0.5) / cell);
    Object.assign(canvas, { width: side * ratio, height: side * ratio });
    canvas.style.width = canvas.style.height = side + "px";
    function draw() {
      const { query, key } = chosen, value = map[query * length + key];
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, side, side);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(heat, margin, margin, cell * length, cell * length);
      setFont(letters);
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      // Leave out labels that would overlap another one or the selected one.
      const labels = (pointed, direction) => names.forEach((name, index) => {
        if (index !== pointed && (index % stride || Math.abs(index - pointed) * cell < letters - 0.5)) return;
        pen.fillStyle = colour(index === pointed ? "--accent" : "--muted");
        pen.fillText(name, -6, direction * (index + 0.5) * cell);
      });
      pen.translate(margin, margin);
      labels(query, 1);
      pen.rotate(Math.PI / 2);  // rotated, the upper edge runs backwards
      labels(key, -1);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.strokeStyle = colour("--series-2");
      pen.lineWidth = 1.5;
      pen.strokeRect(margin + key * cell, margin + query * cell, cell, cell);
      readout.textContent = `${tokens[query]} (${query + 1}) → ${tokens[key]} (${key + 1}): ${formatted(value)}`;
    }
    const point = (query, key) => {
      Object.assign(chosen, { query: clamp(query, 0, length - 1), key: clamp(key, 0, length - 1) });
      draw();
    };
    canvas.onpointermove = canvas.onpointerdown = event => {
      const box = canvas.getBoundingClientRect(), index = value => Math.floor((value - margin) / cell);
      const query = index(event.clientY - box.top), key = index(event.clientX - box.left);
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
      // every pair has a score, so only strong ones are drawn
      const { isScore } = maps[chosen.map], threshold = isScore ? 0.5 : 0.05;
      map.forEach((value, cell) => {
        if (strength(value) > threshold) line(Math.floor(cell / length), cell % length, 0.3 * strength(value), 1);
      });
      const values = map.subarray(query * length, (query + 1) * length);
      values.forEach((value, key) => {
        const weight = strength(value), grown = isScore ? weight : Math.sqrt(weight);
        const tone = !isScore ? "--accent" : value < 0 ? "--diverging-low" : "--diverging-high";
        pen.strokeStyle = colour(tone);
        if (weight > (isScore ? 0.05 : 0.005)) line(query, key, grown, 1 + 3 * weight);
        right[key].style.background = `color-mix(in srgb, var(${tone}) ${Math.round(65 * grown)}%, transparent)`;
      });
      left.forEach((button, index) => button.setAttribute("aria-pressed", index === query));
      const strongest = [...values.keys()].sort((a, b) => strength(values[b]) - strength(values[a])).slice(0, 3);
      const texts = strongest.map(key => `${tokens[key]} (${key + 1}): ${formatted(values[key])}`);
      readout.textContent = `${tokens[query]} (${query + 1}) → ${texts.join(", ")}`;
    }
    point(chosen.query);
  }

  function draw() {
    (chosen.view === "map" ? drawMap : drawLines)(values(chosen.layer, chosen.head));
  }
  function choose(change) {
    Object.assign(chosen, change);
    const { heads } = maps[chosen.map];
    if (!heads[chosen.layer]) chosen.layer = heads.findIndex(Boolean);
    chosen.head = Math.min(chosen.head, heads[chosen.layer] - 1);
    if ("map" in change) buildGrid();
    layerChoice.value = chosen.layer;
    const numbers = Array.from({ length: heads[chosen.layer] }, (_, head) => head);
    // replacing the options would close an open list
    if (headChoice.length !== numbers.length + 1) headChoice.replaceChildren(
      make("option", { value: AVERAGE, textContent: "average" }),
      ...numbers.map(head => make("option", { value: head, textContent: head + 1 })));
    headChoice.value = chosen.head;
    for (const { button, layer, head } of thumbnails) {
      const isChosen = layer === chosen.layer && head === chosen.head;
      button.setAttribute("aria-pressed", isChosen);
      button.tabIndex = isChosen ? 0 : -1;  // one Tab stop; the arrow keys move inside the grid
    }
    for (const row of rows)
      row.classList.toggle("chosen", +row.dataset.layer === chosen.layer && +row.dataset.head === chosen.head);
    for (const button of views) button.setAttribute("aria-pressed", button.dataset.view === chosen.view);
    draw();
  }
  function repaint() {
    mixShades();
    choose({ map: chosen.map });
  }

  layerChoice.onchange = () => choose({ layer: +layerChoice.value });
  headChoice.onchange = () => choose({ head: +headChoice.value });
  mapChoices.forEach((button, map) => { button.onclick = () => choose({ map }); });
  for (const button of views) button.onclick = () => choose({ view: button.dataset.view });
  for (const row of rows)
    row.querySelector("button").onclick = () => choose({ layer: +row.dataset.layer, head: +row.dataset.head });
  root.querySelectorAll(".attention-table table").forEach(makeSortable);
  for (const cell of root.querySelectorAll("td.share")) cell.style.setProperty("--share", cell.dataset.value);
  let lastWidth = 0;
  const observer = new ResizeObserver(() => {
    if (stage.clientWidth !== lastWidth) { lastWidth = stage.clientWidth; draw(); }
  });
  observer.observe(stage);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint, { signal: abort.signal });
  repaint();
  return () => { observer.disconnect(); abort.abort(); };
}

// Reports contain the data; the service calls `explore` itself.
for (const data of document.querySelectorAll(".attention-data"))
  explore(data.parentElement, JSON.parse(data.textContent));
