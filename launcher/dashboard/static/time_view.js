// Which part of the time all charts show, and where a time lies in them. Pure.

export const SPANS = { "1h": 3_600_000, "1d": 86_400_000, "90d": 90 * 86_400_000 };
const SHORTEST = 30_000;
const LONGEST = SPANS["90d"];

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const STEPS = [
  10_000,
  30_000,
  MINUTE,
  2 * MINUTE,
  5 * MINUTE,
  10 * MINUTE,
  15 * MINUTE,
  30 * MINUTE,
  HOUR,
  2 * HOUR,
  3 * HOUR,
  6 * HOUR,
  12 * HOUR,
  DAY,
  2 * DAY,
  7 * DAY,
  14 * DAY,
  30 * DAY,
];
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

// `end` null: follows the newest row.
export function wholeSpan(span) {
  return { length: SPANS[span], end: null };
}

const FIRST = [5 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR];

// The hour up to now, or less where the history is younger. The first answer has the last minutes only.
export function fitted(history, newest) {
  const known = history.rows.length ? newest - history.rows[0][0] : 0;
  const isYoung = known > 0 && (!history.isPart || known < 13 * MINUTE);
  const length = isYoung ? FIRST.find((each) => each >= known) : HOUR;
  return { length: length ?? HOUR, end: null };
}

export function zoomed(view, newest, factor, at) {
  const end = view.end ?? newest;
  const length = Math.min(LONGEST, Math.max(SHORTEST, view.length * factor));
  const pinned = at ?? (view.end === null ? newest : end - view.length / 2);
  const share = (end - pinned) / view.length;
  return within({ length, end: pinned + share * length }, newest);
}

export function panned(view, newest, by) {
  return within({ length: view.length, end: (view.end ?? newest) + by }, newest);
}

// A view up to the newest row follows it.
function within({ length, end }, newest) {
  if (end >= newest - length / 500) return { length, end: null };
  return { length, end: Math.max(end, newest - LONGEST + length) };
}

// The finest history that reaches back to the begin of the view.
export function spanOf(view, newest) {
  const back = newest - ((view.end ?? newest) - view.length);
  return Object.keys(SPANS).find((span) => back <= SPANS[span] * 1.01) ?? "90d";
}

// Times of ticks, at most `most`, at full local hours and days; and their labels.
export function timeTicks(from, to, most) {
  const step = STEPS.find((length) => (to - from) / length <= most) ?? STEPS.at(-1);
  const shift = new Date(to).getTimezoneOffset() * MINUTE;
  const ticks = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) {
    ticks.push({ at, label: tickLabel(new Date(at), step) });
  }
  return ticks;
}

function tickLabel(date, step) {
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getDate()} ${MONTHS[date.getMonth()]}`;
  if (step >= DAY) return day;
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (step < MINUTE) return `${clock}:${two(date.getSeconds())}`;
  return clock === "00:00" ? day : clock;
}

// Index of the first row not before `ms`.
export function firstRow(rows, ms) {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] < ms) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Times without rows within the view: [[from, to], …]. The newest row may be LATE steps old.
const LATE = 3;

export function gapsOf(rows, from, to, step) {
  const found = [];
  let last = null;
  for (let index = Math.max(0, firstRow(rows, from) - 1); index < rows.length; index++) {
    const at = rows[index][0];
    if (last !== null && at - last > 1.5 * step) found.push([last, at - step]);
    last = at;
    if (at > to) break;
  }
  if (last !== null && to - last > Math.max(10_000, LATE * step)) found.push([last, to]);
  return found
    .map(([begin, end]) => [Math.max(from, begin), Math.min(to, end)])
    .filter(([begin, end]) => end > begin);
}
