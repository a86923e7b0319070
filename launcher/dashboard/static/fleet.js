// All hosts of the fleet, as the ingress of this host sees them.

import { NONE, absent, count, seconds, share } from "./format.js";
import { element, keyed, setAttribute, setText } from "./dom.js";
import { factList, titleOf } from "./parts.js";

// Sign, level, and place in the order of what needs a look
const STATES = {
  ready: ["●", "good", 5],
  draining: ["◑", "warn", 4],
  lost: ["▲", "warn", 2],
  down: ["✕", "bad", 0],
  "no daemon": ["✕", "bad", 0],
};
const NAMES = new Intl.Collator("en", { numeric: true });

// by: what it is sorted by, a field or a function of a host, largest first if it is shown with `show`; text: of a host;
// level: of the cell; bar: drawn below the text, of the whole or of the largest.
const COLUMNS = [
  { head: "HOST", label: "Host", meaning: "Its name, a link to its own dashboard", by: "name" },
  { head: "STATE", label: "State", meaning: "What needs a look comes first", by: rank },
  { head: "READY", label: "Ready", meaning: "Ready instances", right: true, text: ready, by: readyShare, level: readyLevel },
  { head: "RUNNING", label: "Running", meaning: "Requests in progress", by: "running", show: count },
  { head: "WAITING", label: "Waiting", meaning: "Requests in its queues", by: "waiting", show: count },
  { head: "TTFT", label: "TTFT", meaning: "Predicted for a new request", by: "predicted_ttft_s", show: seconds },
  { head: "KV", label: "KV", meaning: "Use of the KV caches", by: "kv_usage", show: share, bar: "whole" },
  { head: "SHARE", label: "Share", meaning: "Of the last minute's new requests", by: "share", show: share, bar: "largest" },
  { head: "SLOW", label: "Slow", meaning: "Where first tokens come late", text: slow, by: isFast, level: slowLevel },
  { head: "ADDRESS", label: "Address", meaning: "Of its daemon", text: ({ address }) => address, by: "address" },
];

export function mount(root, store) {
  const title = titleOf("fleet");
  setText(title, "Hosts of the fleet");
  const facts = factList(["Endpoint"]);
  const body = element("tbody");
  let order = { head: "STATE", down: false };
  const heads = COLUMNS.map((column) => newHead(column, () => sortBy(column)));
  const table = element("table", { "data-fleet": "" }, element("thead", {}, element("tr", {}, ...heads)), body);
  root.append(
    title,
    facts.node,
    element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Table of hosts" }, table),
  );

  function sortBy(column) {
    order = { head: column.head, down: order.head === column.head ? !order.down : "show" in column };
    draw();
  }

  function draw() {
    const { fleet } = store.state;
    heads.forEach((node, index) => {
      const direction = order.down ? "descending" : "ascending";
      setAttribute(node, "aria-sort", COLUMNS[index].head === order.head ? direction : null);
    });
    if (fleet === null) return;
    facts.show(factsOf(fleet));
    const focused = document.activeElement;
    const largest = Math.max(0, ...fleet.hosts.map((host) => host.share ?? 0));
    keyed(body, sorted(fleet.hosts, order), ({ name }) => name, newRow, (row, host) => showRow(row, host, largest));
    // A row that was moved has lost it.
    if (focused !== document.activeElement && body.contains(focused)) focused.focus({ preventScroll: true });
  }

  store.subscribe((_, changed) => {
    if (changed.has("fleet")) draw();
  });
}

// By a column and, among equals, by name.
export function sorted(hosts, { head, down }) {
  const { by } = COLUMNS.find((column) => column.head === head);
  const of = typeof by === "string" ? (host) => host[by] : by;
  return hosts.toSorted((a, b) => compared(of(a), of(b), down ? -1 : 1) || NAMES.compare(a.name, b.name));
}

// What is not known comes last, whichever the direction.
function compared(a, b, sign) {
  if (absent(a) || absent(b)) return Number(absent(a)) - Number(absent(b));
  return sign * (typeof a === "string" ? NAMES.compare(a, b) : a - b);
}

function rank(host) {
  const place = STATES[host.state]?.[2] ?? 0;
  if (host.state === "ready" && host.ready === 0) return 1;
  return host.slow ? Math.min(place, 3) : place;
}

function ready(host) {
  return absent(host.ready) ? NONE : `${count(host.ready)}/${count(host.instances)}`;
}

function readyShare(host) {
  return absent(host.ready) ? null : host.instances ? host.ready / host.instances : 0;
}

function readyLevel(host) {
  return host.ready === 0 ? "bad" : host.ready < host.instances ? "warn" : null;
}

function slow(host) {
  return host.slow || NONE;
}

function isFast(host) {
  return Number(host.slow === "");
}

function slowLevel(host) {
  return host.slow ? "warn" : null;
}

function factsOf({ endpoints, ingress }) {
  const facts = [["Endpoint", endpoints.join(" or ") || NONE]];
  if (ingress === null) return facts;
  const role = ingress.decides ? "chooses hosts" : "not asked now: no requests, or the other ingress chooses";
  return [
    ...facts,
    ["Ingress of this host", role],
    ["Requests", `${count(ingress.asked)} so far, ${count(ingress.held)} held now`],
    ["Member list", ingress.members],
  ];
}

function classOf({ right, show }) {
  return right || show ? "right" : null;
}

function newHead(column, sort) {
  const { head, label, meaning } = column;
  const button = element("button", { type: "button", class: "sort" }, label);
  button.addEventListener("click", sort);
  return element("th", { scope: "col", "data-column": head, title: meaning, class: classOf(column) }, button);
}

function newRow() {
  const cells = COLUMNS.map((column, index) =>
    element(index ? "td" : "th", { scope: index ? null : "row", "data-column": column.head, class: classOf(column) }),
  );
  const [name, state] = cells;
  name.append(element("a"));
  state.append(element("span", { class: "state-sign", "aria-hidden": "true" }), element("span", { class: "state-word" }));
  const row = element("tr", {}, ...cells);
  row.cellsByColumn = cells;
  return row;
}

function showRow(row, host, largest) {
  const [sign, level] = STATES[host.state] ?? ["?", "warn"];
  setAttribute(row, "data-host", host.name);
  COLUMNS.forEach(({ head, by, show, text, level: levelOf, bar }, index) => {
    const cell = row.cellsByColumn[index];
    if (head === "HOST") {
      setText(cell.firstChild, host.name);
      setAttribute(cell.firstChild, "href", host.link);
      setAttribute(cell, "title", host.name);
    } else if (head === "STATE") {
      setText(cell.firstChild, sign);
      setText(cell.lastChild, host.state);
      setAttribute(cell, "data-level", level);
    } else {
      setText(cell, show ? show(host[by]) : text(host));
      setAttribute(cell, "data-level", levelOf?.(host) ?? null);
    }
    if (bar) showBar(cell, host[by] / (bar === "largest" && largest ? largest : 1));
  });
}

function showBar(cell, value) {
  const width = `${Math.round(value * 100)}%`;
  if (cell.shownBar === width) return;
  cell.shownBar = width;
  cell.style.setProperty("--bar", width);
}
