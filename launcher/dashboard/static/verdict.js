// Is it well? The verdict in words, how old the data is, and what is wrong, with its remedy.

import { duration } from "./format.js";
import { commandsIn, element, keyed, setAttribute, setMessage, setText } from "./dom.js";

// Problems above the fold; the others open.
const SHOWN = 4;
const SPOKEN = 10;
const OLD_S = 10;
// The page asks every 2 s.
const FRESH_S = 3;
const COPIED_MS = 2000;
// The shape says the level, too: not every reader sees the colour.
const SIGNS = { asking: "…", good: "✓", warn: "!", bad: "✕", unknown: "?" };
const NAMES = { good: "well", warn: "degraded", bad: "down", unknown: "unknown", asking: "not known yet" };

export function mount(root, store) {
  const sign = element("span", { class: "sign", role: "img" });
  const head = element("strong", { "data-headline": "" });
  const rest = element("span", { class: "rest", "data-rest": "" });
  const age = element("span", { class: "age", "data-age": "" });
  // On paper
  const time = element("span", { class: "time" });
  const first = problemList();
  const others = problemList();
  const count = element("summary");
  const more = element("details", { hidden: true }, count, others);
  const spoken = element("p", { class: "visually-hidden", role: "status", "aria-live": "polite" });
  root.append(
    element("p", { class: "line", "data-verdict": "" }, sign, head, rest, time, age),
    first,
    more,
    spoken,
  );

  function draw() {
    const { level, line, problems } = verdictOf(store.state);
    const [headline, ...parts] = line.split("; ");
    setAttribute(root, "data-level", level);
    setText(sign, SIGNS[level] ?? SIGNS.unknown);
    setAttribute(sign, "aria-label", NAMES[level] ?? NAMES.unknown);
    setText(head, headline);
    setText(rest, parts.join(" · "));
    const sorted = problems.toSorted((a, b) => rank(a) - rank(b));
    drawProblems(first, sorted.slice(0, SHOWN));
    drawProblems(others, sorted.slice(SHOWN));
    setAttribute(more, "hidden", problems.length <= SHOWN);
    setText(count, `${problems.length - SHOWN} more`);
    speak(spoken, level, headline, problems);
    setText(document.head.querySelector("title"), `${SIGNS[level] ?? "?"} ${headline} – numa-launcher`);
  }

  function drawAge() {
    const shown = shownOf(store.state);
    if (shown === null || shown.age_s === null) return setText(age, "no data yet");
    setText(time, `as of ${new Date(shown.time * 1000).toLocaleString("sv")}`);
    const old = shown.age_s + (performance.now() - shown.receivedAt) / 1000;
    setText(age, old < FRESH_S ? "live" : `data ${duration(old)} old`);
    setAttribute(age, "data-old", old > OLD_S);
    setAttribute(document.body, "data-stale", old > OLD_S);
  }

  store.subscribe((_, changed) => {
    if (["now", "connection", "fleet", "fleetTrouble", "view"].some((name) => changed.has(name))) {
      draw();
      drawAge();
    }
  });
  setInterval(() => document.hidden || drawAge(), 1000);
}

// The answer whose verdict is shown: of this host, or of the fleet.
function shownOf({ view, now, fleet, connection }) {
  if (view === "fleet") return fleet;
  return now && { ...now, receivedAt: connection.receivedAt };
}

function verdictOf(state) {
  const { view, connection, fleetTrouble } = state;
  if (!connection.answers) {
    const { trouble, remedy, status } = connection;
    const line = status === 401 ? "NO ACCESS" : "NO ANSWER from the dashboard";
    return { level: "unknown", line, problems: [{ what: trouble, remedy, slot: null }] };
  }
  if (view === "fleet" && fleetTrouble) {
    return { level: "unknown", line: "NO FLEET", problems: [{ what: fleetTrouble, slot: null }] };
  }
  const asked = view === "fleet" ? "ingress" : "daemon";
  return shownOf(state)?.verdict ?? { level: "asking", line: `Asking the ${asked}`, problems: [] };
}

// Remarks come last.
function rank({ level }) {
  return level === "bad" ? 0 : level === "good" ? 2 : 1;
}

// Numbers that only count seconds are no news: the sentence is spoken again when its words change.
function speak(node, level, headline, problems) {
  const of = ({ host, slot, what }) => (host ? `${host} ${what}` : slot === null ? what : `slot ${slot} ${what}`);
  // A list of 200 hosts is not read out.
  const words = [headline, ...problems.slice(0, SPOKEN).map(of)].join(". ");
  const news = level + words.replace(/\d+([.,:hms]\d*)*/g, "#");
  if (node.spokenNews === news) return;
  node.spokenNews = news;
  setText(node, words);
}

function problemList() {
  return element("ul", { class: "problems" });
}

function drawProblems(list, problems) {
  const keyOf = ({ host, slot, what }) => `${host ?? slot} ${what.replace(/\d+/g, "#")}`;
  keyed(list, problems, keyOf, newProblem, showProblem);
  setAttribute(list, "hidden", problems.length === 0);
}

function newProblem() {
  const slot = element("a", { class: "of-slot" });
  const what = element("span", { class: "what" });
  const remedy = element("span", { class: "remedy", "data-remedy": "" });
  const copied = element("span", {}, "Copy");
  const command = element("span", { class: "visually-hidden" });
  const copy = element("button", { type: "button", class: "copy" }, copied, " ", command);
  const item = element("li", { "data-problem": "" }, slot, what, remedy, copy);
  item.parts = { slot, what, remedy, copy, command };
  copy.addEventListener("click", () => copyCommand(copied, item.command));
  return item;
}

function showProblem(item, problem) {
  const { slot, what, remedy, copy, command } = item.parts;
  const number = problem.slot ?? null;
  setAttribute(item, "data-of-slot", number);
  setAttribute(item, "data-level", problem.level ?? "warn");
  setAttribute(slot, "hidden", number === null && !problem.host);
  setAttribute(slot, "href", number === null ? null : `#/slot/${number}`);
  setText(slot, problem.host ?? (number === null ? "" : `Slot ${number}`));
  setText(what, problem.what);
  setMessage(remedy, problem.remedy ?? "");
  // A single word, such as `top`, names a program: nothing to copy.
  item.command = commandsIn(problem.remedy ?? "").find((text) => text.includes(" ")) ?? "";
  // Browsers offer the clipboard to local and encrypted pages only.
  setAttribute(copy, "hidden", !item.command || !navigator.clipboard);
  setText(command, item.command);
}

async function copyCommand(word, command) {
  try {
    await navigator.clipboard.writeText(command);
    setText(word, "Copied");
  } catch {
    setText(word, "Not allowed to copy");
  }
  setTimeout(() => setText(word, "Copy"), COPIED_MS);
}
