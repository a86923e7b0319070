// Which columns of the history are drawn together, in which unit.

import { bytes, count, money, number, seconds, share } from "./format.js";

// `drawn`: what of several rows that share a px: "mean", "most" or "least".
const line = (column, name, trace = "a", drawn = "mean") => ({ column, name, trace, drawn });

const PLAIN = { show: number, steps: 10 };
const WHOLE = {
  show: (value) => (Number.isInteger(value) ? count(value) : number(value)),
  steps: 10,
  least: 1,
};
const TIME = { show: seconds, steps: 10 };
const SHARE = { show: share, steps: 10, whole: 1 };
const BYTES = { show: bytes, steps: 2 };

export const HOST_CHARTS = [
  {
    id: "requests",
    title: "Requests per second",
    unit: PLAIN,
    lines: [
      line("requests_per_s", "ended"),
      line("failed_per_s", "failed", "bad", "most"),
      line("queue_rejected_per_s", "queue full", "c", "most"),
      line("overflow_per_s", "overflow", "b", "most"),
    ],
  },
  {
    id: "tokens",
    title: "Tokens per second",
    unit: PLAIN,
    lines: [line("output_tokens_per_s", "output"), line("prompt_tokens_per_s", "prompt", "b")],
  },
  {
    id: "first-token",
    title: "Time to first token",
    unit: TIME,
    lines: [line("first_token_p50_s", "p50"), line("first_token_p99_s", "p99", "b", "most")],
  },
  {
    id: "in-flight",
    title: "Requests in flight and queued",
    unit: WHOLE,
    lines: [line("in_flight", "in flight"), line("queued", "queued", "b", "most")],
  },
  {
    id: "oldest",
    title: "Oldest request in the queue",
    unit: TIME,
    lines: [line("oldest_queued_s", "age", "a", "most")],
  },
  {
    id: "shares",
    title: "Use of the machine",
    unit: SHARE,
    lines: [
      line("cpu_busy", "cpus busy"),
      line("kv_usage", "KV cache", "b"),
      line("prefix_hit_rate", "prefix hits", "c"),
    ],
  },
  {
    id: "memory",
    title: "Free memory",
    unit: BYTES,
    lines: [line("memory_free_bytes", "free", "a", "least")],
  },
  { id: "ready", title: "Ready instances", unit: WHOLE, lines: [line("ready", "ready", "a", "least")] },
  { id: "cost", title: "Cost per hour", unit: null, lines: [line("cost_per_hour", "cost")], optional: true },
];

const SLOT_CHARTS = [
  ["tokens_per_s", "Tokens per second", PLAIN],
  ["in_flight", "Requests in flight", WHOLE],
  ["kv_usage", "KV cache use", SHARE],
  ["cpu_busy", "Load of its cpus", SHARE],
];

// Charts of the slots whose columns the history has.
export function slotCharts(columns) {
  const slots = columns
    .map((column) => /^slot\.(\d+)\.tokens_per_s$/.exec(column))
    .filter(Boolean)
    .map(([, slot]) => Number(slot));
  if (slots.length === 0) return [];
  const charts = SLOT_CHARTS.map(([column, title, unit]) => ({
    id: `slot-${column}`,
    title: slots.length === 1 ? `Slot ${slots[0]} · ${title}` : `${title} by slot`,
    unit,
    lines: slots.map((slot) => ({ column: `slot.${slot}.${column}`, name: `slot ${slot}`, trace: slot })),
  }));
  const states = slots.map((slot) => ({ column: `slot.${slot}.state`, name: `slot ${slot}`, trace: slot }));
  const title = slots.length === 1 ? `Slot ${slots[0]} · State` : "States of the slots";
  return [...charts, { id: "slot-state", title, states: true, lines: states }];
}

export function moneyUnit(currency) {
  return { show: (value) => money(value, currency), steps: 10 };
}

// Values of horizontal lines from 0 to at least `most`: 1, 2 or 5 × 10^n apart, or powers of 2 for bytes.
export function valueTicks(unit, most) {
  if (unit.whole) return [0, 0.5, 1];
  const top = Math.max(most, unit.least ?? 0) || 1;
  const rough = top / 3;
  const power = unit.steps === 2 ? 2 ** Math.floor(Math.log2(rough)) : 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find((times) => times * power >= rough) * power;
  if (unit.steps === 2) step = rough <= power ? power : 2 * power;
  if (unit.least) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let index = 0; index === 0 || ticks.at(-1) < top; index++) ticks.push(index * step);
  return ticks;
}
