// The picture's content as a table, for those who do not see it. Written only while it is open.

import { element, keyed, setText } from "./dom.js";
import { bytes, share } from "./format.js";
import { formatCpus } from "./marks.js";

const HEADS = [
  "Slot",
  "Node",
  "Cpus",
  "Mean load",
  "Busiest cpu",
  "Memory by node",
  "Threads off their cpus",
];

export class MachineTable {
  constructor() {
    this.rows = [];
    this.body = element("tbody");
    const head = element("tr", {}, ...HEADS.map((text) => element("th", { scope: "col" }, text)));
    const table = element("table", { class: "text-table machine-table" }, element("thead", {}, head), this.body);
    this.node = element(
      "details",
      { class: "as-table" },
      element("summary", {}, "The machine as a table"),
      element(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "The machine as a table" },
        table,
      ),
    );
    this.node.addEventListener("toggle", () => this.draw(this.rows));
  }

  draw(rows) {
    this.rows = rows;
    if (!this.node.open) return;
    keyed(this.body, rows, (row) => row.slot, newRow, drawRow);
  }
}

function newRow() {
  const cells = HEADS.slice(1).map(() => element("td"));
  return element("tr", {}, element("th", { scope: "row" }), ...cells);
}

function drawRow(line, row) {
  const memory = row.bytes.map(([node, amount]) => `node ${node}: ${bytes(amount)}`).join(", ");
  const threads = row.threads.map(
    ({ thread, name, cpus, planned }) => `${name} (${thread}) may run on ${cpus}, planned ${planned}`,
  );
  const texts = [
    `${row.slot}`,
    row.node === null ? "–" : `${row.node}`,
    formatCpus(row.cpus),
    share(row.mean),
    share(row.most),
    memory || "–",
    threads.join("; ") || (row.misplaced ? `${row.misplaced}` : "none"),
  ];
  texts.forEach((text, index) => setText(line.children[index], text));
}
