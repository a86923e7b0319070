// The machine's picture: sockets, NUMA nodes, L3 caches, cores with their slot and load, memory of each node.

import { Cores } from "./cores.js";
import { element, keyed, setAttribute, setText } from "./dom.js";
import { bytes, share } from "./format.js";
import { MARKS, colourClass, formatCpus, marksOf, offNode, parseCpus, sign, misplacedCpus } from "./marks.js";
import { MachineTable } from "./machine_table.js";
import { MemoryBar, patterns } from "./memory_bar.js";
import { socketsOf } from "./sockets.js";
import { STATES, stateOf } from "./slots.js";

export { sign } from "./marks.js";

export function mount(root, store) {
  const picture = new Picture(root, store);
  store.subscribe((state, changed) => picture.update(state, changed));
}

class Picture {
  constructor(root, store) {
    this.store = store;
    this.nodes = [];
    this.built = "";
    this.title = element("p", { class: "machine-title" });
    this.legend = element("ul", { class: "slot-legend", "aria-label": "Slots" });
    this.sockets = element("div", { class: "sockets" });
    this.readout = element("p", { class: "readout" });
    this.signs = element("p", { class: "signs" });
    this.table = new MachineTable();
    this.none = element("p", { class: "picture-none", hidden: true });
    root.append(
      this.none,
      patterns(),
      this.title,
      this.legend,
      this.sockets,
      this.readout,
      this.signs,
      this.table.node,
    );
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.sockets);
    window.addEventListener("beforeprint", () => this.update(this.store.state, null));
  }

  update(state, changed) {
    const { topology, now } = state;
    const slots = now?.status?.slots;
    const isKnown = Boolean(topology?.cores?.length && slots);
    setAttribute(this.none, "hidden", !now || isKnown);
    setText(this.none, topology?.trouble || "The daemon does not say how this machine is built.");
    if (!isKnown) return;
    if (this.differs(topology, slots)) this.build(topology, slots);
    else if (changed && !changed.has("now") && !changed.has("selected")) return;
    this.draw(state);
  }

  // What is asked again after a daemon's restart is mostly the same: the picture stays, and the focus in it.
  differs(topology, slots) {
    if (topology !== this.asked) {
      this.asked = topology;
      const { sockets, nodes, cores, reserved, allowed } = topology;
      this.form = JSON.stringify([sockets, nodes, cores, reserved, allowed]);
    }
    const form = this.form + slots.map(({ slot, cpus }) => `${slot}:${cpus}`).join(" ");
    if (form === this.built) return false;
    this.built = form;
    return true;
  }

  build(topology, slots) {
    this.topology = topology;
    this.marks = marksOf(topology, slots);
    this.nodes = [];
    this.sockets.replaceChildren(
      ...socketsOf(topology).map(({ socket, boxes }) =>
        element(
          "div",
          { class: "socket", "data-socket": socket },
          element("h3", {}, socket === null ? "memory without cpus" : `socket ${socket}`),
          element("div", { class: "nodes" }, ...boxes.map((box) => this.buildNode(box))),
        ),
      ),
    );
    const cpus = [...this.marks.values()];
    const used = Object.keys(MARKS).filter((mark) => cpus.includes(mark));
    setText(this.title, `${topology.name} · ${topology.cores.length} cores · ${topology.cpu_count} cpus`);
    this.signs.replaceChildren(
      element(
        "span",
        {},
        element("span", { class: "gauge-key", "aria-hidden": "true" }),
        " height: load of each cpu",
      ),
      element("span", {}, "thin bar: memory by slot"),
      ...used.map((mark) =>
        element(
          "span",
          {},
          element("span", { class: `chip ${colourClass(mark)}` }, sign(mark)),
          ` ${MARKS[mark][1]}`,
        ),
      ),
      element(
        "span",
        {},
        element("span", { class: "misplaced-key", "aria-hidden": "true" }, "◥"),
        " a thread may run here that should not",
      ),
      element(
        "span",
        {},
        element("span", { class: "misplaced-key", "aria-hidden": "true" }, "◆"),
        " memory off its node",
      ),
    );
    this.resize();
  }

  buildNode({ node, cores: own, holdsMemory }) {
    const name = node === null ? "in no NUMA node" : `node ${node.node}`;
    const cores = own.length
      ? new Cores(name, own, this.marks, {
          onSelect: (slot) => this.store.select({ slot }),
          onActive: (text) => setText(this.readout, text),
        })
      : null;
    const memory = holdsMemory ? new MemoryBar(name) : null;
    const box = element(
      "div",
      { class: "numa-node", "data-node": node?.node, role: "group", "aria-label": name },
      element("p", { class: "node-title" }, element("strong", {}, name), nodeDetail(node, own)),
      ...(cores ? [cores.drawing] : []),
      ...(memory ? [memory.node] : []),
    );
    this.nodes.push({ node: node?.node, box, cores, memory });
    return box;
  }

  resize() {
    for (const { box, cores } of this.nodes) {
      const width = box.clientWidth - 2 * Number.parseFloat(getComputedStyle(box).paddingLeft);
      if (!cores || !(width > 0) || cores.drawnWidth === width) continue;
      cores.drawnWidth = width;
      cores.resize(width);
    }
  }

  draw({ now, selected }) {
    const { status, machine } = now;
    const placed = machine?.slots ?? [];
    const busy = machine?.busy ?? [];
    const misplaced = this.misplacedOf(placed);
    const planned = new Map(status.slots.map((slot) => [slot.slot, slot.node]));
    const memory = new Map((machine?.nodes ?? []).map((node) => [node.node, node]));
    for (const { node, box, cores, memory: bar } of this.nodes) {
      if (cores?.drawnWidth) {
        cores.drawLoad(busy);
        if (cores.misplaced !== misplaced) cores.drawMisplaced(misplaced);
        cores.drawSelection(selected.slot);
      }
      if (!bar || !memory.has(node)) continue;
      bar.draw(memory.get(node), placed, planned);
      setAttribute(box, "data-off-node", bar.node.hasAttribute("data-off-node"));
    }
    const rows = slotRows(status.slots, placed, busy);
    keyed(
      this.legend,
      rows,
      (row) => row.slot,
      (row) => this.newSlot(row),
      (item, row) => drawSlot(item, row, selected),
    );
    this.table.draw(rows);
  }

  // The same object while nothing differs.
  misplacedOf(placed) {
    const key = JSON.stringify(placed.map((slot) => slot.misplaced));
    if (key !== this.misplacedKey) this.misplaced = misplacedCpus(placed);
    this.misplacedKey = key;
    return this.misplaced;
  }

  newSlot({ slot }) {
    const parts = ["visually-hidden", "words", "problem"].map((name) => element("span", { class: name }));
    const button = element(
      "button",
      { type: "button", class: "slot-button" },
      element("span", { class: `chip ${colourClass(slot)}`, "aria-hidden": "true" }, sign(slot)),
      ...parts,
    );
    button.addEventListener("click", () =>
      this.store.select({ slot: this.store.state.selected.slot === slot ? null : slot }),
    );
    return element("li", { "data-slot": slot }, button);
  }
}

