// A line of a chart as SVG paths. Pure.

// The rows of each px, as their lowest, highest and drawn value; null where none is known.
function* points({ rows, from, to, xs, breaks }, column, drawn) {
  for (let row = from; row < to;) {
    const x = xs[row - from];
    const isBroken = breaks[row - from] === 1;
    let low = Infinity;
    let high = -Infinity;
    let sum = 0;
    let known = 0;
    for (; row < to && xs[row - from] === x; row++) {
      const value = rows[row][column];
      if (value === null || value === undefined) continue;
      known += 1;
      sum += value;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    const value = drawn === "most" ? high : drawn === "least" ? low : sum / known;
    yield { x, isBroken, low, high, value: known ? value : null };
  }
}

// The line, and the band from the lowest to the highest values. null and gaps interrupt both.
export function linePath(frame, column, drawn, down) {
  let path = "";
  let band = "";
  let lower = [];
  const close = () => {
    if (lower.length > 0) band += `${lower.reverse().join("")}z`;
    lower = [];
  };
  let isOpen = false;
  for (const { x, isBroken, low, high, value } of points(frame, column, drawn)) {
    if (isBroken || value === null) {
      isOpen = false;
      close();
    }
    if (value === null) continue;
    path += `${isOpen ? "L" : "M"}${x} ${down(value)}${isOpen ? "" : "h.5"}`;
    band += `${isOpen ? "L" : "M"}${x} ${down(high)}`;
    lower.push(`L${x} ${down(low)}`);
    isOpen = true;
  }
  close();
  return { path, band };
}
