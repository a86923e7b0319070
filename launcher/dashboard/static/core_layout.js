// Where the cores of a NUMA node are drawn, in px. Pure.
export const BAND = 14;
export const GAUGE = 14;
export const HEIGHT = BAND + GAUGE;
const RULER = 12;
const GAP = 2;
const PAD = 3;
const BLOCK_GAP = 5;
const WIDEST = 32;
const WANTED = 24;
const NARROWEST = 13;

// Cores that share an L3, in the order of their cpus; all cores of the node where the kernel reports no L3.
export function blocksOf(cores) {
  const blocks = new Map();
  for (const core of cores) {
    const key = core.l3 ?? null;
    if (!blocks.has(key)) blocks.set(key, []);
    blocks.get(key).push(core);
  }
  return [...blocks.values()];
}

// -> {width, height, blocks: [{x, y, width, height, first}], cores: [{core, x, y, width}]}: low, with wide cores and full
// rows if possible.
export function arrange(blocks, width) {
  const size = Math.max(1, ...blocks.map((block) => block.length));
  let best = null;
  for (let across = 1; across <= blocks.length; across++) {
    for (let columns = 1; columns <= size; columns++) {
      const cell = Math.min(WIDEST, cellWidth(width, across, columns));
      if (cell < NARROWEST && across * columns > 1) break;
      const uneven = (blocks.length % across ? 4 : 0) + (size % columns ? 4 : 0);
      const height = Math.ceil(blocks.length / across) * blockHeight(size, columns);
      const cost = Math.max(0, WANTED - cell) + uneven + height / 22;
      if (best === null || cost < best.cost) best = { cost, across, columns, cell };
    }
  }
  return best === null ? { width, height: 0, blocks: [], cores: [] } : place(blocks, size, best);
}

function cellWidth(width, across, columns) {
  return Math.floor((width - (across - 1) * BLOCK_GAP) / across / columns - GAP - (2 * PAD) / columns);
}

function blockHeight(size, columns) {
  return RULER + Math.ceil(size / columns) * (HEIGHT + GAP) - GAP + 2 * PAD;
}

function place(blocks, size, { across, columns, cell }) {
  const blockWidth = columns * (cell + GAP) - GAP + 2 * PAD;
  const high = blockHeight(size, columns);
  const frames = [];
  const cores = [];
  blocks.forEach((block, number) => {
    const x = (number % across) * (blockWidth + BLOCK_GAP);
    const y = Math.floor(number / across) * (high + BLOCK_GAP);
    frames.push({ x, y, width: blockWidth, height: high, first: block[0].cpus[0] });
    block.forEach((core, index) => {
      cores.push({
        core,
        x: x + PAD + (index % columns) * (cell + GAP),
        y: y + PAD + RULER + Math.floor(index / columns) * (HEIGHT + GAP),
        width: cell,
      });
    });
  });
  const rows = Math.ceil(blocks.length / across);
  return {
    width: Math.min(across, blocks.length) * (blockWidth + BLOCK_GAP) - BLOCK_GAP,
    height: rows * (high + BLOCK_GAP) - BLOCK_GAP,
    blocks: frames,
    cores,
  };
}

// Index of the core to which an arrow key leads from the core at `index`.
export function neighbour(cores, index, key) {
  if (key === "Home") return 0;
  if (key === "End") return cores.length - 1;
  const here = cores[index];
  const along = key === "ArrowLeft" || key === "ArrowRight";
  const forward = key === "ArrowRight" || key === "ArrowDown";
  let best = index;
  let least = Infinity;
  cores.forEach((other, at) => {
    const ahead = along ? other.x - here.x : other.y - here.y;
    const aside = along ? other.y - here.y : other.x - here.x;
    if (forward ? ahead <= 0 : ahead >= 0) return;
    const distance = Math.abs(ahead) + 100 * Math.abs(aside);
    if ((along && aside !== 0) || distance >= least) return;
    best = at;
    least = distance;
  });
  return best;
}
