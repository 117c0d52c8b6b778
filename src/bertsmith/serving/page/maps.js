// The maps of the text at hand, asked for only while they are open.

import { find, make } from "./dom.js";
import { explore } from "./explorer.js";

export class Maps {
  constructor(changed) {
    this.section = find(".attending");
    this.place = find("#maps");
    this.note = find(".maps-note");
    this.choice = find(".which-sequence");
    this.button = find(".show-maps");
    this.isOpen = false;
    this.kept = {};
    this.button.addEventListener("click", () => {
      this.isOpen = !this.isOpen;
      this.button.setAttribute("aria-expanded", this.isOpen);
      this.button.textContent = this.isOpen ? "Hide them" : "Show the maps";
      if (!this.isOpen) this.clear();
      changed();
    });
    find("select", this.choice).addEventListener("change", changed);
  }

  // Another model has other layers and heads.
  reset(model) {
    this.section.hidden = !model.maps;
    this.kept = {};
    this.clear();
  }

  // Which of so many sequences; one that is gone gives way to the last.
  sequence(count) { return this.isOpen ? Math.min(count - 1, +(find("select", this.choice).value || 0)) : 0; }

  clear() {
    this.end?.();
    this.end = null;
    this.place.replaceChildren();
    this.place.hidden = this.note.hidden = this.choice.hidden = true;
  }

  show({ maps, maps_refused: refused, sequences }, names, sequence) {
    if (!this.isOpen) return;
    const select = find("select", this.choice);
    this.choice.hidden = sequences < 2;
    select.replaceChildren(...Array.from({ length: sequences }, (_, index) => make("option",
      { value: index, textContent: names?.[index] ?? `sequence ${index + 1}` })));
    select.value = sequence;
    this.note.hidden = !refused;
    this.note.textContent = refused || "";
    this.end?.();
    this.end = null;
    this.place.hidden = !maps;
    if (!maps) { this.place.replaceChildren(); return; }
    // The markup is the service's own and holds nothing of the text; what is inside comes from the data, as text.
    const parsed = new DOMParser().parseFromString(maps.markup, "text/html");
    this.place.replaceChildren(...parsed.body.childNodes);
    this.end = explore(this.place, maps.data, this.kept);
  }
}
