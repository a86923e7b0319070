// The cores of one NUMA node: sign and colour of their slot above, load of each of their cpus below.
// A group of paths per mark, not elements per core: a frame of 512 cpus changes few attributes.

import { setAttribute, svg } from "./dom.js";
import { share } from "./format.js";
import { BAND, GAUGE, HEIGHT, arrange, blocksOf, neighbour } from "./core_layout.js";
import { colourClass, sign, words } from "./marks.js";

const KEYS = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]);

export class Cores {
  // `cores`: those of GET /v1/topology; `marks`: cpu -> mark. `onSelect(slot)`, `onActive(text)`: a core was pointed at.
  constructor(name, cores, marks, { onSelect, onActive }) {
    this.marks = marks;
    this.blocks = blocksOf(cores);
    this.onSelect = onSelect;
    this.onActive = onActive;
    this.busy = [];
    this.misplaced = new Map();
    this.active = null;
    this.drawing = svg("svg", {
      class: "cores",
      role: "listbox",
      tabindex: "0",
      "aria-label": `Cores of ${name}: arrow keys choose a core, Enter opens its slot`,
    });
    this.drawing.addEventListener("keydown", (event) => this.onKey(event));
    this.drawing.addEventListener("pointermove", (event) => this.point(this.indexOf(event.target)));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
    this.drawing.addEventListener("focus", () => this.point(this.active ?? 0));
    this.drawing.addEventListener("blur", () => this.point(null));
    this.drawing.addEventListener("click", (event) => this.choose(this.indexOf(event.target)));
  }

  // Draws everything again for a width of `width` px.
  resize(width) {
    const { blocks, cores, ...size } = arrange(this.blocks, width);
    this.places = cores;
    setAttribute(this.drawing, "width", size.width);
    setAttribute(this.drawing, "height", size.height);
    setAttribute(this.drawing, "viewBox", `0 0 ${size.width} ${size.height}`);
    this.groups = this.grouped(cores);
    this.outline = svg("rect", { class: "active", rx: "2", visibility: "hidden" });
    this.misplacedPath = svg("path", { class: "misplaced" });
    this.options = cores.map(({ core, x, y, width: wide }) =>
      svg("rect", {
        id: `core-${core.cpus[0]}`,
        class: "core",
        role: "option",
        x,
        y,
        width: wide,
        height: HEIGHT,
        "data-cpus": core.cpus.join(","),
        "aria-label": this.describe(core),
        "aria-selected": "false",
      }),
    );
    this.drawing.replaceChildren(
      svg("path", {
        class: "l3",
        d: blocks
          .map((b) => `M${b.x + 0.5} ${b.y + 0.5}h${b.width - 1}v${b.height - 1}h${1 - b.width}z`)
          .join(""),
      }),
      ...blocks.map((block) =>
        svg("text", { class: "ruler", x: block.x + 4, y: block.y + 11 }, `${block.first}`),
      ),
      svg("path", {
        class: "gauge",
        d: cores.map((c) => `M${c.x} ${c.y + BAND}h${c.width}v${GAUGE}h${-c.width}z`).join(""),
      }),
      ...[...this.groups.values()].map((group) => group.node),
      this.misplacedPath,
      this.outline,
      ...this.options,
    );
    this.drawLoad(this.busy);
    this.drawMisplaced(this.misplaced);
    this.drawSelection(this.selected ?? null);
    if (this.active !== null) this.point(Math.min(this.active, cores.length - 1));
  }

  grouped(places) {
    const groups = new Map();
    const of = (mark) => {
      if (!groups.has(mark)) groups.set(mark, { signs: [], bands: [], bars: [], levels: [] });
      return groups.get(mark);
    };
    for (const { core, x, y, width } of places) {
      const mark = this.marks.get(core.cpus[0]);
      of(mark).bands.push(`M${x} ${y}h${width}v${BAND}h${-width}z`);
      of(mark).signs.push([x + width / 2, y + BAND - 3]);
      const wide = (width - core.cpus.length - 1) / core.cpus.length;
      core.cpus.forEach((cpu, thread) => {
        const left = (x + 1 + thread * (wide + 1)).toFixed(1);
        of(this.marks.get(cpu)).bars.push({
          cpu,
          start: `M${left} ${y + HEIGHT}h${wide.toFixed(1)}v-`,
          wide,
        });
      });
    }
    for (const [mark, group] of groups) {
      group.load = svg("path", { class: "load" });
      group.node = svg(
        "g",
        { class: `group ${colourClass(mark)}` },
        svg("path", { class: "band", d: group.bands.join("") }),
        svg(
          "text",
          {
            class: "sign",
            x: group.signs.map(([x]) => x).join(" "),
            y: group.signs.map(([, y]) => y).join(" "),
          },
          sign(mark).repeat(group.signs.length),
        ),
        group.load,
      );
    }
    return groups;
  }

