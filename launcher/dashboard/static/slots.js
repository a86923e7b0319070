// The slots: every column of `numa-launcher status --wide` and `top`.

import { NONE, bytes, count, cpuCount, duration, number, plural, share, twoTimes } from "./format.js";
import { element, keyed, setAttribute, setText } from "./dom.js";
import { colourClass, offNode } from "./marks.js";

const FIRST_TOKEN = "Time to first token, p50 / p99, in seconds if no unit is given";
const RESIDENT = "Memory on the planned nodes, and its share";
const PLACEMENT = "Threads and pages compared with the plan; marks: threads and memory elsewhere";
// Of its memory, where the instance is not as planned
const OFF_NODE = 0.995;
export const STATES = {
  ready: ["●", "good"],
  starting: ["◔", "warn"],
  draining: ["◑", "warn"],
  drained: ["○", "warn"],
  stopping: ["◕", "warn"],
  quarantine: ["◇", "warn"],
  stopped: ["■", "quiet"],
  held: ["■", "quiet"],
  backoff: ["▲", "bad"],
  failed: ["✕", "bad"],
};

// head: as `status` prints it; text: of a slot; level: of the cell; bar: a share, drawn below the text.
const COLUMNS = [
  { head: "SLOT", label: "Slot", meaning: "Number of the slot; opens it", right: true },
  { head: "MODEL", label: "Model", meaning: "Model that it serves", text: (slot) => slot.model, wide: true },
  { head: "STATE", label: "State", meaning: "State of the slot and what it does now" },
  { head: "SINCE", label: "Since", meaning: "Time in this state", right: true, text: since },
  { head: "CPUS", label: "CPUs", meaning: "Number of CPUs @ NUMA node", right: true, text: where },
  { head: "ZEN", label: "Zen", meaning: "ZenTorch", text: zentorch, level: zentorchLevel },
  { head: "REQ/Q", label: "Req/Q", meaning: "Requests in flight / waiting in the engine", right: true, text: requests },
  { head: "TOK/S", label: "Tok/s", meaning: "Tokens generated per second", right: true, text: speed },
  { head: "TTFT 50/99", label: "TTFT 50/99", meaning: FIRST_TOKEN, right: true, text: firstToken },
  { head: "KV", label: "KV", meaning: "Use of the KV cache", right: true, text: (slot) => share(kvUse(slot)), bar: kvUse },
  { head: "HIT", label: "Hit", meaning: "Prompt tokens found in the prefix cache", right: true, text: hits },
  { head: "RSS ON NODE", label: "RSS on node", meaning: RESIDENT, right: true, text: resident, level: residentLevel },
  { head: "RST", label: "Rst", meaning: "Restarts", right: true, text: (slot) => count(slot.restarts) },
  { head: "LAST CAUSE", label: "Last cause", meaning: "Why an instance ended unrequested", text: lastCause, wide: true },
  { head: "PLACEMENT", label: "Placement", meaning: PLACEMENT },
  { head: "PID", label: "PID", meaning: "Main process", right: true, text: (slot) => String(slot.pid ?? NONE) },
  { head: "CPU LIST", label: "CPU list", meaning: "CPUs of its cores", text: (slot) => slot.cpus, wide: true },
];

export function mount(root, store) {
  const body = element("tbody");
  const heads = COLUMNS.map(({ head, label, meaning, right }) =>
    element("th", { scope: "col", "data-column": head, title: meaning, class: right ? "right" : null }, label),
  );
  const table = element("table", { "data-slots": "" }, element("thead", {}, element("tr", {}, ...heads)), body);
  const frame = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of slots" }, table);
  root.append(frame);
  store.subscribe((state, changed) => {
    if (!changed.has("now") || !state.now?.status) return;
    const { machine, status, time } = state.now;
    const places = new Map((machine?.slots ?? []).map((found) => [found.slot, found]));
    keyed(body, status.slots, (slot) => slot.slot, newRow, (row, slot) => {
      showRow(row, slot, time);
      showPlacement(row.placement, slot, places.get(slot.slot));
    });
  });
}

function newRow({ slot }) {
  const link = element(
    "a",
    { class: `slot-swatch ${colourClass(slot)}`, href: `#/slot/${slot}`, "data-slot-link": "" },
    String(slot),
  );
  const cells = COLUMNS.map((column) => {
    const node = element("td", { "data-column": column.head, class: classOf(column) });
    if (column.head === "SLOT") node.append(link);
    if (column.head === "STATE") node.parts = stateParts(node);
    if (column.head === "PLACEMENT") node.parts = placementParts(node);
    return node;
  });
  const row = element("tr", { "data-slot": slot }, ...cells);
  row.cellsByColumn = cells;
  row.placement = cells[COLUMNS.findIndex(({ head }) => head === "PLACEMENT")];
  // A click anywhere in the row opens the slot, unless it selects text.
  row.addEventListener("click", (event) => {
    if (event.target !== link && getSelection().isCollapsed) location.hash = link.hash;
  });
  return row;
}

