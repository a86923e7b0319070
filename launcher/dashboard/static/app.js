// Starts the page: views, addresses, keys.

import { startPolling, takeToken } from "./api.js";
import { setAttribute, setMessage, setText } from "./dom.js";
import { mountKeys } from "./keys.js";
import { createStore } from "./store.js";
import { mount as mountCharts } from "./charts.js";
import { mount as mountFigures } from "./figures.js";
import { mount as mountMachine } from "./machine.js";
import { mount as mountSlots } from "./slots.js";
import { mount as mountTimeline } from "./timeline.js";
import { mount as mountVerdict } from "./verdict.js";

const VIEWS = {
  verdict: mountVerdict,
  figures: mountFigures,
  machine: mountMachine,
  timeline: mountTimeline,
  slots: mountSlots,
  charts: mountCharts,
};
// Loaded when they are opened first
const LATER = {
  slot: () => import("./slot.js"),
  request: () => import("./request.js"),
  usage: () => import("./usage.js"),
  fleet: () => import("./fleet.js"),
};
const mounted = new Set();

// The view and selection that an address names; null for an address that names none.
function routeOf(hash) {
  const [, view = "", id = ""] = hash.split("/");
  if (hash === "" || hash === "#/" || hash === "#") return { view: "overview", slot: null, request: null };
  if (view === "slot" && /^\d+$/.test(id)) return { view, slot: Number(id), request: null };
  if (view === "request" && id) return { view, slot: null, request: decoded(id) };
  return view === "usage" || view === "fleet" ? { view, slot: null, request: null } : null;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function showView(store) {
  const { view } = store.state;
  for (const part of document.querySelectorAll("[data-views]")) {
    setAttribute(part, "hidden", !part.dataset.views.split(" ").includes(view));
  }
  for (const link of document.querySelectorAll("[data-nav]")) {
    setAttribute(link, "aria-current", link.dataset.nav === view ? "page" : null);
  }
  setText(document.querySelector("h1"), view === "fleet" ? "State of the fleet" : "State of this host");
}

function follow(store, poll) {
  if (takeToken()) poll?.();
  const route = routeOf(location.hash);
  if (route === null) return;
  const { view, slot, request } = route;
  const before = { view: store.state.view, slot: store.state.selected.slot };
  store.update({ view, selected: { slot, request } });
  showView(store);
  const isNew = view !== before.view || slot !== before.slot;
  whenMounted(view, store).then(() => {
    if (poll !== undefined && isNew && store.state.view === view) focusOn(view, before.slot);
  });
  poll?.();
}

async function whenMounted(view, store) {
  if (!(view in LATER) || mounted.has(view)) return;
  const root = document.getElementById(view);
  const module = await LATER[view]().catch(() => null);
  if (mounted.has(view)) return;
  if (module === null) {
    setText(root, "cannot load this view: the dashboard process does not answer; reload the page");
    return;
  }
  mounted.add(view);
  setText(root, "");
  module.mount(root, store);
}

// The keyboard and screen readers continue where the new view begins, or at the slot that was shown before.
function focusOn(view, slotBefore) {
  const link = slotBefore === null ? null : document.querySelector(`tr[data-slot="${slotBefore}"] a`);
  if (view === "overview" && link !== null) {
    link.focus();
    return;
  }
  window.scrollTo(0, 0);
  const part = view === "overview" ? document : document.getElementById(view);
  part.querySelector("[data-view-title]")?.focus({ preventScroll: true });
}

function mountHistoryTrouble(store) {
  const note = document.querySelector("[data-history-trouble]");
  store.subscribe((state, changed) => {
    if (changed.has("historyTrouble")) setMessage(note, state.historyTrouble);
  });
}

// A dashboard without a fleet has no link to it.
function mountFleetLink(store) {
  const link = document.querySelector('[data-nav="fleet"]');
  store.subscribe(({ now }, changed) => {
    if (changed.has("now")) setAttribute(link, "hidden", !now?.has_fleet);
  });
}

function mountForms(store) {
  const form = document.querySelector("[data-find]");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const id = form.elements.request.value.trim();
    if (id) store.select({ request: id });
  });
  document.querySelector("[data-skip]").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
}

function markUsable(store) {
  const end = store.subscribe((state) => {
    const shown = state.view === "fleet" ? state.fleet : state.now;
    if (shown === null && state.connection.answers) return;
    performance.mark("usable");
    queueMicrotask(() => end());
  });
}

const store = createStore();
follow(store);
for (const [name, mount] of Object.entries(VIEWS)) mount(document.getElementById(name), store);
mountForms(store);
mountFleetLink(store);
mountHistoryTrouble(store);
mountKeys(store);
markUsable(store);
const poll = startPolling(store);
window.addEventListener("hashchange", () => follow(store, poll));