function nodeDetail(node, cores) {
  const cpus = cores.flatMap((core) => core.cpus);
  const caches = new Set(cores.map((core) => core.l3).filter((l3) => l3 !== null && l3 !== undefined)).size;
  const parts = [
    ...(node === null ? [] : [bytes(node.memory_bytes)]),
    cpus.length ? `cpus ${formatCpus(cpus)}` : "no cpus",
    ...(caches ? [`${caches} × L3`] : []),
  ];
  return parts.map((part) => ` · ${part}`).join("");
}

function slotRows(slots, placed, busy) {
  const placement = new Map(placed.map((slot) => [slot.slot, slot]));
  return slots.map((slot) => {
    const cpus = parseCpus(slot.cpus);
    const loads = cpus.map((cpu) => busy[cpu]).filter((load) => load !== null && load !== undefined);
    const own = placement.get(slot.slot) ?? {};
    return {
      slot: slot.slot,
      model: slot.model,
      state: stateOf(slot),
      node: slot.node,
      cpus,
      mean: loads.length ? loads.reduce((sum, load) => sum + load, 0) / loads.length : null,
      most: loads.length ? Math.max(...loads) : null,
      misplaced: own.misplaced_threads ?? own.misplaced?.length ?? 0,
      threads: own.misplaced ?? [],
      bytes: Object.entries(own.node_bytes ?? {}),
      off: offNode(own),
    };
  });
}

function drawSlot(item, row, selected) {
  const [, name, text, problem] = item.firstChild.children;
  const shownState = row.state === "ready" ? "" : `${row.state} `;
  setText(name, `slot ${row.slot} ${row.state}, busy`);
  // From 10 on the sign is a letter.
  const number = sign(row.slot) === `${row.slot}` ? "" : `${row.slot} `;
  setText(text, `${number}${STATES[row.state]?.[0] ?? ""} ${shownState}${share(row.mean)}`);
  setAttribute(
    item.firstChild,
    "title",
    `slot ${row.slot}: ${row.state}, its cpus are ${share(row.mean)} busy`,
  );
  const problems = [];
  if (row.misplaced)
    problems.push(`◥ ${row.misplaced} ${row.misplaced === 1 ? "thread" : "threads"} off its cpus`);
  if (row.off) problems.push(`◆ ${bytes(row.off)} off its node`);
  setText(problem, problems.join(" "));
  setAttribute(item, "data-misplaced", row.misplaced > 0);
  setAttribute(item, "data-off-node", row.off > 0);
  setAttribute(item.firstChild, "aria-pressed", String(selected.slot === row.slot));
}
