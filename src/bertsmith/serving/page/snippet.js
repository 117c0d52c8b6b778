// The current request as a command or as Python, to copy into a program.

import { find } from "./dom.js";
import { key } from "./service.js";

const ENDPOINTS = { task: "predict", vectors: "embed", fill_mask: "fill-mask" };
const COPIED_TIME = 1500;  // milliseconds

const quote = text => `'${text.replaceAll("'", "'\\''")}'`;

const LANGUAGES = {
  curl: (url, body) => [`curl ${quote(url)}`, "-H 'Content-Type: application/json'",
    ...(key.value ? ['-H "Authorization: Bearer $BERTSMITH_KEY"'] : []), `-d ${quote(body)}`].join(" \\\n  "),
  python: (url, body) => ["import os", "import requests", "",
    "response = requests.post(", `    ${JSON.stringify(url)},`, `    json=${body},`,
    ...(key.value ? ['    headers={"Authorization": "Bearer " + os.environ["BERTSMITH_KEY"]},'] : []), ")",
    "response.raise_for_status()", "print(response.json())"].filter(line => key.value || line !== "import os").join("\n"),
};

export class Snippet {
  constructor(element) {
    this.code = find("code", element);
    this.buttons = [...element.querySelectorAll("[data-language]")];
    for (const button of this.buttons) button.addEventListener("click", () => this.choose(button.dataset.language));
    const copy = find(".copy", element);
    copy.hidden = !navigator.clipboard;  // only on localhost and over https
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(this.code.textContent);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, COPIED_TIME);
    });
    this.choose("curl");
  }

  choose(language) {
    this.language = language;
    for (const button of this.buttons) button.setAttribute("aria-pressed", button.dataset.language === language);
    this.render();
  }

  // Sizes other than the whole model have an endpoint of their own.
  show(model, work, inputs, sizes) {
    const body = { model: model.name, inputs: inputs ?? "" };
    this.request = sizes.isWhole ? { path: ENDPOINTS[work], body }
      : { path: "explore", body: { ...body, work, width: sizes.width, depth: sizes.depth } };
    this.render();
  }

  render() {
    if (!this.request) return;
    const { path, body } = this.request, url = new URL(path, document.baseURI).href;
    this.code.textContent = LANGUAGES[this.language](url, JSON.stringify(body));
  }
}
