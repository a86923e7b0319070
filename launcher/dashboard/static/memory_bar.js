// The memory of one NUMA node: what it holds, and below whose it is.

import { element, keyed, setAttribute, setText, svg } from "./dom.js";
import { bytes } from "./format.js";
import { colourClass, offNode, sign } from "./marks.js";

const PARTS = [
  ["weights", "weights"],
  ["kv_cache", "KV cache"],
  ["other", "other"],
  ["foreign", "remote pages"],
  ["free", "free"],
];
const HEIGHT = 18;
const OWNERS = 10;

// Patterns of the parts, once in the page: told apart without colour.
export function patterns() {
  const pattern = (name, size, d) =>
    svg(
      "pattern",
      { id: `pattern-${name}`, width: size, height: size, patternUnits: "userSpaceOnUse" },
      svg("rect", { class: `part-${name}`, width: size, height: size }),
      svg("path", { class: "hatch", d }),
    );
  return svg(
    "svg",
    { class: "patterns", width: "0", height: "0", "aria-hidden": "true" },
    svg(
      "defs",
      {},
      pattern("kv_cache", 8, "M-2 2l4-4M0 8l8-8M6 10l4-4"),
      pattern("other", 6, "M3 2v2"),
      pattern("foreign", 8, "M0 0l8 8M0 8l8-8"),
    ),
  );
}

function fill(name) {
  return name === "weights" || name === "free"
    ? { class: `part-${name}` }
    : { fill: `url(#pattern-${name})` };
}

export class MemoryBar {
  constructor(name) {
    this.name = name;
    this.segments = PARTS.map(([part]) => svg("rect", { height: HEIGHT, "data-part": part, ...fill(part) }));
    this.owners = svg("g", { class: "owners" });
    this.foreign = svg("g", { class: "foreign" });
    this.bar = svg(
      "svg",
      {
        class: "memory",
        width: "100%",
        height: HEIGHT + OWNERS + 2,
        role: "img",
        "aria-label": `Memory of ${name}`,
      },
      ...this.segments,
      svg("rect", { class: "frame", x: "0", y: "0.5", width: "100%", height: HEIGHT - 1 }),
      this.owners,
    );
    this.amounts = PARTS.map(() => element("span", { class: "amount" }));
    this.items = PARTS.map(([part, words], index) =>
      element(
        "li",
        { "data-part": part },
        svg(
          "svg",
          { class: "swatch", width: "14", height: "10", "aria-hidden": "true" },
          svg("rect", { width: "14", height: "10", ...fill(part) }),
          svg("rect", { class: "frame", x: "0.5", y: "0.5", width: "13", height: "9" }),
        ),
        ` ${words} `,
        this.amounts[index],
      ),
    );
    this.problems = element("ul", { class: "node-problems" });
    this.node = element(
      "div",
      { class: "node-memory" },
      this.bar,
      element("ul", { class: "parts" }, ...this.items),
      this.problems,
    );
  }

  // `memory`: a node of GET /v1/machine; `placed`: its slots; `planned`: slot -> its node.
  draw(memory, placed, planned) {
    const total = memory.total_bytes || 1;
    let left = 0;
    PARTS.forEach(([part], index) => {
      const amount = memory[`${part}_bytes`] ?? 0;
      const width = Math.max(0, Math.min(100 - left, (100 * amount) / total));
      setAttribute(this.segments[index], "x", `${left.toFixed(2)}%`);
      setAttribute(this.segments[index], "width", `${width.toFixed(2)}%`);
      left += width;
      setText(this.amounts[index], bytes(amount));
      setAttribute(this.items[index], "hidden", part === "foreign" && !amount);
    });
    this.drawOwners(memory.node, total, placed, planned);
  }

  drawOwners(node, total, placed, planned) {
    let left = 0;
    const parts = [];
    for (const slot of placed) {
      const amount = slot.node_bytes?.[node] ?? 0;
      if (!amount) continue;
      const own = planned.get(slot.slot);
      const remote = own !== null && own !== undefined && own !== node && offNode(slot) > 0;
      const width = Math.min(100 - left, (100 * amount) / total);
      parts.push({ slot: slot.slot, amount, left, width, remote, own });
      left += width;
    }
    keyed(this.owners, parts, (part) => part.slot, newOwner, drawOwner);
    const remote = parts.filter((part) => part.remote);
    keyed(
      this.problems,
      remote,
      (part) => part.slot,
      () => element("li", { class: "problem" }),
      (item, part) =>
        setText(
          item,
          `◆ ${bytes(part.amount)} of slot ${sign(part.slot)} lie here, planned on node ${part.own}`,
        ),
    );
    setAttribute(this.node, "data-off-node", remote.length > 0);
  }
}

function newOwner(part) {
  return svg(
    "g",
    { class: colourClass(part.slot) },
    svg("rect", { class: "owner", y: HEIGHT + 3, height: OWNERS - 2 }),
    svg("rect", { class: "remote", y: HEIGHT + 2, height: OWNERS, fill: "url(#pattern-foreign)" }),
  );
}

function drawOwner(group, part) {
  const [owner, remote] = group.children;
  for (const rect of [owner, remote]) {
    setAttribute(rect, "x", `${part.left.toFixed(2)}%`);
    setAttribute(rect, "width", `${part.width.toFixed(2)}%`);
  }
  setAttribute(remote, "visibility", part.remote ? "visible" : "hidden");
}