  // `busy`: share of each cpu by its number, or null.
  drawLoad(busy) {
    this.busy = busy;
    for (const group of this.groups.values()) {
      let differs = false;
      group.bars.forEach(({ cpu }, index) => {
        const level = Math.round((busy[cpu] ?? 0) * GAUGE);
        if (group.levels[index] === level) return;
        group.levels[index] = level;
        differs = true;
      });
      if (!differs) continue;
      const parts = group.bars.map(({ start, wide }, index) =>
        group.levels[index] ? `${start}${group.levels[index]}h-${wide.toFixed(1)}z` : "",
      );
      group.load.setAttribute("d", parts.join(""));
    }
    if (this.active !== null) this.tell();
  }

  // `misplaced`: cpu -> slots with a thread that may run there and should not.
  drawMisplaced(misplaced) {
    this.misplaced = misplaced;
    const corners = this.places
      .filter(({ core }) => core.cpus.some((cpu) => misplaced.has(cpu)))
      .map(({ x, y, width }) => `M${x + width - 11} ${y}h11v11z`);
    setAttribute(this.misplacedPath, "d", corners.join(""));
    this.places.forEach(({ core }, index) => {
      setAttribute(
        this.options[index],
        "data-misplaced",
        core.cpus.some((cpu) => misplaced.has(cpu)),
      );
    });
  }

  drawSelection(slot) {
    this.selected = slot;
    for (const [mark, group] of this.groups) {
      const faded = slot !== null && mark !== slot;
      setAttribute(group.node, "class", `group ${colourClass(mark)}${faded ? " faded" : ""}`);
    }
  }

  describe(core) {
    const marks = [...new Set(core.cpus.map((cpu) => words(this.marks.get(cpu))))];
    const loads = core.cpus
      .map((cpu) => this.busy[cpu])
      .filter((busy) => busy !== null && busy !== undefined);
    const misplacing = new Set(core.cpus.flatMap((cpu) => [...(this.misplaced.get(cpu) ?? [])]));
    const parts = [`${core.cpus.length > 1 ? "cpus" : "cpu"} ${core.cpus.join(",")}`, marks.join(", ")];
    if (loads.length) parts.push(`${loads.map(share).join(" and ")} busy`);
    if (misplacing.size)
      parts.push(`a thread of slot ${[...misplacing].join(", ")} may run here and should not`);
    return parts.join(" · ");
  }

  indexOf(target) {
    const index = this.options.indexOf(target);
    return index === -1 ? null : index;
  }

  point(index) {
    if (index === this.active && index !== null) return;
    if (this.active !== null) this.options[this.active]?.setAttribute("aria-selected", "false");
    this.active = index;
    if (index === null) {
      this.outline.setAttribute("visibility", "hidden");
      this.drawing.removeAttribute("aria-activedescendant");
      this.onActive("");
      return;
    }
    const { x, y, width } = this.places[index];
    for (const [name, value] of Object.entries({
      x: x - 1,
      y: y - 1,
      width: width + 2,
      height: HEIGHT + 2,
    })) {
      this.outline.setAttribute(name, value);
    }
    this.outline.setAttribute("visibility", "visible");
    this.options[index].setAttribute("aria-selected", "true");
    this.drawing.setAttribute("aria-activedescendant", this.options[index].id);
    this.tell();
  }

  tell() {
    const text = this.describe(this.places[this.active].core);
    setAttribute(this.options[this.active], "aria-label", text);
    this.onActive(text);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.places.length === 0) return;
    const index = this.active ?? 0;
    if (KEYS.has(event.key)) this.point(neighbour(this.places, index, event.key));
    else if (event.key === "Enter" || event.key === " ") this.choose(index);
    else return;
    event.preventDefault();
  }

  choose(index) {
    if (index === null) return;
    const slots = this.places[index].core.cpus.map((cpu) => this.marks.get(cpu));
    const slot = slots.find((mark) => typeof mark === "number");
    if (slot !== undefined) this.onSelect(slot);
  }
}
