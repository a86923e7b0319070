// Asks the dashboard process. The token comes in the address's fragment, which browsers send to no server.

import { mergedChanges, mergedHistory } from "./store.js";

const TOKEN = "token";
const POLL_MS = 2000;
const ANSWER_MS = 8000;
const FIRST_MS = 15 * 60_000;
const PART_MS = 6000;
const SPAN_MS = { "1h": 3_600_000, "1d": 86_400_000, "90d": 90 * 86_400_000 };

export class ApiError extends Error {
  constructor(message, remedy = "", status = 0) {
    super(message);
    this.remedy = remedy;
    this.status = status;
  }
}

// Moves the token of the address into sessionStorage, and goes to the view behind it. True if there was one.
export function takeToken() {
  const found = /^#\/?token=([^&]+)(?:&view=(\w+))?/.exec(location.hash);
  if (found === null) return false;
  sessionStorage.setItem(TOKEN, decodeURIComponent(found[1]));
  history.replaceState(null, "", `#/${found[2] ?? ""}`);
  return true;
}

// The JSON at `path`. Throws ApiError.
export async function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  let response;
  try {
    response = await fetch(path, {
      headers: token === null ? {} : { Authorization: `Bearer ${token}` },
      cache: "no-store",
      // A web server in front may ask for a login.
      credentials: "same-origin",
      signal: AbortSignal.timeout(ANSWER_MS),
    });
  } catch (error) {
    const why = error.name === "TimeoutError" ? `no answer within ${ANSWER_MS / 1000} s` : "no connection";
    throw new ApiError(
      `cannot reach the dashboard process: ${why}`,
      "`systemctl status numa-launcher-dashboard` or start `numa-launcher dashboard` again",
    );
  }
  if (response.ok) return response.json();
  throw await refusal(response);
}

// The JSON at `path`, or {trouble: a message} where there is none.
export async function askOrTrouble(path) {
  try {
    return await ask(path);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return { trouble: [error.message, error.remedy].filter(Boolean).join("; ") };
  }
}

async function refusal(response) {
  if (response.status === 401) {
    return new ApiError(
      "cannot read the daemon's state: this address has no valid token",
      "open the link that `numa-launcher dashboard` prints when it starts",
      401,
    );
  }
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // No JSON: a web server in front answered.
  }
  const message = said.message ?? `the dashboard process answered with status ${response.status}`;
  return new ApiError(message, said.remedy ?? "", response.status);
}

// Asks every 2 s while the page is visible. Returns a function that asks at once.
export function startPolling(store) {
  let timer = null;
  let asking = false;
  let again = false;

  async function poll() {
    clearTimeout(timer);
    timer = null;
    if (asking) {
      again = true;
      return;
    }
    asking = true;
    try {
      await askAll(store);
    } finally {
      asking = false;
      if (!document.hidden) timer = setTimeout(poll, again ? 0 : POLL_MS);
      again = false;
    }
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) poll();
    else clearTimeout(timer);
  });
  poll();
  return poll;
}

async function askAll(store) {
  await Promise.all([askNow(store), store.state.view === "fleet" && askFleet(store)]);
  const { connection, now } = store.state;
  // The dashboard answers, and so does the daemon.
  if (connection.answers && now.answers) await Promise.all([askHistory(store), askTopology(store)]);
}

async function askNow(store) {
  const { changes, now: before } = store.state;
  try {
    const now = await ask(`api/now?events_after=${before?.newest_event ?? 0}`);
    const part = { now, connection: { answers: true, trouble: "", remedy: "", status: 200, receivedAt: performance.now() } };
    if (now.changes.length) part.changes = mergedChanges(changes, now.changes);
    store.update(part);
  } catch (error) {
    failed(store, error);
  }
}

async function askFleet(store) {
  const answer = await askOrTrouble("api/fleet");
  if (answer.verdict) store.update({ fleet: { ...answer, receivedAt: performance.now() }, fleetTrouble: "" });
  else store.update({ fleetTrouble: answer.trouble });
}

function failed(store, error) {
  if (!(error instanceof ApiError)) throw error;
  const { receivedAt } = store.state.connection;
  store.update({
    connection: { answers: false, trouble: error.message, remedy: error.remedy, status: error.status, receivedAt },
  });
}

// The figures show the last hour, whichever span the charts show.
function askHistory(store) {
  const spans = new Set(["1h", store.state.span]);
  return Promise.all([...spans].map((span) => askSpan(store, span)));
}

async function askSpan(store, span) {
  const { history, now, selected } = store.state;
  const slots = selected.slot ?? "none";
  const found = history[span];
  const known = found?.slots === slots ? found : undefined;
  // A new row every few minutes only
  if (known && known.step_ms > POLL_MS && now.time * 1000 - known.newest < known.step_ms) return;
  // The first view needs the figures' minutes only; the others follow.
  const first = span === "1h" && found === undefined;
  const whole = known !== undefined && !known.isPart;
  if (known?.isPart && performance.now() < known.askedAt + PART_MS) return;
  const after = whole ? known.newest : first && now.time ? Math.round(now.time * 1000 - FIRST_MS) : 0;
  const askedAt = performance.now();
  const path = `api/history?span=${span}&after=${after}&slots=${slots}`;
  const answer = await askOrTrouble(path);
  if (answer.trouble) {
    store.update({ historyTrouble: answer.trouble });
    return;
  }
  const merged = mergedHistory(whole ? known : undefined, answer, SPAN_MS[span]);
  const entry = { ...merged, slots, isPart: first, askedAt };
  store.update({ history: { ...store.state.history, [span]: entry }, historyTrouble: "" });
}

async function askTopology(store) {
  const { topology, now } = store.state;
  // Another daemon, or a reload, may have another plan.
  const plan = [now.status.pid, ...now.status.slots.map((slot) => slot.cpus)].join();
  if (topology?.ofPlan === plan) return;
  const answer = await askOrTrouble("api/topology");
  if (!answer.trouble) store.update({ topology: { ...answer, ofPlan: plan } });
}
