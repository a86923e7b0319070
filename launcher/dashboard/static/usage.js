// Tokens today and what they cost, by key and by model; the latest requests; what bench and tune measured.

import { askOrTrouble } from "./api.js";
import { element, setAttribute, setMessage, setText } from "./dom.js";
import { dataTable, factList, panel, titleOf, troubleNote } from "./parts.js";
import * as rows from "./usage_rows.js";

const ASK_MS = 10_000;

export function mount(root, store) {
  const parts = build(root);
  let asked = -ASK_MS;

  async function refresh() {
    if (performance.now() - asked < ASK_MS) return;
    asked = performance.now();
    const [usage, measured] = await Promise.all([askOrTrouble("api/usage"), askOrTrouble("api/measurements")]);
    parts.trouble.show(usage.trouble);
    if (!usage.trouble) showUsage(parts, usage);
    showMeasured(parts, measured);
  }

  store.subscribe((state) => {
    if (state.view !== "usage") return;
    if (state.now?.status) showLive(parts, state.now.status);
    refresh();
  });
}

function build(root) {
  const title = titleOf("usage");
  setText(title, "Usage and cost today");
  const trouble = troubleNote();
  const total = factList();
  const note = element("p", { class: "note" });
  const models = dataTable("Today by model", rows.USAGE_HEADS);
  const keys = dataTable("Today by key", rows.USAGE_HEADS);
  const modelsNow = dataTable("Models now", rows.MODEL_HEADS);
  const keysNow = optional("Keys since the start of the daemon", rows.KEY_HEADS);
  const budgets = optional("Budgets", rows.BUDGET_HEADS);
  const latest = optional("Latest requests", rows.LATEST_HEADS);
  const layout = element("p", { "data-layout": "" });
  const measured = dataTable("Benchmark and tuning results", rows.MEASURED_HEADS);
  const noneMeasured = element("p", { class: "note" });
  setAttribute(measured.node, "hidden", true);
  root.append(
    element("section", { class: "panel", "aria-labelledby": "usage-title" }, title, trouble.node, total.node, note),
    element(
      "div",
      { class: "pair" },
      panel("Today by key", keys.node),
      panel("Today by model", models.node),
      panel("Models now", modelsNow.node),
      keysNow.node,
      budgets.node,
    ),
    latest.node,
    panel("Measured", layout, measured.node, noneMeasured),
  );
  return { trouble, total, note, models, keys, modelsNow, keysNow, budgets, latest, layout, measured, noneMeasured };
}

// A panel that is hidden without rows
function optional(name, heads) {
  const table = dataTable(name, heads);
  const node = panel(name, table.node);
  setAttribute(node, "hidden", true);
  function show(found) {
    setAttribute(node, "hidden", found.length === 0);
    table.show(found);
  }
  return { node, show };
}

function showLive(parts, status) {
  parts.modelsNow.show(rows.modelRows(status.slots));
  parts.keysNow.show(Object.entries(status.keys ?? {}).map(rows.keyRow));
  setText(parts.layout, status.measured_layout?.text ?? "");
}

function showUsage(parts, { keys, models, cost, budgets, latest }) {
  for (const [table, report] of [
    [parts.keys, keys],
    [parts.models, models],
  ]) {
    table.show((report?.rows ?? []).map((row) => rows.usageRow(row, report.currency)));
  }
  const total = (models ?? keys)?.total;
  parts.total.show(rows.usageFacts(total, cost));
  setMessage(parts.note, noteOf(total, cost));
  parts.budgets.show((budgets ?? []).map(rows.budgetRow));
  parts.latest.show((latest ?? []).toReversed().map(rows.latestRow));
}

function noteOf(total, cost) {
  if (!total) return "There is no usage ledger: set `[usage]` in the configuration (docs/usage.md).";
  return cost ? "" : "What tokens cost is unknown: set the machine's price in `[cost]` (docs/cost.md).";
}

function showMeasured(parts, { measurements = [], trouble }) {
  const none = "No results that the daemon can read: `numa-launcher bench` and `numa-launcher tune` measure.";
  parts.measured.show(measurements.map(rows.measuredRow));
  setAttribute(parts.measured.node, "hidden", measurements.length === 0);
  setMessage(parts.noneMeasured, measurements.length ? "" : trouble || none);
}
