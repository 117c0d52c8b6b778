// Sort a table by a column when its heading is clicked: numbers (cells with data-value) start descending, texts ascending.
function makeSortable(table) {
  const headers = [...table.tHead.rows[0].cells], [body] = table.tBodies;
  const OPPOSITE = { ascending: "descending", descending: "ascending" };
  headers.forEach((header, column) => header.querySelector("button").addEventListener("click", () => {
    const cell = row => row.cells[column], isNumber = "value" in cell(body.rows[0]).dataset;
    const order = OPPOSITE[header.getAttribute("aria-sort")] || (isNumber ? "descending" : "ascending");
    headers.forEach(other => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", order);
    const compare = isNumber ? (a, b) => cell(a).dataset.value - cell(b).dataset.value
      : (a, b) => cell(a).textContent.localeCompare(cell(b).textContent, "en", { numeric: true });
    body.append(...[...body.rows].sort((a, b) => (order === "ascending" ? 1 : -1) * compare(a, b)));
  }));
}

document.querySelectorAll("table.sortable").forEach(makeSortable);
