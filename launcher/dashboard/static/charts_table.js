// The charts' values as a table: the text alternative. Written only while it is open.

import { element } from "./dom.js";
import { clock, day } from "./format.js";

const ROWS = 24;

export class ChartsTable {
  constructor() {
    this.table = element("table", { class: "text-table" });
    this.node = element(
      "details",
      { class: "as-table" },
      element("summary", {}, "The values as a table"),
      element(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Values of the charts" },
        this.table,
      ),
    );
    this.drawn = "";
    this.node.addEventListener("toggle", () => this.last && this.draw(...this.last));
  }

  draw(frame, charts) {
    this.last = [frame, charts];
    if (!this.node.open) return;
    const { rows, from, to } = frame;
    const stride = Math.max(1, Math.ceil((to - from) / ROWS));
    const picked = [];
    // Counted from the newest row, whose values are those of the charts.
    for (let row = to - 1; row >= from; row -= stride) picked.push(row);
    const lines = charts.flatMap((chart) =>
      chart.definition.lines.map((line, index) => ({ chart, line, column: chart.columns[index] })),
    );
    const key = `${picked.map((row) => rows[row][0])} ${lines.length}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const time = frame.finish - frame.begin > 86_400_000 ? day : clock;
    const head = element(
      "tr",
      {},
      element("th", { scope: "col" }, "Time"),
      ...lines.map(({ chart, line }) =>
        element("th", { scope: "col" }, `${chart.definition.title}: ${line.name}`),
      ),
    );
    const body = picked.map((row) =>
      element(
        "tr",
        {},
        element("th", { scope: "row" }, time(rows[row][0] / 1000)),
        ...lines.map(({ chart, column }) =>
          element("td", {}, shown(chart, column === undefined ? null : rows[row][column])),
        ),
      ),
    );
    this.table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  }
}

function shown(chart, value) {
  return chart.definition.states ? (value ?? "–") : chart.unit.show(value);
}
