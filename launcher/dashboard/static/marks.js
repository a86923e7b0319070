// What a cpu is used for: its sign and words, as on the terminal (launcher/machine/picture.py and draw.py).
const SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

// In the order of the legend.
export const MARKS = {
  free: ["-", "not used"],
  reserved: ["=", "reserved for proxy and OS"],
  idle: ["·", "idle SMT sibling"],
  denied: ["/", "not allowed to this process"],
};

const COLOURS = 16;

// `mark` is a slot's number or a key of MARKS.
export function sign(mark) {
  return typeof mark === "number" ? (SIGNS[mark] ?? "#") : MARKS[mark][0];
}

export function words(mark) {
  return typeof mark === "number" ? `slot ${mark}` : MARKS[mark][1];
}

// Class of the mark's colours in picture.css.
export function colourClass(mark) {
  return typeof mark === "number" ? `slot-${mark % COLOURS}` : `mark-${mark}`;
}

// "0-3,8" -> [0, 1, 2, 3, 8]
export function parseCpus(text) {
  const found = [];
  for (const part of (text ?? "").split(",")) {
    if (!part) continue;
    const [first, last] = part.split("-").map(Number);
    for (let cpu = first; cpu <= (last ?? first); cpu++) found.push(cpu);
  }
  return found;
}

// [0, 1, 2, 3, 8] -> "0-3,8"
export function formatCpus(cpus) {
  const runs = [];
  for (const cpu of [...cpus].sort((one, other) => one - other)) {
    const run = runs.at(-1);
    if (run && cpu === run[1] + 1) run[1] = cpu;
    else runs.push([cpu, cpu]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}

// The mark of every cpu of the topology.
export function marksOf(topology, slots) {
  const slotOf = new Map();
  for (const slot of slots) for (const cpu of parseCpus(slot.cpus)) slotOf.set(cpu, slot.slot);
  const reserved = new Set(parseCpus(topology.reserved));
  const allowed = topology.allowed ? new Set(parseCpus(topology.allowed)) : null;
  const marks = new Map();
  for (const core of topology.cores) {
    const taken = core.cpus.some((cpu) => slotOf.has(cpu));
    for (const cpu of core.cpus) {
      if (slotOf.has(cpu)) marks.set(cpu, slotOf.get(cpu));
      else if (allowed && !allowed.has(cpu)) marks.set(cpu, "denied");
      else if (reserved.has(cpu)) marks.set(cpu, "reserved");
      else marks.set(cpu, taken ? "idle" : "free");
    }
  }
  return marks;
}

// Cpus outside its plan on which a thread of a slot may run -> slots' numbers. `placed`: `slots` of GET /v1/machine.
export function misplacedCpus(placed) {
  const found = new Map();
  for (const slot of placed ?? []) {
    for (const thread of slot.misplaced ?? []) {
      const planned = new Set(parseCpus(thread.planned));
      for (const cpu of parseCpus(thread.cpus)) {
        if (planned.has(cpu)) continue;
        if (!found.has(cpu)) found.set(cpu, new Set());
        found.get(cpu).add(slot.slot);
      }
    }
  }
  return found;
}

// A bound process may have this share of its memory elsewhere (MIN_BOUND_SHARE of launcher/instances/verify.py).
const TOLERATED = 0.05;

// Bytes of a slot's memory off its node where they are too many; 0 where not.
export function offNode(slot) {
  const total = Object.values(slot.node_bytes ?? {}).reduce((sum, bytes) => sum + bytes, 0);
  return slot.off_node_bytes > TOLERATED * total ? slot.off_node_bytes : 0;
}
