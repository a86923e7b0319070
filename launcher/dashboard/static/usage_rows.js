// Heads and rows of the tables of usage. Pure.

import { NONE, clock, count, day, money, number, seconds, share, twoTimes } from "./format.js";

export const USAGE_HEADS = [
  ["Name"],
  ["Requests", "right"],
  ["Failed", "right"],
  ["Prompt tokens", "right"],
  ["Cached", "right"],
  ["Output tokens", "right"],
  ["First byte 50/99", "right"],
  ["Charged", "right"],
];
export const MODEL_HEADS = [
  ["Model"],
  ["Ready", "right"],
  ["In flight", "right"],
  ["Waiting in engine", "right"],
  ["Tokens/s", "right"],
  ["Worst TTFT p99", "right"],
  ["KV use", "right"],
];

export const KEY_HEADS = [
  ["Key"],
  ["Accepted", "right"],
  ["In flight", "right"],
  ["Prompt tokens", "right"],
  ["Output tokens", "right"],
];

export const LATEST_HEADS = [
  ["Request"],
  ["Ended"],
  ["Key"],
  ["Model"],
  ["Outcome"],
  ["Slot", "right"],
  ["Tokens in / out", "right"],
  ["First byte", "right"],
  ["Took", "right"],
];

export const BUDGET_HEADS = [["Key and budget"], ["Limit", "right"], ["Spent", "right"], ["Left", "right"], ["Ends"]];

export const MEASURED_HEADS = [["Result"], ["When"], ["What"], ["Tokens/s", "right"], ["TTFT p99", "right"]];

export function usageFacts(total, cost) {
  const facts = total
    ? [
        ["Requests", `${count(total.requests)}, ${count(total.failed)} failed`],
        ["Prompt tokens", `${count(total.prompt_tokens)}, ${count(total.cached_tokens)} from prefix caches`],
        ["Output tokens", count(total.output_tokens)],
      ]
    : [];
  return cost ? [...facts, ...costFacts(cost)] : facts;
}

function costFacts({ currency, bill, allocated, used, utilisation }) {
  const busy = money(used?.output, currency);
  return [
    ["Bill", money(bill, currency)],
    ["Per million output tokens", `${money(allocated.output, currency)}, of busy time ${busy}`],
    ["Utilisation", share(utilisation)],
  ];
}

export function usageRow(row, currency) {
  const [first, last, unit] = twoTimes(row.first_byte_p50_s, row.first_byte_p99_s);
  return [
    row.name || "(none)",
    count(row.requests),
    count(row.failed),
    count(row.prompt_tokens),
    row.prompt_tokens ? share(row.cached_tokens / row.prompt_tokens) : NONE,
    count(row.output_tokens),
    `${first} / ${last} ${unit}`,
    Number(row.charged) ? money(row.charged, currency) : NONE,
  ];
}

// Rows of the models of these slots.
export function modelRows(slots) {
  const models = Map.groupBy(slots, (slot) => slot.model);
  return [...models].map(([model, found]) => modelRow(model, found));
}

function modelRow(model, slots) {
  return [
    model,
    `${slots.filter((slot) => slot.state === "ready").length}/${slots.length}`,
    count(sum(slots.map((slot) => slot.in_flight))),
    count(sum(slots.map((slot) => slot.load?.waiting))),
    number(sum(slots.map((slot) => slot.tokens_per_s))),
    seconds(highest(slots.map((slot) => slot.first_token?.p99_s))),
    share(mean(slots.map((slot) => slot.load?.kv_usage))),
  ];
}

function known(values) {
  return values.filter((value) => value !== null && value !== undefined);
}

function sum(values) {
  const found = known(values);
  return found.length ? found.reduce((total, value) => total + value, 0) : null;
}

function highest(values) {
  const found = known(values);
  return found.length ? Math.max(...found) : null;
}

function mean(values) {
  const found = known(values);
  return found.length ? sum(found) / found.length : null;
}

export function keyRow([key, { accepted, in_flight: inFlight, prompt_tokens: prompt, output_tokens: output }]) {
  return [key, count(accepted), count(inFlight), count(prompt), count(output)];
}

export function latestRow(request) {
  const { request_id: id, slot, overflow, prompt_tokens: prompt, output_tokens: output } = request;
  return [
    { text: id, href: `#/request/${encodeURIComponent(id)}` },
    clock(request.time),
    request.key || NONE,
    request.model,
    request.outcome.replace("_", " "),
    overflow || (slot === null ? NONE : String(slot)),
    `${count(prompt)} / ${count(output)}`,
    seconds(request.first_byte_s),
    seconds(request.duration_s),
  ];
}

export function budgetRow({ key, budget, unit, limit, spent, left, ends }) {
  const amount = (value) => (value === null ? NONE : `${unit === "tokens" ? count(value) : value} ${unit}`);
  return [`${key}: ${budget}`, amount(limit), amount(spent), amount(left), ends ? day(ends) : NONE];
}

export function measuredRow({ kind, id, time, what, output_tokens_per_s: speed, ttft_p99_s: firstToken, complete }) {
  return [`${kind} ${id}`, day(time), complete ? what : `${what} (not complete)`, number(speed), seconds(firstToken)];
}
