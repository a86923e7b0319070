// What changed: one line for each folded item, newest first; a line opens with cause, remedy, evidence and events.

import { ChangeItem, levelOf } from "./change_item.js";
import { element, keyed, setAttribute, setText } from "./dom.js";

const PAGE = 100;
const HOST = "host";

export function mount(root, store) {
  const timeline = new Timeline(root, store);
  store.subscribe((state, changed) => timeline.update(state, changed));
}

class Timeline {
  constructor(root, store) {
    this.store = store;
    this.shown = PAGE;
    this.selected = null;
    this.items = new WeakMap();
    this.choice = element("select", { id: "timeline-slot" });
    this.problems = element("input", { type: "checkbox" });
    this.list = element("ol", { class: "timeline", "aria-labelledby": "timeline-title" });
    this.none = element("p", { class: "timeline-none" }, "No changes.");
    this.more = element("button", { type: "button", class: "timeline-more" }, "Show older changes");
    const tools = element(
      "div",
      { class: "timeline-tools" },
      element("span", {}, element("label", { for: "timeline-slot" }, "Of "), this.choice),
      element("label", { class: "check" }, this.problems, " only problems"),
    );
    root.append(tools, this.none, this.list, this.more);
    this.choice.addEventListener("change", () => this.draw());
    this.problems.addEventListener("change", () => this.draw());
    this.more.addEventListener("click", () => {
      this.shown += PAGE;
      this.draw();
    });
    this.list.addEventListener("keydown", (event) => this.onKey(event));
  }

  update(state, changed) {
    const slots = state.now?.status?.slots;
    if (slots && changed.has("now")) this.drawChoice(slots);
    const followed = slots && this.follow(state.selected.slot);
    if (followed || changed.has("changes")) this.draw();
  }

  // The selected slot is the chosen one until another is chosen.
  follow(slot) {
    if (slot === this.selected) return false;
    this.selected = slot;
    this.choice.value = slot === null ? "" : String(slot);
    return true;
  }

  drawChoice(slots) {
    const options = [
      ["", "everything"],
      [HOST, "the host"],
      ...slots.map(({ slot }) => [String(slot), `slot ${slot}`]),
    ];
    keyed(
      this.choice,
      options,
      ([value]) => value,
      ([value]) => element("option", { value }),
      (option, [, text]) => setText(option, text),
    );
  }

  matches(item) {
    const { slot } = item;
    const wanted = this.choice.value;
    const here = wanted === "" || (wanted === HOST ? slot === null : String(slot) === wanted);
    return here && (!this.problems.checked || levelOf(item) !== "info");
  }

  draw() {
    const found = this.store.state.changes.filter((item) => this.matches(item)).reverse();
    keyed(
      this.list,
      found.slice(0, this.shown),
      (item) => item.number,
      () => this.newLine(),
      (line, item) => this.items.get(line).draw(item),
    );
    setAttribute(this.none, "hidden", found.length > 0);
    setAttribute(this.more, "hidden", found.length <= this.shown);
  }

  newLine() {
    const item = new ChangeItem();
    this.items.set(item.node, item);
    return item.node;
  }

  onKey(event) {
    if (event.target.tagName !== "SUMMARY" || event.ctrlKey || event.metaKey || event.altKey) return;
    const lines = [...this.list.querySelectorAll("summary")];
    const at = lines.indexOf(event.target);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: lines.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    lines[Math.max(0, Math.min(lines.length - 1, next))].focus();
  }
}
