// One request by its id: queue, each attempt, first token, continuation, end.

import { askOrTrouble } from "./api.js";
import { NONE, count, day, plural, seconds } from "./format.js";
import { element, keyed, setAttribute, setText } from "./dom.js";
import { backLink, dataTable, factList, titleOf, troubleNote } from "./parts.js";

const ASK_MS = 2000;
// Parts of the bar that are wide enough for a word
const NAMED_SHARE = 0.08;
// Parts of the bar: what the request did since the step.
const KINDS = {
  received: "queue",
  queued: "queue",
  sent: "prefill",
  "first token": "decode",
  continued: "decode",
  overflowed: "overflow",
  "attempt failed": "failed",
};

export function mount(root, store) {
  const parts = build(root);
  let shown = null;
  let asked = -ASK_MS;
  let ended = false;

  async function refresh(id) {
    if (ended || performance.now() - asked < ASK_MS) return;
    asked = performance.now();
    const answer = await askOrTrouble(`api/requests/${encodeURIComponent(id)}`);
    if (id !== shown) return;
    parts.trouble.show(answer.trouble);
    if (answer.trouble) return;
    ended = answer.ended !== null;
    show(parts, answer);
  }

  store.subscribe((state) => {
    if (state.view !== "request") return;
    const id = state.selected.request;
    if (id !== shown) {
      shown = id;
      asked = -ASK_MS;
      ended = false;
      setText(parts.title, `Request ${id}`);
      setAttribute(parts.content, "hidden", true);
      parts.trouble.show("");
    }
    refresh(id);
  });
}

function build(root) {
  const title = titleOf("request");
  const trouble = troubleNote();
  const facts = factList();
  const bar = element("div", { class: "timespan", "aria-hidden": "true" });
  const steps = dataTable("Steps of the request", [
    ["Step"],
    ["After", "right"],
    ["Took", "right"],
    ["What"],
    ["Slot"],
    ["Why"],
  ]);
  const content = element("div", { hidden: true }, facts.node, bar, steps.node);
  root.append(backLink(), title, trouble.node, content);
  return { title, trouble, facts, bar, steps, content };
}

function show(parts, request) {
  setAttribute(parts.content, "hidden", false);
  parts.facts.show(factsOf(request));
  const { steps } = request;
  const total = request.ended === null ? steps.at(-1)?.at_s ?? 0 : request.ended - request.began;
  parts.steps.show(
    steps.map((step, index) => [
      String(index + 1),
      exactly(step.at_s),
      index + 1 < steps.length ? exactly(steps[index + 1].at_s - step.at_s) : "",
      step.what,
      place(step),
      step.why ?? "",
    ]),
  );
  const spans = steps.slice(0, -1).map((step, index) => ({
    index,
    kind: KINDS[step.what] ?? "other",
    size: steps[index + 1].at_s - step.at_s,
  }));
  keyed(parts.bar, spans, ({ index }) => index, () => element("span"), (node, { kind, size }) => {
    setAttribute(node, "class", `span-${kind}`);
    setText(node, size > total * NAMED_SHARE ? kind : "");
    node.style.setProperty("flex-grow", String(total ? size / total : 0));
  });
}

function factsOf(request) {
  return [
    ["Outcome", outcomeOf(request)],
    ["Began", day(request.began)],
    ["Took", request.ended === null ? "still running" : seconds(request.ended - request.began)],
    ["Route", `${request.route}${request.stream ? ", streamed" : ""}`],
    ["Model", request.model ?? NONE],
    ["Key", request.key ?? NONE],
    ["Tokens", tokensOf(request.tokens)],
    ["First token was predicted after", seconds(request.predicted_s)],
    ...(request.same_id ? [["Same id", sameId(request.same_id)]] : []),
    ...(request.source === "memory" ? [] : [["Known from", "usage ledger; earlier attempts are not known one by one"]]),
  ];
}

function sameId(others) {
  return `${plural(others, "other request", "other requests")}; this is the latest`;
}

function outcomeOf({ outcome, status, reason }) {
  return [outcome?.replace("_", " ") ?? "running", status && `status ${status}`, reason].filter(Boolean).join(", ");
}

function tokensOf(tokens) {
  if (!tokens) return "not known yet";
  const about = tokens.estimated ? "estimated: " : "";
  return `${about}${count(tokens.prompt)} prompt (${count(tokens.cached)} cached), ${count(tokens.output)} output`;
}

function place({ slot, generation, endpoint }) {
  if (endpoint) return endpoint;
  if (slot === null || slot === undefined) return "";
  return generation ? `${slot}, generation ${generation}` : String(slot);
}

// To the tenth of a millisecond
function exactly(value) {
  return value < 1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(3)} s`;
}
