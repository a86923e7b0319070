// The history as small multiples: one time for all, panned and zoomed together, with a cursor shared by all.

import { levelOf } from "./change_item.js";
import { ChartInput, STEP_SHARE } from "./chart_input.js";
import { Chart, LEFT, RIGHT } from "./chart.js";
import { ChartsTable } from "./charts_table.js";
import { element, setAttribute, setText } from "./dom.js";
import { clock, day } from "./format.js";
import { HOST_CHARTS, moneyUnit, slotCharts } from "./history_columns.js";
import { firstRow, fitted, gapsOf, panned, spanOf, timeTicks, wholeSpan, zoomed } from "./time_view.js";

const SPAN_NAMES = { "1h": "1 hour", "1d": "1 day", "90d": "90 days" };
// Rows are polled: this old, the newest one is late.
const LATE_MS = 10_000;
const UNSEEN_MS = 10_000;
const TICK_WIDTH = 50;

export function mount(root, store) {
  const charts = new Charts(root, store);
  store.subscribe((state, changed) => charts.update(changed));
}

class Charts {
  constructor(root, store) {
    this.store = store;
    this.view = wholeSpan("1h");
    this.isChosen = false;
    this.cursorAt = null;
    this.charts = [];
    this.built = "";
    this.width = 0;
    this.visible = false;
    this.pending = false;
    this.drawnAt = -Infinity;
    this.readout = element("p", { class: "chart-readout" });
    this.slider = element(
      "div",
      {
        class: "time-slider",
        role: "slider",
        tabindex: "0",
        "aria-label": "Time under the cursor of all charts",
        "aria-valuemin": "0",
        "aria-valuemax": "0",
        "aria-valuenow": "0",
      },
      this.readout,
    );
    this.grid = element("div", { class: "charts-grid" });
    this.table = new ChartsTable();
    this.none = element("p", { class: "picture-none" }, "No history yet.");
    root.append(this.none, this.toolbar(), this.slider, this.grid, this.table.node);
    this.listen();
    new ChartInput(this, root);
  }

  toolbar() {
    const button = (text, label, act) => {
      const node = element("button", { type: "button", "aria-label": label, title: label }, text);
      node.addEventListener("click", act);
      return node;
    };
    this.spans = Object.entries(SPAN_NAMES).map(([span, name]) =>
      button(name, `Show the last ${name}`, () => this.show(wholeSpan(span))),
    );
    this.live = button("Now", "Follow the newest values", () => this.show({ ...this.view, end: null }));
    return element(
      "div",
      { class: "chart-tools", role: "group", "aria-label": "Time shown" },
      ...this.spans,
      button("◀", "Earlier", () => this.pan(-STEP_SHARE)),
      button("▶", "Later", () => this.pan(STEP_SHARE)),
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("−", "Zoom out", () => this.zoom(2)),
      this.live,
      element("span", { class: "chart-hint" }, "drag; after a click also wheel and arrow keys"),
    );
  }

  listen() {
    new ResizeObserver(() => this.request()).observe(this.grid);
    new IntersectionObserver(
      ([entry]) => {
        this.visible = entry.isIntersecting;
        if (this.visible) this.request();
      },
      { rootMargin: "200px" },
    ).observe(this.grid);
    window.addEventListener("beforeprint", () => this.draw());
    document.addEventListener("show-time", ({ detail }) => this.point(detail));
  }

  update(changed) {
    const isLate = changed.has("now") && this.frame && this.newest() !== this.drawnTo;
    if (isLate || ["history", "changes", "selected", "span", "view"].some((key) => changed.has(key)))
      this.request();
  }

