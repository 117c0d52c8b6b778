// Element builders, which set user input as text and never as markup, and number formatting.

const ATTRIBUTES = /^(aria-|data-|role$|for$|viewBox$|d$|x\d?$|y\d?$|cx$|cy$|r$|width$|height$|preserveAspectRatio$)/;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.setAttribute("class", value);
    else if (name === "set") for (const property in value) element.style.setProperty(property, value[property]);
    else if (ATTRIBUTES.test(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

export const find = (selector, root = document) => root.querySelector(selector);
export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export const note = text => make("p", { class: "quiet", textContent: text });

const integerFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const percent = share => {
  const value = 100 * share;
  return value > 0 && value < 0.1 ? "<0.1 %"
    : `${value >= 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(1)} %`;
};
export const integer = number => integerFormat.format(number);
export const decimal = (number, digits = 2) => number.toFixed(digits).replace("-", "−");
export const plural = (count, noun) => `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;
export const short = number =>
  number >= 1e9 ? `${(number / 1e9).toPrecision(3)} B` : number >= 1e6 ? `${(number / 1e6).toPrecision(3)} M`
    : number >= 1e4 ? `${(number / 1e3).toPrecision(3)} k` : number >= 100 || Number.isInteger(number) ? integer(number)
      : number.toPrecision(2);
export const milliseconds = seconds => {
  const value = 1000 * seconds;
  return value >= 9999.5 ? `${seconds.toFixed(1)} s`
    : `${value >= 100 ? value.toFixed(0) : value.toPrecision(value < 1 ? 2 : 3)} ms`;
};
export const signed = (number, digits) => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(digits)}`;
export const titleCase = name => {
  const words = name.replace(/_+/g, " ").replace(/([a-z])(\d)/g, "$1 $2").trim();
  return words.charAt(0).toUpperCase() + words.slice(1);
};
export const median = numbers => {
  const sorted = [...numbers].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};
