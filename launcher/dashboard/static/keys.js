// Single keys, and the dialog that lists them. They can be switched off (WCAG 2.2, 2.1.4).

import { element } from "./dom.js";

const OFF = "keys-off";
const KEYS = [
  ["/", "Find a request by its id", () => document.getElementById("find").focus()],
  ["o", "Overview", () => (location.hash = "#/")],
  ["f", "Fleet, where there is one", () => document.querySelector('[data-nav="fleet"]:not([hidden])')?.click()],
  ["u", "Usage and cost", () => (location.hash = "#/usage")],
  ["j", "Next slot", () => step(1)],
  ["k", "Previous slot", () => step(-1)],
  ["?", "This list", () => document.getElementById("keys").showModal()],
];
const ALWAYS = [
  ["← →", "In a chart: earlier, later (with Shift: by more); in the machine: the next core"],
  ["+ −", "In a chart: zoom"],
  ["Enter", "Open the focused slot"],
  ["Escape", "Back to the overview"],
];

export function mountKeys(store) {
  const dialog = document.getElementById("keys");
  const off = element("input", { type: "checkbox", id: "keys-off" });
  off.checked = localStorage.getItem(OFF) !== null;
  off.addEventListener("change", () => {
    if (off.checked) localStorage.setItem(OFF, "1");
    else localStorage.removeItem(OFF);
  });
  dialog.append(
    element("h2", { id: "keys-title" }, "Keys"),
    element(
      "dl",
      { class: "keys" },
      ...[...KEYS, ...ALWAYS].flatMap(([key, meaning]) => [
        element("dt", {}, element("kbd", {}, key)),
        element("dd", {}, meaning),
      ]),
    ),
    element("p", {}, off, element("label", { for: "keys-off" }, "Switch single-letter keys off")),
    element("form", { method: "dialog" }, element("button", {}, "Close")),
  );
  document.querySelector("[data-keys]").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (dialog.open || writes(event.target)) return;
    if (event.key === "Escape" && store.state.view !== "overview") location.hash = "#/";
    if (off.checked) return;
    const found = KEYS.find(([key]) => key === event.key);
    if (found === undefined) return;
    event.preventDefault();
    found[2]();
  });
}

function writes(target) {
  return target.matches("input, textarea, select");
}

// Focus of the next or previous slot's link in the table; between slots in the view of one.
function step(by) {
  const links = [...document.querySelectorAll("[data-slot-link]")];
  if (links.length === 0) return;
  const shown = links.filter((link) => link.checkVisibility());
  if (shown.length) {
    const at = shown.indexOf(document.activeElement);
    shown[at === -1 && by < 0 ? shown.length - 1 : Math.min(shown.length - 1, Math.max(0, at + by))].focus();
    return;
  }
  const at = links.findIndex((link) => link.hash === location.hash);
  if (at !== -1) location.hash = links[Math.min(links.length - 1, Math.max(0, at + by))].hash;
}