  // One frame per painted frame at most, and few while the charts cannot be seen.
  request() {
    const isRecent =
      performance.now() < this.drawnAt + UNSEEN_MS && this.history()?.columns.join() === this.columns;
    if (this.pending || (!this.visible && isRecent)) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  history() {
    const { history } = this.store.state;
    return history[this.span] ?? Object.values(history).at(-1);
  }

  // Time of the newest row; the present when rows stay away.
  newest() {
    const { history, now } = this.store.state;
    const row = Math.max(0, ...Object.values(history).map(({ rows }) => rows.at(-1)?.[0] ?? 0));
    const asked = ((now?.time ?? 0) + (now?.age_s ?? 0)) * 1000;
    return asked - row > LATE_MS ? asked : row;
  }

  show(view) {
    this.isChosen = true;
    this.view = view;
    this.span = spanOf(view, this.newest());
    if (this.span !== this.store.state.span) this.store.select({ span: this.span });
    this.request();
  }

  pan(share) {
    this.show(panned(this.view, this.newest(), share * this.view.length));
  }

  zoom(factor, at = this.cursorAt) {
    this.show(zoomed(this.view, this.newest(), factor, at));
  }

  draw() {
    const history = this.history();
    const wide = this.grid.clientWidth;
    setAttribute(this.none, "hidden", Boolean(history?.rows.length));
    setText(this.none, history?.trouble || "No history yet.");
    if (!history || wide === 0) return;
    this.build(history.columns);
    this.drawnAt = performance.now();
    this.drawnTo = this.newest();
    this.columns = history.columns.join();
    if (!this.isChosen) this.view = fitted(history, this.drawnTo);
    this.frame = this.makeFrame(history);
    for (const chart of this.charts) chart.draw(this.frame);
    this.drawTools();
    this.drawReadout();
    this.table.draw(this.frame, this.charts);
  }

  build(columns) {
    const { now } = this.store.state;
    const currency = now?.status?.cost?.currency;
    const key = [...columns, currency].join();
    if (key === this.built) return;
    this.built = key;
    const definitions = HOST_CHARTS.filter((each) => !each.optional || currency);
    this.charts = [...slotCharts(columns), ...definitions].map(
      (each) => new Chart(each, each.unit === null ? moneyUnit(currency) : each.unit),
    );
    this.grid.replaceChildren(...this.charts.map((chart) => chart.node));
    this.width = 0;
  }

  // What all charts share: the rows in view, their px, gaps, ticks of the time, marks of changes, the cursor.
  makeFrame(history) {
    const { rows, columns, step_ms: step } = history;
    const to = this.view.end ?? this.newest();
    const from = to - this.view.length;
    const width = this.chartWidth();
    const scale = (width - LEFT - RIGHT) / this.view.length;
    const x = (ms) => Math.round((LEFT + (ms - from) * scale) * 2) / 2;
    const first = firstRow(rows, from);
    const end = firstRow(rows, to + 1);
    const xs = new Float32Array(end - first);
    const breaks = new Uint8Array(end - first);
    for (let row = first; row < end; row++) {
      xs[row - first] = Math.round(x(rows[row][0]));
      breaks[row - first] = row > 0 && rows[row][0] - rows[row - 1][0] > 1.5 * step ? 1 : 0;
    }
    const ticks = timeTicks(from, to, Math.max(2, Math.floor((width - LEFT) / TICK_WIDTH)))
      .map(({ at, label }) => ({ x: x(at), label }))
      .filter((tick) => tick.x < width - 22 && tick.x > LEFT - 4);
    const frame = {
      rows,
      step,
      // The first value of a row is its time.
      columns: new Map(columns.map((name, index) => [name, index + 1])),
      from: first,
      to: end,
      begin: from,
      finish: to,
      xs,
      breaks,
      x,
      width,
      ticks,
      gaps: gapsOf(rows, from, to, step).map(([begin, finish]) => [x(begin), x(finish)]),
      marks: this.marks(from, to, x),
      selected: this.store.state.selected.slot,
      cursor: null,
    };
    frame.cursor = this.cursorOf(frame);
    return frame;
  }

  chartWidth() {
    const node = this.charts[0].node;
    return Math.max(180, Math.floor(node.clientWidth));
  }

  marks(from, to, x) {
    const found = { info: [], warn: [], bad: [] };
    const { changes, selected } = this.store.state;
    for (const change of changes) {
      const { slot } = change;
      const at = change.time * 1000;
      if (at < from || at > to || (selected.slot !== null && slot !== null && slot !== selected.slot))
        continue;
      const place = x(at);
      const own = found[levelOf(change)];
      if (own.at(-1) !== place) own.push(place);
    }
    return found;
  }

  // The row next to the cursor; null without one, or where it points into a gap.
  cursorOf({ rows, step, from, to, x, begin, finish }) {
    if (this.cursorAt === null || this.cursorAt < begin || this.cursorAt > finish) return null;
    const after = firstRow(rows, this.cursorAt);
    const near = [after - 1, after].filter((row) => row >= from && row < to);
    if (near.length === 0) return { x: x(this.cursorAt), row: -1, at: this.cursorAt };
    const row = near.reduce((one, other) =>
      Math.abs(rows[other][0] - this.cursorAt) < Math.abs(rows[one][0] - this.cursorAt) ? other : one,
    );
    const known = Math.abs(rows[row][0] - this.cursorAt) <= 1.5 * step;
    return {
      x: x(known ? rows[row][0] : this.cursorAt),
      row: known ? row : -1,
      at: known ? rows[row][0] : this.cursorAt,
    };
  }

  point(at) {
    if (at === this.cursorAt) return;
    this.cursorAt = at;
    if (at !== null && this.frame && (at < this.frame.begin || at > this.frame.finish)) {
      this.show({ ...this.view, end: Math.min(this.newest(), at + this.view.length / 2) });
    }
    if (this.pointing || !this.frame) return;
    this.pointing = true;
    requestAnimationFrame(() => {
      this.pointing = false;
      this.frame.cursor = this.cursorOf(this.frame);
      for (const chart of this.charts) chart.drawCursor(this.frame);
      this.drawReadout();
    });
  }

  drawReadout() {
    const { cursor, begin, finish } = this.frame;
    const long = this.view.length > 86_400_000;
    const text = (ms) => (long ? day(ms / 1000) : clock(ms / 1000));
    const range = `${day(begin / 1000)} to ${this.view.end === null ? "now" : day(finish / 1000)}`;
    const near = cursor === null ? [] : this.changesNear(cursor.at);
    const parts =
      cursor === null ? [range] : [text(cursor.at), ...(cursor.row === -1 ? ["no data"] : []), ...near];
    setText(this.readout, parts.join(" · "));
    const at = cursor === null ? finish : cursor.at;
    setAttribute(this.slider, "aria-valuemin", Math.round(begin / 1000));
    setAttribute(this.slider, "aria-valuemax", Math.round(finish / 1000));
    setAttribute(this.slider, "aria-valuenow", Math.round(at / 1000));
    if (document.activeElement === this.slider)
      setAttribute(this.slider, "aria-valuetext", this.spoken(parts));
    else setAttribute(this.slider, "aria-valuetext", parts.join(", "));
  }

  spoken(parts) {
    return [...parts, ...this.charts.map((chart) => chart.plot.getAttribute("aria-label"))].join("; ");
  }

  changesNear(at) {
    const reach = (4 * this.view.length) / this.frame.width;
    return this.store.state.changes
      .filter(({ time }) => Math.abs(time * 1000 - at) <= reach)
      .slice(-3)
      .map(({ title }) => title);
  }

  drawTools() {
    Object.keys(SPAN_NAMES).forEach((span, index) => {
      const shown = this.view.end === null && this.view.length === wholeSpan(span).length;
      setAttribute(this.spans[index], "aria-pressed", String(shown));
    });
    setAttribute(this.live, "aria-pressed", String(this.view.end === null));
  }
}
