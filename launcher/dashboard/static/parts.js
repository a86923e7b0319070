// Parts that several views have. Each has a `node` and a function that shows new content in it.

import { element, keyed, setAttribute, setMessage, setText } from "./dom.js";

// A table: heads are [label, class], rows arrays of texts or links {text, href}. Rows are keyed by their first text.
export function dataTable(caption, heads) {
  const body = element("tbody");
  const head = element("tr", {}, ...heads.map(([label, name]) => element("th", { scope: "col", class: name }, label)));
  const table = element(
    "table",
    {},
    element("caption", { class: "visually-hidden" }, caption),
    element("thead", {}, head),
    body,
  );
  const node = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
  function create() {
    return element(
      "tr",
      {},
      ...heads.map(([, name], index) => element(index ? "td" : "th", { class: name, scope: index ? null : "row" })),
    );
  }
  function update(row, cells) {
    cells.forEach((cell, index) => showCell(row.children[index], cell));
  }
  return { node, show: (rows) => keyed(body, rows, ([first]) => first.text ?? first, create, update) };
}

function showCell(node, cell) {
  if (typeof cell === "string") {
    setText(node, cell);
    return;
  }
  if (node.firstChild === null) node.append(element("a"));
  setText(node.firstChild, cell.text);
  setAttribute(node.firstChild, "href", cell.href);
}

// Facts: pairs of a name and a text. Those in `wide` take two columns.
export function factList(wide = []) {
  const node = element("dl", { class: "facts" });
  const create = ([name]) =>
    element("div", { class: wide.includes(name) ? "wide" : null }, element("dt", {}, name), element("dd"));
  const update = (fact, [, text]) => setText(fact.lastChild, text);
  return { node, show: (pairs) => keyed(node, pairs, ([name]) => name, create, update) };
}

// Why something cannot be shown; hidden without a text.
export function troubleNote() {
  const node = element("p", { class: "trouble", hidden: true });
  function show(text) {
    setAttribute(node, "hidden", !text);
    setMessage(node, text ?? "");
  }
  return { node, show };
}

export function panel(name, ...nodes) {
  return element("section", { class: "panel" }, element("h2", {}, name), ...nodes);
}

export function titleOf(view) {
  return element("h2", { id: `${view}-title`, tabindex: "-1", "data-view-title": "" });
}

export function backLink() {
  return element("p", { class: "back" }, element("a", { href: "#/" }, "← Overview"));
}
