/** Where things are in the drawing of links: prefill workers left, decode workers right, the gateway above. Pure. */

const TOP = 92;
const NODE_HEIGHT = 50;
const GAP = 14;
const REDIS_HEIGHT = 30;

/**
 * @param {number} width - in pixels @param {number} numPrefill @param {number} numDecode
 * @param {boolean} withRedis
 */
export function layout(width, numPrefill, numDecode, withRedis) {
  const nodeWidth = Math.round(Math.min(230, Math.max(126, width * 0.28)));
  const rows = Math.max(numPrefill, numDecode, 1);
  const body = rows * NODE_HEIGHT + (rows - 1) * GAP;
  const height = TOP + body + (withRedis ? REDIS_HEIGHT + 24 : 8);
  const gatewayWidth = Math.round(Math.min(200, width * 0.34));
  return {
    width,
    height,
    nodeWidth,
    nodeHeight: NODE_HEIGHT,
    gateway: { x: (width - gatewayWidth) / 2, y: 6, width: gatewayWidth, height: 44 },
    redis: { x: (width - gatewayWidth) / 2, y: height - REDIS_HEIGHT - 4, width: gatewayWidth, height: REDIS_HEIGHT },
    prefill: (index) => ({ x: 1, y: top(index, numPrefill, body) }),
    decode: (index) => ({ x: width - nodeWidth - 1, y: top(index, numDecode, body) }),
    middle: width / 2,
  };
}

/** A column stands in the middle of the height that the longer one needs. */
function top(index, number, body) {
  const own = number * NODE_HEIGHT + (number - 1) * GAP;
  return TOP + (body - own) / 2 + index * (NODE_HEIGHT + GAP);
}

/** A link's ends: the inner edges of two nodes. */
export function linkWay(places, from, to) {
  const half = places.nodeHeight / 2;
  return { x0: from.x + places.nodeWidth, y0: from.y + half, x1: to.x, y1: to.y + half };
}

/** The path of a link. */
export function curve({ x0, y0, x1, y1 }) {
  const middle = (x0 + x1) / 2;
  return `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
}
