// Numbers and times as text. Absent values (null, undefined, NaN) are an en dash.

export const NONE = "–";

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const MS_BELOW_S = 0.0995;
// Two digits after the point show less as 0.
const HUNDREDTH_S = 0.0095;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function absent(value) {
  return value === null || value === undefined || Number.isNaN(value);
}

// 1234.5: "1,235"; 12.34: "12.3"; 1.234: "1.23"; 0.012: "0.012"
export function number(value) {
  if (absent(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return GROUPED.format(value);
  if (size < 0.001) return "<0.001";
  return String(Number(value.toPrecision(size < 1 ? 2 : 3)));
}

export function count(value) {
  return absent(value) ? NONE : GROUPED.format(value);
}

// "87 %"; shares below 1 % that are not 0 have one digit more.
export function share(value) {
  if (absent(value)) return NONE;
  const percent = value * 100;
  return `${percent > 0 && percent < 0.95 ? percent.toFixed(1) : percent.toFixed(0)} %`;
}

export function bytes(value) {
  if (absent(value)) return NONE;
  let size = value;
  let unit = 0;
  for (; Math.abs(size) >= 1024 && unit < UNITS.length - 1; unit += 1) size /= 1024;
  return `${unit ? number(size) : size} ${UNITS[unit]}`;
}

// Two digits, as `status` prints them: 0.04, 0.31, 2.5, 31
export function twoDigits(value) {
  if (absent(value)) return NONE;
  return value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : value.toFixed(0);
}

// "0.31 s", "31 s"; below 0.1 s "12 ms", "0.4 ms"
export function seconds(value) {
  if (absent(value)) return NONE;
  return value && value < MS_BELOW_S ? `${milliseconds(value)} ms` : `${twoDigits(value)} s`;
}

// Two times in one unit that shows both: ["0.21", "1.2", "s"], ["4.0", "12", "ms"], ["4.0", "310", "ms"]
export function twoTimes(first, second) {
  if (absent(first) || absent(second)) return [NONE, NONE, ""];
  const isShort = second < MS_BELOW_S || (first < HUNDREDTH_S && second < 1);
  const shown = isShort ? milliseconds : twoDigits;
  return [shown(first), shown(second), isShort ? "ms" : "s"];
}

function milliseconds(value) {
  const size = value * 1000;
  return size && size < 9.95 ? size.toFixed(1) : size.toFixed(0);
}

// 5s, 3m12s, 4h05m, 2d03h
export function duration(value) {
  if (absent(value)) return NONE;
  const whole = Math.max(0, Math.floor(value));
  const minutes = Math.floor(whole / 60);
  const hours = Math.floor(whole / 3600);
  const days = Math.floor(whole / 86400);
  if (!minutes) return `${whole}s`;
  if (!hours) return `${minutes}m${padded(whole % 60)}s`;
  return days ? `${days}d${padded(hours % 24)}h` : `${hours}h${padded(minutes % 60)}m`;
}

// Of seconds since the epoch: "14:03:12" in the browser's time zone
export function clock(time) {
  if (absent(time)) return NONE;
  const at = new Date(time * 1000);
  return `${padded(at.getHours())}:${padded(at.getMinutes())}:${padded(at.getSeconds())}`;
}

const DAY = new Intl.DateTimeFormat("en-GB", {
  day: "numeric",
  month: "short",
  hour: "2-digit",
  minute: "2-digit",
});

// "23 Nov 14:03"
export function day(time) {
  return absent(time) ? NONE : DAY.format(new Date(time * 1000)).replace(",", "");
}

export function money(value, currency) {
  if (absent(value)) return NONE;
  const amount = Number(value);
  const digits = Math.abs(amount) >= 0.1 || amount === 0 ? 2 : 4;
  return `${amount.toFixed(digits)} ${currency}`;
}

// plural(1, "thread", "threads"): "1 thread"
export function plural(value, one, many) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

// Number of cpus in a cpulist: "0-3,8" has 5.
export function cpuCount(cpus) {
  let total = 0;
  for (const part of cpus.split(",")) {
    if (part === "") continue;
    const [first, last] = part.split("-").map(Number);
    total += (last ?? first) - first + 1;
  }
  return total;
}

function padded(value) {
  return String(value).padStart(2, "0");
}