function classOf({ right, wide }) {
  return [right && "right", wide && "cut"].filter(Boolean).join(" ") || null;
}

function stateParts(node) {
  const sign = element("span", { class: "state-sign", "aria-hidden": "true" });
  const word = element("span", { class: "state-word" });
  const detail = element("span", { class: "state-detail" });
  node.append(sign, word, detail);
  return { sign, word, detail };
}

function placementParts(node) {
  const word = element("span");
  const threads = element("span", { class: "mark" });
  const memory = element("span", { class: "mark" });
  node.append(word, threads, memory);
  return { word, threads, memory };
}

function showRow(row, slot, now) {
  COLUMNS.forEach((column, index) => {
    const cell = row.cellsByColumn[index];
    if (column.head === "STATE") showState(cell, slot, now);
    if (column.text === undefined) return;
    const text = column.text(slot, now);
    setText(cell, text);
    if (column.wide) setAttribute(cell, "title", text === NONE ? null : text);
    if (column.level) setAttribute(cell, "data-level", column.level(slot));
    if (column.bar) showBar(cell, column.bar(slot));
  });
}

function showState(cell, slot, now) {
  const state = stateOf(slot);
  const [sign, level] = STATES[state] ?? ["?", "warn"];
  setText(cell.parts.sign, sign);
  setText(cell.parts.word, state);
  setText(cell.parts.detail, stateDetail(slot, now));
  setAttribute(cell, "data-level", slot.stalled_s || slot.unwatched ? "bad" : level);
}

function showBar(cell, value) {
  const width = `${Math.round((value ?? 0) * 100)}%`;
  if (cell.shownBar === width) return;
  cell.shownBar = width;
  cell.style.setProperty("--bar", width);
}

// The state in one word; includes `drained` and `quarantine`.
export function stateOf(slot) {
  if (slot.intent === "quarantine") return "quarantine";
  const drained = slot.state === "draining" && slot.intent === "drain" && !slot.in_flight;
  return drained ? "drained" : slot.state;
}

export function stateDetail(slot, now) {
  if (slot.stalled_s) return `no progress for ${duration(slot.stalled_s)}`;
  if (slot.unwatched) return "not watched";
  if (slot.next_start) return `starts in ${duration(slot.next_start - now)}`;
  const left = slot.eta !== null && slot.eta > now ? `${duration(slot.eta - now)} left` : "";
  return [slot.phase, left].filter(Boolean).join(", ");
}

function since(slot, now) {
  return duration(now - slot.since);
}

function where(slot) {
  const cpus = cpuCount(slot.cpus);
  return slot.node === null ? String(cpus) : `${cpus}@${slot.node}`;
}

function zentorch({ zentorch: { found, active } }) {
  if (found === null) return NONE;
  return active === null ? "?" : active ? "on" : "OFF";
}

function zentorchLevel(slot) {
  return zentorch(slot) === "OFF" ? "warn" : null;
}

function requests(slot) {
  return `${slot.in_flight}/${slot.load?.waiting ?? NONE}`;
}

function speed({ tokens_per_s: value }) {
  return value === null ? NONE : value < 100 ? number(value) : count(value);
}

function firstToken({ first_token: found }) {
  if (!found) return NONE;
  const [p50, p99, unit] = twoTimes(found.p50_s, found.p99_s);
  return `${p50}/${p99}${unit === "ms" ? " ms" : ""}`;
}

function kvUse({ load }) {
  return load?.kv_usage;
}

function hits({ load }) {
  return load?.prefix_queries ? share(load.prefix_hits / load.prefix_queries) : NONE;
}

function resident({ resident: found }) {
  if (!found?.total_bytes) return NONE;
  if (found.share === null) return bytes(found.total_bytes);
  return `${bytes(found.on_node_bytes)} ${share(found.share)}`;
}

function residentLevel({ verified, resident: found }) {
  return verified?.ok === false && found?.share < OFF_NODE ? "warn" : null;
}

function lastCause(slot) {
  return slot.last_cause?.name ?? NONE;
}

function showPlacement(cell, slot, places) {
  const { word, threads, memory } = cell.parts;
  const { verified } = slot;
  const elsewhere = places?.misplaced_threads ?? places?.misplaced.length ?? 0;
  const farBytes = places ? offNode(places) : 0;
  setText(word, verified ? (verified.ok ? "verified" : "DIFFERS") : NONE);
  setAttribute(cell, "data-level", verified?.ok === false || elsewhere || farBytes ? "bad" : null);
  setText(threads, elsewhere ? `◥ ${plural(elsewhere, "thread", "threads")}` : "");
  setAttribute(threads, "data-misplaced", elsewhere || null);
  setText(memory, farBytes ? `◆ ${bytes(farBytes)}` : "");
  setAttribute(memory, "data-off-node", farBytes || null);
}
