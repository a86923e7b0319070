// One chart of the history: lines over the time, drawn by hand as SVG. Charts of one page have the same size.

import { element, keyed, setAttribute, setText, svg } from "./dom.js";
import { absent } from "./format.js";
import { valueTicks } from "./history_columns.js";
import { colourClass } from "./marks.js";
import { linePath } from "./trace_path.js";

export const LEFT = 50;
export const RIGHT = 8;
const TOP = 12;
const BOTTOM = 20;
export const HEIGHT = 132;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const ROW = 14;
const NOTHING = { path: "", band: "" };

export class Chart {
  constructor(definition, unit) {
    this.definition = definition;
    this.unit = unit ?? definition.unit;
    this.plot = svg("svg", { class: "plot", role: "img" });
    this.gaps = svg("path", { class: "gap" });
    this.grid = svg("path", { class: "grid" });
    this.axis = svg("g", { class: "axis" });
    this.changes = ["info", "warn", "bad"].map((level) => svg("path", { class: `change change-${level}` }));
    this.drawn = svg("g", { class: "traces" });
    this.line = svg("path", { class: "cursor" });
    this.plot.append(this.gaps, this.grid, ...this.changes, this.drawn, this.line, this.axis);
    this.legend = element("ul", { class: "trace-legend" });
    this.values = definition.lines.map(() => element("span", { class: "value" }));
    this.legend.append(...definition.lines.map((each, index) => this.legendItem(each, index)));
    this.traces = definition.states ? [] : definition.lines.map((each, index) => trace(each, index));
    this.bands = this.traces.map((each) => svg("path", { class: `band-of ${each.getAttribute("class")}` }));
    this.drawn.append(...this.bands, ...this.traces);
    this.node = element(
      "figure",
      { class: "chart", "data-chart": definition.id },
      element("figcaption", {}, element("span", { class: "title" }, definition.title), this.legend),
      this.plot,
    );
  }

  legendItem(each, index) {
    const key = svg("svg", { class: "key", width: "22", height: "8", "aria-hidden": "true" });
    const name = trace(each, index);
    setAttribute(name, "d", "M0 4h22");
    if (!this.definition.states) key.append(name);
    return element(
      "li",
      { "data-column": each.column },
      ...(this.definition.states ? [] : [key]),
      ` ${each.name} `,
      this.values[index],
    );
  }

  // `frame`: what all charts share (see charts.js).
  draw(frame) {
    const { width } = frame;
    const { lines, states } = this.definition;
    this.columns = lines.map(({ column }) => frame.columns.get(column));
    const height = states ? TOP + lines.length * ROW + BOTTOM + 4 : HEIGHT;
    this.bottom = height - BOTTOM;
    setAttribute(this.plot, "width", width);
    setAttribute(this.plot, "height", height);
    setAttribute(this.plot, "viewBox", `0 0 ${width} ${height}`);
    setAttribute(
      this.gaps,
      "d",
      frame.gaps.map(([from, to]) => `M${from} ${TOP}H${to}V${this.bottom}H${from}z`).join(""),
    );
    setAttribute(this.gaps, "data-gap", frame.gaps.length || null);
    if (states) this.drawStates(frame);
    else this.drawLines(frame);
    for (const [index, xs] of [frame.marks.info, frame.marks.warn, frame.marks.bad].entries()) {
      setAttribute(
        this.changes[index],
        "d",
        xs.map((x) => `M${x} ${this.bottom}V${TOP}M${x} ${TOP}${MARK_SHAPES[index]}`).join(""),
      );
    }
    this.drawCursor(frame);
  }

