// What the page knows. Views subscribe; api.js and the router write.

const CHANGES_KEPT = 500;

export function createStore() {
  const state = {
    // The newest answer of /api/now
    now: null,
    topology: null,
    // The newest answer of /api/fleet; asked while its view is open
    fleet: null,
    // Why there is none
    fleetTrouble: "",
    // By span: {columns, rows, step_ms, newest}; rows ascend by time and stay within the span.
    history: {},
    // Why there is none
    historyTrouble: "",
    // Folded events, ascending by time
    changes: [],
    span: "1h",
    view: "overview",
    selected: { slot: null, request: null },
    connection: { answers: true, trouble: "", remedy: "", status: null, receivedAt: null },
  };
  const listeners = new Set();

  // Each function gets the state and the set of keys that changed.
  function update(part) {
    Object.assign(state, part);
    const changed = new Set(Object.keys(part));
    for (const listener of listeners) listener(state, changed);
  }

  return {
    state,
    update,

    // Calls `listener` at once with every key; returns what ends the subscription.
    subscribe(listener) {
      listeners.add(listener);
      listener(state, new Set(Object.keys(state)));
      return () => listeners.delete(listener);
    },

    // A slot or request is selected by its address, so that a reload and a link show the same.
    select({ slot, request, span }) {
      if (span !== undefined && span !== state.span) update({ span });
      if (slot !== undefined) location.hash = slot === null ? "#/" : `#/slot/${slot}`;
      if (request !== undefined) {
        location.hash = request === null ? "#/" : `#/request/${encodeURIComponent(request)}`;
      }
    },
  };
}

// An item that is sent again replaces the older one with its number.
export function mergedChanges(known, items) {
  const byNumber = new Map(known.map((item) => [item.number, item]));
  for (const item of items) byNumber.set(item.number, item);
  const sorted = [...byNumber.values()].sort((a, b) => a.time - b.time || a.number - b.number);
  return sorted.slice(-CHANGES_KEPT);
}

// Rows of `answer` behind those known. An answer that begins before the last known row replaces them: the clock was set
// back, or the daemon's file is new. Columns may differ between answers, as after a change of the layout.
export function mergedHistory(known, answer, spanMs) {
  const replaces = known === undefined || answer.rows[0]?.[0] <= known.newest;
  const base = replaces ? { columns: answer.columns, rows: [] } : known;
  const same = base.columns.join() === answer.columns.join();
  const columns = same ? base.columns : [...new Set([...base.columns, ...answer.columns])];
  const rows = same ? base.rows : inColumns(base, columns);
  rows.push(...(same ? answer.rows : inColumns(answer, columns)));
  const newest = rows.length ? rows[rows.length - 1][0] : 0;
  const first = rows.findIndex((row) => row[0] > newest - spanMs);
  if (first > 0) rows.splice(0, first);
  return { ...answer, columns, rows, newest };
}

function inColumns(history, columns) {
  const places = columns.map((name) => history.columns.indexOf(name) + 1);
  return history.rows.map((row) => [row[0], ...places.map((place) => (place ? row[place] : null))]);
}
