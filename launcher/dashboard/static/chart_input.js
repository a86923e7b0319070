// Pointer, wheel and keys of the charts: what moves their time and their cursor.

import { LEFT, RIGHT } from "./chart.js";
import { panned } from "./time_view.js";

export const STEP_SHARE = 0.25;
const CURSOR_KEYS = { ArrowLeft: -1, ArrowRight: 1 };
const DRAG_PX = 4;

export class ChartInput {
  constructor(charts, root) {
    this.charts = charts;
    this.drag = null;
    const { grid, slider } = charts;
    root.addEventListener("keydown", (event) => this.onKey(event));
    grid.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    grid.addEventListener("pointerdown", (event) => this.onPress(event));
    grid.addEventListener("pointermove", (event) => this.onMove(event));
    for (const name of ["pointerup", "pointercancel"]) grid.addEventListener(name, () => this.release());
    grid.addEventListener("pointerleave", () => this.drag || charts.point(null));
    grid.addEventListener("dblclick", (event) => charts.zoom(0.5, this.timeAt(event)));
    slider.addEventListener("blur", () => charts.point(null));
  }

  // null beside the charts.
  timeAt(event) {
    const plot = event.target.closest?.(".plot");
    if (!plot || !this.charts.frame) return null;
    const { width, begin, finish } = this.charts.frame;
    const share = (event.clientX - plot.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
    return share < 0 || share > 1 ? null : begin + share * (finish - begin);
  }

  onWheel(event) {
    const { charts } = this;
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // A plain wheel scrolls the page until the charts are clicked.
    const zooms = event.ctrlKey || event.metaKey || document.activeElement === charts.slider;
    if (!charts.frame || (!isSideways && !zooms)) return;
    event.preventDefault();
    if (isSideways) charts.pan(event.deltaX / charts.frame.width);
    else charts.zoom(1.002 ** event.deltaY, this.timeAt(event) ?? undefined);
  }

  onPress(event) {
    if (event.button !== 0 || this.timeAt(event) === null) return;
    this.drag = { x: event.clientX, view: this.charts.view, moved: false };
  }

  onMove(event) {
    const { charts, drag } = this;
    if (!drag) {
      charts.point(this.timeAt(event));
      return;
    }
    const by = event.clientX - drag.x;
    if (!drag.moved && Math.abs(by) < DRAG_PX) return;
    if (!drag.moved) charts.grid.setPointerCapture(event.pointerId);
    drag.moved = true;
    charts.grid.classList.add("dragged");
    const scale = drag.view.length / (charts.frame.width - LEFT - RIGHT);
    charts.show(panned(drag.view, charts.newest(), -by * scale));
  }

  release() {
    this.charts.grid.classList.remove("dragged");
    // The keys act on the charts from here on.
    if (this.drag) this.charts.slider.focus({ preventScroll: true });
    this.drag = null;
  }

  onKey(event) {
    const { charts } = this;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!charts.frame || event.target.closest("summary, button, .scroll")) return;
    const act = {
      "+": () => charts.zoom(0.5),
      "=": () => charts.zoom(0.5),
      "-": () => charts.zoom(2),
      PageUp: () => charts.pan(-STEP_SHARE),
      PageDown: () => charts.pan(STEP_SHARE),
      Home: () => charts.point(charts.frame.begin),
      End: () => charts.point(charts.frame.finish),
    }[event.key];
    if (act) act();
    else if (event.key in CURSOR_KEYS) this.step(CURSOR_KEYS[event.key] * (event.shiftKey ? 10 : 1));
    else if (event.key === "Escape" && charts.cursorAt !== null) charts.point(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // By a row, or by a px where rows are closer.
  step(by) {
    const { step, width, finish, begin } = this.charts.frame;
    const each = Math.max(step, (finish - begin) / (width - LEFT - RIGHT));
    const at = (this.charts.cursorAt ?? finish) + by * each;
    this.charts.point(Math.max(begin, Math.min(finish, at)));
  }
}
