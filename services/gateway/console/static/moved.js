/** What links moved between two ticks of the feed, from totals that only grow. Pure. */

/** The name of a link: its two workers. */
export function linkName(link) {
  return `${link.prefill} ${link.decode}`;
}

/**
 * @param {Object|null} before - the tick before; null: there is none
 * @param {Object} tick
 * @returns {Map<string, {seconds: number, handoffs: number, failed: number, bytes: number}>} by `linkName`, for links
 *   that moved something. A total that shrank began anew, with the life of a worker or of the gateway.
 */
export function movedBetween(before, tick) {
  const moved = new Map();
  if (before === null || tick.now <= before.now) return moved;
  const earlier = new Map((before.links ?? []).map((link) => [linkName(link), link]));
  for (const link of tick.links ?? []) {
    const last = earlier.get(linkName(link));
    const grew = (field) =>
      last !== undefined && link[field] >= last[field] ? link[field] - last[field] : link[field];
    const found = { handoffs: grew("handoffs"), failed: grew("failed"), bytes: grew("bytes") };
    if (found.handoffs || found.failed || found.bytes) {
      moved.set(linkName(link), { seconds: tick.now - before.now, ...found });
    }
  }
  return moved;
}

/** What all links moved together, each second. */
export function movedRates(moved) {
  const total = { handoffs: 0, failed: 0, bytes: 0 };
  for (const each of moved.values()) {
    for (const field of Object.keys(total)) total[field] += each[field] / each.seconds;
  }
  return total;
}
