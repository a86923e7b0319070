// The host's figures now, each above its last 15 minutes, or what there is of them.

import { absent, bytes, count, duration, money, number, seconds, share, twoTimes } from "./format.js";
import { element, setAttribute, setText, svg } from "./dom.js";

const WIDTH = 100;
const HEIGHT = 20;
// The shortest that holds all there is, else the longest
const SPANS_MS = [60_000, 5 * 60_000, 15 * 60_000];
const POINTS = 60;

// name: data-figure; value and note: texts of the status and the newest history row.
const FIGURES = [
  {
    name: "requests_per_s",
    label: "Requests/s",
    value: ({ row }) => number(row.requests_per_s),
    note: ({ row }) => failures(row.failed_per_s),
    alert: ({ row }) => row.failed_per_s > 0,
  },
  {
    name: "output_tokens_per_s",
    label: "Tokens/s",
    value: ({ row }) => number(row.output_tokens_per_s),
    note: ({ row }) => `prompt ${number(row.prompt_tokens_per_s)}`,
  },
  {
    name: "first_token_p99_s",
    label: "TTFT p50 / p99",
    value: ({ status, row }) => {
      const { p50_s, p99_s } = status.first_token ?? { p50_s: row.first_token_p50_s, p99_s: row.first_token_p99_s };
      const [p50, p99, unit] = twoTimes(p50_s, p99_s);
      return `${p50} / ${p99} ${unit}`;
    },
    note: ({ status }) => (status.first_token ? `last ${duration(status.first_token.window_s)}` : "no streams"),
  },
  {
    name: "queued",
    label: "Queue",
    value: ({ status, row }) => count(status.queue?.requests ?? status.requests.waiting ?? row.queued),
    note: ({ status, row }) => oldest(status.queue ? status.queue.oldest_s ?? 0 : row.oldest_queued_s),
    alert: ({ row }) => row.queue_rejected_per_s > 0,
  },
  {
    name: "in_flight",
    label: "In flight",
    value: ({ status }) => count(status.requests.in_flight),
    note: ({ status }) => `${status.ready} of ${status.slots.length} ready`,
    alert: ({ status }) => status.ready < status.slots.length,
  },
  {
    name: "kv_usage",
    label: "KV cache use",
    value: ({ row }) => share(row.kv_usage),
    note: () => "of all slots",
  },
  {
    name: "prefix_hit_rate",
    label: "Prefix hits",
    value: ({ row }) => share(row.prefix_hit_rate),
    note: () => "of prompt tokens",
  },
  {
    name: "cpu_busy",
    label: "CPUs busy",
    value: ({ row, machine }) => share(row.cpu_busy ?? mean(machine?.busy ?? [])),
    note: ({ row, machine }) => freeMemory(row.memory_free_bytes ?? machine?.nodes.reduce(addFree, 0)),
  },
  {
    name: "today",
    label: "Tokens today",
    value: ({ status }) => short(status.usage ? status.usage.prompt_tokens + status.usage.output_tokens : null),
    note: ({ status }) => (status.cost ? money(status.cost.today, status.cost.currency) : "no price set"),
  },
];

export function mount(root, store) {
  const cards = FIGURES.map(card);
  root.append(...cards.map(({ node }) => node));
  store.subscribe((state, changed) => {
    if (changed.has("now") && state.now?.status) drawValues(cards, state.now);
    if (changed.has("history") && state.history["1h"]?.rows.length) drawLines(cards, state.history["1h"]);
  });
}

function card(figure) {
  const value = element("dd", { class: "value", "data-value": "" }, "–");
  const note = element("dd", { class: "note", "data-note": "" });
  const path = svg("path", { fill: "none", "vector-effect": "non-scaling-stroke" });
  const line = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    path,
  );
  const list = element("dl", {}, element("dt", {}, figure.label), value, note);
  return { figure, node: element("div", { class: "figure", "data-figure": figure.name }, list, line), value, note, path };
}

function drawValues(cards, now) {
  const about = { status: now.status, machine: now.machine, row: now.figures ?? {} };
  for (const { figure, node, value, note } of cards) {
    setText(value, figure.value(about));
    setText(note, figure.note(about));
    setAttribute(node, "data-alert", figure.alert?.(about) ?? false);
  }
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function addFree(sum, node) {
  return sum + node.free_bytes;
}

function freeMemory(value) {
  return absent(value) ? "memory unknown" : `${bytes(value)} free`;
}

function failures(value) {
  if (absent(value)) return "not known yet";
  return value ? `${number(value)} failed/s` : "none failed";
}

function oldest(value) {
  if (absent(value)) return "age unknown";
  return value ? `oldest ${value < 10 ? seconds(value) : duration(value)}` : "none waits";
}

// 53,579,245: "53.6 M"
function short(value) {
  if (value === null || value < 1_000_000) return count(value);
  return value < 1e9 ? `${number(value / 1e6)} M` : `${number(value / 1e9)} G`;
}

function drawLines(cards, { columns, rows, newest }) {
  const recorded = rows.length ? newest - rows[0][0] : 0;
  const spanMs = SPANS_MS.find((span) => span >= recorded) ?? SPANS_MS.at(-1);
  const begin = newest - spanMs;
  let first = rows.length;
  while (first > 0 && rows[first - 1][0] > begin) first -= 1;
  for (const { figure, path } of cards) {
    const column = columns.indexOf(figure.name);
    if (column !== -1) setAttribute(path, "d", line(rows, first, column + 1, spanMs));
  }
}

// A path of at most POINTS means; an interval without values is a gap.
function line(rows, first, column, spanMs) {
  const begin = rows.at(-1)[0] - spanMs;
  const sums = new Array(POINTS).fill(0);
  const counts = new Array(POINTS).fill(0);
  for (let at = first; at < rows.length; at += 1) {
    const value = rows[at][column];
    if (value === null || value === undefined) continue;
    const point = Math.min(POINTS - 1, Math.floor(((rows[at][0] - begin) / spanMs) * POINTS));
    sums[point] += value;
    counts[point] += 1;
  }
  const means = sums.map((sum, point) => (counts[point] ? sum / counts[point] : null));
  const top = Math.max(...means, 0) || 1;
  let path = "";
  let drawn = false;
  means.forEach((mean, point) => {
    if (mean !== null) {
      const x = (point / (POINTS - 1)) * WIDTH;
      path += `${drawn ? "L" : "M"}${x.toFixed(1)} ${(HEIGHT - 1 - (mean / top) * (HEIGHT - 2)).toFixed(1)}`;
    }
    drawn = mean !== null;
  });
  return path;
}
