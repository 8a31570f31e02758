// Making and changing elements. Whatever comes from the gateway becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

// el("td", {class: "number"}, "12"): children are nodes or texts; null and false are left out.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== false && child !== undefined) node.append(child);
  }
  return node;
}

export const at = (id) => document.getElementById(id);

// Change only what is different: the browser need not lay out what stays.
export function say(node, text) {
  const told = String(text ?? "");
  if (node.textContent !== told) node.textContent = told;
}

export function mark(node, name, value) {
  const told = value === null || value === undefined ? null : String(value);
  if (node.getAttribute(name) === told) return;
  if (told === null) node.removeAttribute(name);
  else node.setAttribute(name, told);
}

export function put(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== false && child !== undefined));
}

// A table: columns are [title, class, cell of a row]; class "extra" is left out on a phone.
export function table(caption, columns, rows, attributes = () => ({})) {
  const head = columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title));
  const body = rows.map((row) => {
    const cells = columns.map(([, kind, cell]) => el("td", { class: kind }, cell(row)));
    return el("tr", attributes(row), cells);
  });
  return el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

export const NOTHING = "–";

export function percent(share, digits = 0) {
  return share === null || share === undefined ? NOTHING : `${(share * 100).toFixed(digits)} %`;
}

export function count(number) {
  if (number === null || number === undefined) return NOTHING;
  if (number >= 1e7) return `${(number / 1e6).toFixed(0)} M`;
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)} M`;
  if (number >= 1e5) return `${(number / 1e3).toFixed(0)} k`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)} k`;
  return Math.round(number).toLocaleString("en");
}

export function ms(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function bytes(number) {
  if (number === null || number === undefined) return NOTHING;
  return number >= 2 ** 30 ? `${(number / 2 ** 30).toFixed(1)} GiB` : `${(number / 2 ** 20).toFixed(0)} MiB`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}