  drawLines(frame) {
    const { width, rows, from, to } = frame;
    const isDense = to - from > width;
    let most = 0;
    for (const column of this.columns) {
      if (column === undefined) continue;
      for (let row = from; row < to; row++) if (rows[row][column] > most) most = rows[row][column];
    }
    const ticks = valueTicks(this.unit, most);
    const scale = (this.bottom - TOP) / ticks.at(-1);
    const down = (value) => Math.round((this.bottom - value * scale) * 10) / 10;
    setAttribute(this.grid, "d", ticks.map((tick) => `M${LEFT} ${down(tick)}H${width - RIGHT}`).join(""));
    const labels = [
      ...ticks.map((tick) => ({
        x: LEFT - 5,
        y: down(tick) + 4,
        text: tick === 0 ? "0" : this.unit.show(tick),
        anchor: "end",
      })),
      ...frame.ticks.map((tick) => ({ x: tick.x, y: this.bottom + 15, text: tick.label, anchor: "middle" })),
    ];
    this.drawLabels(labels);
    this.columns.forEach((column, index) => {
      const { drawn } = this.definition.lines[index];
      const { path, band } = column === undefined ? NOTHING : linePath(frame, column, drawn, down);
      setAttribute(this.traces[index], "d", path);
      setAttribute(this.bands[index], "d", isDense ? band : "");
    });
    const marked = frame.selected === null ? [] : [`slot ${frame.selected}`];
    this.definition.lines.forEach(({ name, trace: kind }, index) => {
      const faded = typeof kind === "number" && marked.length > 0 && !marked.includes(name);
      for (const path of [this.traces[index], this.bands[index]]) path.classList.toggle("faded", faded);
    });
  }

  drawLabels(labels) {
    keyed(
      this.axis,
      labels.map((label, index) => ({ ...label, index })),
      (label) => label.index,
      () => svg("text"),
      (node, { x, y, text, anchor }) => {
        setAttribute(node, "x", x);
        setAttribute(node, "y", y);
        setAttribute(node, "text-anchor", anchor);
        setText(node, text);
      },
    );
  }

  drawStates(frame) {
    const runs = [];
    this.columns.forEach((column, index) => {
      if (column === undefined) return;
      let run = null;
      for (let row = frame.from; row < frame.to; row++) {
        const state = frame.rows[row][column];
        const x = frame.xs[row - frame.from];
        if (run && run.state === state && !frame.breaks[row - frame.from]) run.end = x;
        else if (absent(state)) run = null;
        else
          runs.push(
            (run = { key: `${index} ${runs.length}`, state, start: x, end: x, y: TOP + 2 + index * ROW }),
          );
      }
    });
    keyed(
      this.drawn,
      runs,
      (run) => run.key,
      () => svg("rect", { height: ROW - 3 }),
      (node, { state, start, end, y }) => {
        setAttribute(node, "class", `state state-${state}`);
        setAttribute(node, "x", start);
        setAttribute(node, "y", y);
        setAttribute(node, "width", Math.max(1.5, end - start));
      },
    );
    const names = this.definition.lines.map(({ name }, index) => ({
      x: LEFT - 5,
      y: TOP + 12 + index * ROW,
      text: name,
      anchor: "end",
    }));
    const times = frame.ticks.map((tick) => ({
      x: tick.x,
      y: this.bottom + 15,
      text: tick.label,
      anchor: "middle",
    }));
    this.drawLabels([...names, ...times]);
  }

  // Values at the cursor, or the newest ones.
  drawCursor(frame) {
    const { cursor, rows } = frame;
    const d = cursor === null ? "" : `M${cursor.x} ${TOP}V${this.bottom}`;
    setAttribute(this.line, "d", d);
    const row = rows[cursor === null ? frame.to - 1 : cursor.row];
    const shown = this.columns.map((column) => {
      const value = column === undefined || row === undefined ? null : row[column];
      return this.definition.states ? (value ?? "–") : this.unit.show(value);
    });
    shown.forEach((text, index) => setText(this.values[index], text));
    const named = this.definition.lines.map(({ name }, index) => `${name} ${shown[index]}`);
    setAttribute(this.plot, "aria-label", `${this.definition.title}: ${named.join(", ")}`);
  }
}

// Upwards of a change's line: a small bar, a diamond, a triangle.
const MARK_SHAPES = ["h2h-4", "l3.5 -3.5l-3.5 -3.5l-3.5 3.5z", "l-4.5 -8h9z"];

function trace({ trace: kind }, index) {
  const colour = typeof kind === "number" ? colourClass(kind) : `trace-${kind}`;
  const dash =
    typeof kind === "number" ? DASHES[Math.floor(kind / 4) % DASHES.length] : DASHES[index % DASHES.length];
  return svg("path", { class: `trace ${colour}`, ...(dash ? { "stroke-dasharray": dash } : {}) });
}
