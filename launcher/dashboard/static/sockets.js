// How the picture is divided: sockets, and in each a box for every NUMA node with the cores of both. Pure.

// -> [{socket, boxes: [{node, cores, holdsMemory}]}]; socket null: memory without cpus; node null: cores in no NUMA node.
export function socketsOf({ sockets, nodes, cores }) {
  const drawn = new Set();
  const found = sockets.map(({ socket }) => {
    const own = cores.filter((core) => core.socket === socket);
    const numbers = [...new Set(own.map((core) => core.node))].sort(
      (one, other) => (one ?? -1) - (other ?? -1),
    );
    const boxes = numbers.map((number) => {
      // The memory of a node that spans sockets is drawn once.
      const holdsMemory = number !== null && !drawn.has(number);
      drawn.add(number);
      const node = nodes.find((each) => each.node === number) ?? null;
      return { node, cores: own.filter((core) => core.node === number), holdsMemory };
    });
    return { socket, boxes };
  });
  const far = nodes.filter((node) => !drawn.has(node.node));
  if (far.length === 0) return found;
  return [...found, { socket: null, boxes: far.map((node) => ({ node, cores: [], holdsMemory: true })) }];
}
