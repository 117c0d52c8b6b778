// Attention maps of the current text, requested only while they are shown.

import { find, make } from "./dom.js";
import { explore } from "./explorer.js";

export class Maps {
  constructor(onChange) {
    this.section = find(".attention-section");
    this.container = find("#maps");
    this.note = find(".maps-note");
    this.selector = find(".which-sequence");
    this.button = find(".show-maps");
    this.isOpen = false;
    this.view = {};  // layer, head and map kind, kept from text to text
    this.button.addEventListener("click", () => {
      this.isOpen = !this.isOpen;
      this.button.setAttribute("aria-expanded", this.isOpen);
      this.button.textContent = this.isOpen ? "Hide attention maps" : "Show attention maps";
      if (!this.isOpen) this.clear();
      onChange();
    });
    find("select", this.selector).addEventListener("change", onChange);
  }

  // Another model has other layers and heads.
  reset(model) {
    this.section.hidden = !model.maps;
    this.view = {};
    this.clear();
  }

  // Index of the selected sequence, at most the last of `count`.
  sequence(count) { return this.isOpen ? Math.min(count - 1, +(find("select", this.selector).value || 0)) : 0; }

  clear() {
    this.stop?.();
    this.stop = null;
    this.container.replaceChildren();
    this.container.hidden = this.note.hidden = this.selector.hidden = true;
  }

  show({ maps, maps_refused: refused, sequences }, names, sequence) {
    if (!this.isOpen) return;
    const select = find("select", this.selector);
    this.selector.hidden = sequences < 2;
    select.replaceChildren(...Array.from({ length: sequences }, (_, index) => make("option",
      { value: index, textContent: names?.[index] ?? `${index + 1} of ${sequences}` })));
    select.value = sequence;
    this.note.hidden = !refused;
    this.note.textContent = refused || "";
    this.stop?.();
    this.stop = null;
    this.container.hidden = !maps;
    if (!maps) { this.container.replaceChildren(); return; }
    // The markup comes from the service and contains no user input; tokens are in the data and set as text.
    const parsed = new DOMParser().parseFromString(maps.markup, "text/html");
    this.container.replaceChildren(...parsed.body.childNodes);
    this.stop = explore(this.container, maps.data, this.view);
  }
}
