// List the examples of the selected cell of a confusion matrix; it starts with the most frequent error.
for (const root of document.querySelectorAll(".confusion")) {
  const rows = JSON.parse(root.querySelector(".confusion-data").textContent);
  const list = root.querySelector(".cell-rows"), buttons = [...root.querySelectorAll("td button")];
  const position = button => button.dataset.cell.split(",").map(Number);
  const number = button => +button.dataset.count.replaceAll(",", "");
  const make = (tag, className, ...children) => {
    const element = document.createElement(tag);
    element.className = className;
    element.append(...children);
    return element;
  };
  const labelled = (className, name, value) =>
    make("span", className, make("small", "", name), make("b", "", value));

  function choose(button) {
    const { label, predicted, count, cell } = button.dataset, isCorrect = label === predicted;
    const shown = rows[cell], isCut = shown.length < number(button);
    const which = isCut ? `, the ${shown.length} ${isCorrect ? "least" : "most"} confident` : ", by confidence";
    const heading = make("p", `cell-heading ${isCorrect ? "correct" : "error"}`, labelled("target", "true", label),
      labelled("prediction", "predicted", predicted),
      make("span", "count", `${count} ${count === "1" ? "example" : `examples${which}`}`));
    const entry = ([before, word, after, confidence]) => make("li", "",
      make("span", "", before, ...(word ? [" ", make("mark", "", word), " "] : []), after), make("small", "", confidence));
    list.replaceChildren(heading, make("ol", "", ...shown.map(entry)));
    for (const other of buttons) {
      other.setAttribute("aria-pressed", other === button);
      other.tabIndex = other === button ? 0 : -1;  // one Tab stop; the arrow keys move between cells
    }
  }

  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  // The nearest cell in the direction of an arrow key; empty cells are skipped.
  function next(button, [down, right]) {
    const [row, column] = position(button);
    const ahead = buttons.map(other => ({ other, at: position(other) }))
      .map(({ other, at }) => ({ other, along: (at[0] - row) * down + (at[1] - column) * right,
        across: Math.abs((at[0] - row) * right) + Math.abs((at[1] - column) * down) }))
      .filter(one => one.along > 0).sort((a, b) => a.across - b.across || a.along - b.along);
    return ahead[0]?.other;
  }
  for (const button of buttons) {
    button.onclick = () => choose(button);
    button.onkeydown = event => {
      const step = STEPS[event.key], target = step && next(button, step);
      if (!step) return;
      event.preventDefault();
      if (target) { choose(target); target.focus(); }
    };
  }
  const errors = buttons.filter(button => button.dataset.label !== button.dataset.predicted);
  const first = (errors.length ? errors : buttons).sort((a, b) => number(b) - number(a))[0];
  if (first) choose(first);
}
