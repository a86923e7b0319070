// One slot: why it failed, how its placement differs from the plan, its command line, its log.

import { askOrTrouble } from "./api.js";
import { bytes, clock, day, duration, plural } from "./format.js";
import { element, keyed, setAttribute, setMessage, setText } from "./dom.js";
import { backLink, dataTable, factList, titleOf, troubleNote } from "./parts.js";
import { stateDetail, stateOf } from "./slots.js";

const ASK_MS = 4000;
// A log that is scrolled to its end stays there.
const END_PX = 24;

export function mount(root, store) {
  const parts = build(root);
  let shown = null;
  let asked = -ASK_MS;

  async function refresh(slot) {
    if (performance.now() - asked < ASK_MS) return;
    asked = performance.now();
    const answer = await askOrTrouble(`api/slots/${slot}`);
    if (slot !== shown) return;
    parts.trouble.show(answer.trouble);
    if (!answer.trouble) showAnswer(parts, answer);
  }

  store.subscribe((state) => {
    if (state.view !== "slot") return;
    const { slot } = state.selected;
    if (slot !== shown) {
      shown = slot;
      asked = -ASK_MS;
      clear(parts, slot);
    }
    const row = state.now?.status?.slots.find((found) => found.slot === slot);
    setAttribute(parts.content, "hidden", row === undefined);
    if (row !== undefined) showRow(parts, row, state.now);
    refresh(slot);
  });
}

function build(root) {
  const title = titleOf("slot");
  const trouble = troubleNote();
  const facts = factList(["CPUs", "OpenMP threads"]);
  const why = element("div", { "data-why": "" });
  const differences = dataTable("Differences from the plan", [["What"], ["Planned"], ["Found"]]);
  const placement = element("p");
  const foreign = element("ul", { class: "plain" });
  const command = element("pre", { tabindex: "0", role: "region", "aria-label": "Command line", "data-command": "" });
  const log = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log", "data-log": "" });
  const actions = element("ul", { class: "plain commands", "data-commands": "" });
  const content = element(
    "div",
    {},
    facts.node,
    element(
      "div",
      { class: "halves" },
      part("Why", why),
      part("Placement", placement, differences.node, foreign),
    ),
    part("Log", log),
    element("div", { class: "halves" }, part("Command line", command), part("Commands to type", actions)),
  );
  root.append(backLink(), title, trouble.node, content);
  return { title, trouble, content, facts, why, differences, placement, foreign, command, log, actions };
}

function part(name, ...nodes) {
  return element("section", {}, element("h3", {}, name), ...nodes);
}

function clear(parts, slot) {
  setText(parts.title, `Slot ${slot}`);
  for (const node of [parts.foreign, parts.log]) keyed(node, [], String);
  for (const node of [parts.why, parts.placement, parts.command]) setText(node, "");
  for (const part of [parts.facts, parts.differences]) part.show([]);
  parts.trouble.show("");
  setAttribute(parts.content, "hidden", true);
  setAttribute(parts.differences.node, "hidden", true);
  const verbs = ["why", "logs", "verify", "drain", "restart", "hold"];
  keyed(
    parts.actions,
    verbs.map((verb) => `numa-launcher ${verb} ${slot}`),
    String,
    (text) => element("li", {}, element("code", {}, text)),
    () => {},
  );
}

function showRow(parts, slot, now) {
  const { facts, placement, differences, foreign } = parts;
  const detail = stateDetail(slot, now.time);
  const misplaced = now.machine?.slots.find((found) => found.slot === slot.slot)?.misplaced ?? [];
  facts.show([
    ["State", `${stateOf(slot)} for ${duration(now.time - slot.since)}${detail ? `: ${detail}` : ""}`],
    ["Model", slot.model],
    ["Generation", `${slot.generation}, ${plural(slot.restarts, "restart", "restarts")}`],
    ["Process", processWords(slot)],
    ["Memory", memoryWords(slot)],
    ["Last probe", slot.looked_at === null ? "none yet" : `${duration(now.time - slot.looked_at)} ago`],
    ["CPUs", listed(slot.cpus)],
    ["OpenMP threads", slot.omp_cpus.split("|").map(listed).join(" | ")],
  ]);
  const { verified } = slot;
  const rows = [
    ...(verified?.differences ?? []).map(({ what, planned, found }) => [what, planned, found]),
    ...misplaced.map(({ thread, name, cpus, planned }) => [`thread ${thread} (${name})`, planned, cpus]),
  ];
  differences.show(rows);
  setAttribute(differences.node, "hidden", rows.length === 0);
  setText(placement, placementWords(verified, rows.length));
  const others = verified?.foreign ?? [];
  keyed(foreign, others, String, () => element("li"), (node, text) => setText(node, `Other process: ${text}`));
}

// A container's main process is found after its start; that of another user may never be.
function processWords({ pid, address }) {
  if (pid === null && address === null) return "none";
  return `${pid ?? "not found"} at ${address ?? "no address yet"}`;
}

// Lists break at their commas.
function listed(cpus) {
  return cpus.replaceAll(",", ", ");
}

function memoryWords({ membind, kv_cache_bytes: cache }) {
  return `node ${membind}${cache === null ? "" : `, KV cache ${bytes(cache)}`}`;
}

function placementWords(verified, differences) {
  if (!verified) return "Not verified yet.";
  const counted = `${plural(verified.processes, "process", "processes")}, ${plural(verified.threads, "thread", "threads")}`;
  return `${counted}: ${differences ? "not as planned" : "placed as planned"}`;
}

function showAnswer(parts, { why, argv, logs }) {
  showWhy(parts.why, why);
  setText(parts.command, commandLine(argv ?? []));
  const { log } = parts;
  const atEnd = log.scrollTop + log.clientHeight > log.scrollHeight - END_PX;
  keyed(log, logs, (line) => `${line.time} ${line.text}`, newLine, () => {});
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function newLine({ time, text }) {
  return element("span", { class: "log-line" }, element("span", { class: "log-time" }, clock(time)), ` ${text}\n`);
}

function showWhy(node, why) {
  const shown = JSON.stringify(why);
  if (node.shownWhy === shown && node.firstChild) return;
  node.shownWhy = shown;
  const { cause, at, of_generation: generation } = why;
  if (!cause) {
    node.replaceChildren(element("p", {}, "None of its instances has failed."));
    return;
  }
  const remedy = element("p", { class: "remedy" });
  setMessage(remedy, cause.remedy);
  const lines = [...cause.evidence, ...(why.lines ?? []).map((line) => line.text)];
  node.replaceChildren(
    element("p", {}, element("strong", {}, cause.name), `: ${cause.message}`),
    remedy,
    element("p", { class: "note" }, `Generation ${generation}, ${day(at)}; restart: ${cause.retry}.`),
    element("pre", { tabindex: "0", role: "region", "aria-label": "Evidence" }, [...new Set(lines)].join("\n")),
  );
}

// One option per line, quoted for a shell.
function commandLine(argv) {
  const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  return argv.map((word, index) => (index && word.startsWith("-") ? `\\\n  ${quoted(word)}` : quoted(word))).join(" ");
}
