// One line of the time line. Evidence and events are written when it is opened.

import { element, setAttribute, setMessage, setText } from "./dom.js";
import { clock, day, duration } from "./format.js";
import { colourClass, sign } from "./marks.js";

const LEVELS = { bad: ["▼", "problem"], warn: ["◆", "warning"], info: ["·", ""] };
// Levels of log records
const LOGGED = { critical: "bad", error: "bad", warning: "warn" };
const DAY_S = 86_400;

// "bad", "warn" or "info"
export function levelOf({ level }) {
  return LOGGED[level] ?? "info";
}

export class ChangeItem {
  constructor() {
    this.when = element("time", { class: "when" });
    this.level = element("span", { class: "level", role: "img" });
    this.chip = element("span", { class: "chip", role: "img" });
    this.title = element("span", { class: "title" });
    this.facts = element("dl", { class: "facts" });
    this.story = element("div");
    this.details = element(
      "details",
      {},
      element("summary", {}, this.when, this.level, element("span", {}, this.chip, " ", this.title)),
      element("div", { class: "story" }, this.facts, this.story),
    );
    this.node = element("li", {}, this.details);
    this.details.addEventListener("toggle", () => this.drawStory());
  }

  draw(item) {
    const old = Date.now() / 1000 - item.time > DAY_S;
    setText(this.when, old ? day(item.time) : clock(item.time));
    if (this.item === item) return;
    this.item = item;
    const level = levelOf(item);
    const [shape, word] = LEVELS[level];
    setAttribute(this.node, "data-change", item.number);
    setAttribute(this.node, "data-level", level);
    setAttribute(this.node, "data-slot", item.slot);
    setAttribute(this.when, "datetime", new Date(item.time * 1000).toISOString());
    setText(this.level, shape);
    setAttribute(this.level, "aria-label", word || null);
    setAttribute(this.level, "aria-hidden", word ? null : "true");
    setAttribute(this.chip, "hidden", item.slot === null);
    if (item.slot !== null) {
      setAttribute(this.chip, "class", `chip ${colourClass(item.slot)}`);
      setAttribute(this.chip, "aria-label", `slot ${item.slot}`);
      setText(this.chip, sign(item.slot));
    }
    setText(this.title, item.title);
    this.facts.replaceChildren(...factsOf(item));
    this.drawStory();
  }

  drawStory() {
    if (!this.details.open || this.drawn === this.item) return;
    const { item } = this;
    this.drawn = item;
    const show = element("button", { type: "button" }, "Show in the charts");
    show.addEventListener("click", () => {
      document.dispatchEvent(new CustomEvent("show-time", { detail: item.time * 1000 }));
      document.getElementById("charts")?.scrollIntoView({ block: "nearest" });
    });
    this.story.replaceChildren(...evidenceOf(item), eventList(item), show);
  }
}

function factsOf({ time, until, cause, remedy, user, events }) {
  const facts = [
    ["Cause", cause],
    ["Remedy", remedy],
    ["By", user],
    ["Command", events.map((event) => event.fields?.verb).find(Boolean)],
    ["Lasted", until - time >= 1 ? duration(until - time) : ""],
  ];
  return facts
    .filter(([, text]) => text)
    .flatMap(([name, text]) => {
      const value = element("dd");
      setMessage(value, text);
      return [element("dt", {}, name), value];
    });
}

function evidenceOf({ events }) {
  const lines = [...new Set(events.flatMap((event) => event.fields?.evidence ?? []))];
  return lines.length ? [element("pre", { class: "evidence" }, lines.join("\n"))] : [];
}

function eventList({ events }) {
  const lines = events.map(({ time, message }) => {
    const text = element("span");
    setMessage(text, message);
    return element("li", {}, element("span", { class: "when" }, clock(time)), " ", text);
  });
  return element("ul", { class: "events" }, ...lines);
}
