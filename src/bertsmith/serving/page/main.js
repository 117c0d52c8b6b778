// The frame of the page: models, tabs, the key, and what went wrong.

import { find, make } from "./dom.js";
import { Live } from "./live.js";
import { described, key } from "./service.js";
import { Try } from "./try.js";

const CHOSEN = "bertsmith-model", TABS = ["try", "live"];
let known = null;

function report(error) {
  const problem = find("#problem"), wantsKey = error?.status === 401;
  problem.hidden = !error || (wantsKey && !key.value);
  problem.textContent = error ? error.message : "";
  if (error && error.status === undefined) console.error(error);  // a mistake of the page's own
  find("#key").hidden = !wantsKey;
  find("#forget").hidden = !key.value || wantsKey;
  find(".links").hidden = Boolean(key.value) || wantsKey;  // a browser sends no key with a link
}

const first = new Try(report), second = new Live(find("#live"), report, name => useModel(name));

function useModel(name) {
  const model = known.models.find(one => one.name === name) || known.models[0];
  find("#model").value = model.name;
  sessionStorage.setItem(CHOSEN, model.name);
  document.title = `${model.name} · Bertsmith`;
  first.use(model);
  second.use(known.models, model);
}

function showTab() {
  const chosen = location.hash === "#live" ? "live" : "try";
  for (const name of TABS) {
    const tab = find(`#tab-${name}`), isChosen = name === chosen;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    find(`#${name}`).hidden = !isChosen || !known;
  }
  if (!known) return;
  second.turn(chosen === "live");
  if (chosen === "try") first.fields?.grow();
}

for (const name of TABS) {
  const tab = find(`#tab-${name}`);
  tab.addEventListener("click", () => { history.replaceState(null, "",
    name === "try" ? location.pathname : "#live"); showTab(); });
  tab.addEventListener("keydown", event => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = find(`#tab-${TABS[1 - TABS.indexOf(name)]}`);
    other.click();
    other.focus();
  });
}
addEventListener("hashchange", showTab);
addEventListener("resize", () => first.fields?.grow());
find("#model").addEventListener("change", event => useModel(event.target.value));
find("#key").addEventListener("submit", event => {
  event.preventDefault();
  key.value = find("#key-value").value.trim();
  begin();
});
find("#forget").addEventListener("click", () => { key.value = ""; location.reload(); });

async function begin() {
  try {
    known = await described();
  } catch (error) {
    report(error);
    if (error.status === 401) find("#key-value").focus();
    return;
  }
  report(null);
  find("#key-value").value = "";
  find("#model").replaceChildren(...known.models.map(({ name }) => make("option", { value: name, textContent: name })));
  find(".choose-model").hidden = false;
  find("#model").disabled = known.models.length < 2;
  find(".about").textContent = `Bertsmith ${known.version}`;
  useModel(sessionStorage.getItem(CHOSEN) || known.models[0].name);
  showTab();
}

showTab();
begin();
