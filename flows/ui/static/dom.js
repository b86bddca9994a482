/* Elements, colours and numbers. What a run holds becomes text nodes, never markup. */

const COLORS = ["#3b76d0", "#e07b39", "#2f9e6e", "#c74b7d", "#8a63c9", "#a88a1f", "#3aa5b8", "#8c8f96", "#8ab4f0",
  "#f0b48a", "#8fd0b0", "#e79ab8"];

export const color = index => COLORS[index % COLORS.length];
export const at = id => document.getElementById(id);

/** An element with properties (`data-` and `aria-` names become attributes) and children; text stays text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function dot(index) {
  const element = make("span", {className: "dot", "aria-hidden": "true"});
  element.style.background = color(index);
  return element;
}

/** Replace the options of a select by [value, text] pairs and choose one. */
export function options(select, pairs, chosen) {
  const now = [...select.options].map(option => `${option.value}\n${option.text}`).join("\n");
  if (now !== pairs.map(([value, text]) => `${value}\n${text}`).join("\n")) {
    select.replaceChildren(...pairs.map(([value, text]) => make("option", {value}, text)));
  }
  select.value = chosen;
}

/** Say what could not be read. */
export function damages(place, texts) {
  at(place).replaceChildren(...texts.map(text => make("p", {role: "alert"}, `Left out, because it could not be read: ${text}`)));
}

export const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(digits)));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${number(seconds, seconds < 10 ? 2 : 3)} s`;
}
