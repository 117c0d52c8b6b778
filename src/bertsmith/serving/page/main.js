// Frame of the page: model selection, tabs, API key and error messages.

import { find, make } from "./dom.js";
import { Live } from "./live.js";
import { fetchModels, key } from "./service.js";
import { Try } from "./try.js";

const MODEL_KEY = "bertsmith-model", TABS = ["try", "live"];
let service = null;  // version and models, once loaded

function report(error) {
  const problem = find("#problem"), needsKey = error?.status === 401;
  problem.hidden = !error || (needsKey && !key.value);
  problem.textContent = error ? error.message : "";
  if (error && error.status === undefined) console.error(error);  // a bug of this page
  find("#key").hidden = !needsKey;
  find("#forget").hidden = !key.value || needsKey;
  find(".links").hidden = Boolean(key.value) || needsKey;  // browsers send no key with a link
}

const tryTab = new Try(report), liveTab = new Live(find("#live"), report, name => useModel(name));

function useModel(name) {
  const model = service.models.find(one => one.name === name) || service.models[0];
  find("#model").value = model.name;
  sessionStorage.setItem(MODEL_KEY, model.name);
  document.title = `${model.name} · Bertsmith`;
  tryTab.use(model);
  liveTab.use(service.models, model);
}

function showTab() {
  const selected = location.hash === "#live" ? "live" : "try";
  for (const name of TABS) {
    const tab = find(`#tab-${name}`), isSelected = name === selected;
    tab.setAttribute("aria-selected", isSelected);
    tab.tabIndex = isSelected ? 0 : -1;
    find(`#${name}`).hidden = !isSelected || !service;
  }
  if (!service) return;
  liveTab.toggle(selected === "live");
  if (selected === "try") tryTab.fields?.fitHeight();
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
addEventListener("resize", () => tryTab.fields?.fitHeight());
find("#model").addEventListener("change", event => useModel(event.target.value));
find("#key").addEventListener("submit", event => {
  event.preventDefault();
  key.value = find("#key-value").value.trim();
  start();
});
find("#forget").addEventListener("click", () => { key.value = ""; location.reload(); });

async function start() {
  try {
    service = await fetchModels();
  } catch (error) {
    report(error);
    if (error.status === 401) find("#key-value").focus();
    return;
  }
  report(null);
  find("#key-value").value = "";
  find("#model").replaceChildren(...service.models.map(({ name }) =>
    make("option", { value: name, textContent: name })));
  find(".choose-model").hidden = false;
  find("#model").disabled = service.models.length < 2;
  find(".version").textContent = `Bertsmith ${service.version}`;
  useModel(sessionStorage.getItem(MODEL_KEY) || service.models[0].name);
  showTab();
}

showTab();
start();
