/* A leading dash means "without" to the search engine; here it begins a flag. */
document.addEventListener("input", (event) => {
  if (event.target.matches(".md-search__input")) {
    event.target.value = event.target.value.replace(/(^|\s)-+/g, "$1");
  }
}, true);
