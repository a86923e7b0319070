// Nodes are made by createElement and textContent only: no text from the daemon is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  node.append(...children);
  return node;
}

// Writes only what differs: an unchanged node keeps its selection and is not painted again.
export function setText(node, text) {
  const first = node.firstChild;
  if (first === null) {
    if (text !== "") node.append(text);
  } else if (first.nodeType === Node.TEXT_NODE && first === node.lastChild) {
    if (first.data !== text) first.data = text;
  } else {
    node.textContent = text;
  }
}

// null and false remove the attribute.
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

// Children of `parent`, one for each item. A node is reused while its key exists, and moved only when the order changes.
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.keyedNodes ?? new Map();
  const keys = unique(items.map(keyOf));
  const next = new Map(keys.map((key) => [key, known.get(key)]));
  // First: a node that is moved loses the focus, and behind a removed one none has to move.
  for (const [key, node] of known) if (!next.has(key)) node.remove();
  let place = parent.firstChild;
  items.forEach((item, index) => {
    const node = next.get(keys[index]) ?? create(item);
    next.set(keys[index], node);
    update(node, item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  });
  parent.keyedNodes = next;
}

// Equal keys are counted.
function unique(keys) {
  const counts = new Map();
  return keys.map((key) => {
    const count = counts.get(key) ?? 0;
    counts.set(key, count + 1);
    return count ? `${key} #${count}` : key;
  });
}

// Commands in a message: in backticks, or at its begin up to a semicolon.
export function commandsIn(text) {
  if (text.includes("`")) return text.split("`").filter((_, index) => index % 2);
  return text.startsWith("numa-launcher ") ? [text.split(/;| \(/)[0].trimEnd()] : [];
}

// A message with its commands as <code>.
export function setMessage(node, text) {
  if (node.shownMessage === text) return;
  node.shownMessage = text;
  const [command] = commandsIn(text);
  const parts = text.includes("`") || command === undefined ? text.split("`") : ["", command, text.slice(command.length)];
  node.replaceChildren(...parts.map((part, index) => (index % 2 ? element("code", {}, part) : part)));
}
