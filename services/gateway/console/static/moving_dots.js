/** Dots that move along links: each is a handoff, or some of them. They end by themselves. */

import { svg } from "./dom.js";

const MOST_DOTS = 40; // for what moved between two ticks
const MOST_AT_ONCE = 160;
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000];
const TRAVEL_MS = 900;

/** How many handoffs one dot stands for, so that all of them take at most MOST_DOTS. */
export function handoffsPerDot(handoffs) {
  return STEPS.find((step) => handoffs / step <= MOST_DOTS) ?? STEPS.at(-1);
}

/** The point of a link at a share of its way. The curve leaves and arrives level. */
function pointAt({ x0, y0, x1, y1 }, share) {
  const middle = (x0 + x1) / 2;
  const left = 1 - share;
  const x = left ** 3 * x0 + 3 * left ** 2 * share * middle + 3 * left * share ** 2 * middle + share ** 3 * x1;
  return { x, y: y0 + (y1 - y0) * (3 * share ** 2 - 2 * share ** 3) };
}

export class MovingDots {
  #group;
  #dots = [];
  #frame = null;

  /** @param {SVGGElement} group - has the dots and nothing else */
  constructor(group) {
    this.#group = group;
  }

  /**
   * Sends dots along a link, spread over the next second.
   *
   * @param {{x0: number, y0: number, x1: number, y1: number}} way @param {number} number
   * @param {{radius: number, failed: boolean}} look - a failed one stops in the middle and fades
   */
  send(way, number, { radius, failed }) {
    if (document.hidden) return; // no frame comes, and all of them would move at once later
    for (let index = 0; index < number && this.#dots.length < MOST_AT_ONCE; index += 1) {
      const begins = performance.now() + (1000 * (index + Math.random() * 0.6)) / number;
      const element = failed ? svg("path.dot.failed", { d: "M-4-4 4 4M4-4-4 4" }) : svg("circle.dot", { r: radius });
      this.#dots.push({ way, begins, element, reach: failed ? 0.5 : 1 });
    }
    this.#frame ??= requestAnimationFrame((now) => this.#move(now));
  }

  /** Takes all dots away. */
  close() {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.#dots = [];
    this.#group.replaceChildren();
  }

  #move(now) {
    this.#dots = this.#dots.filter((dot) => this.#place(dot, (now - dot.begins) / TRAVEL_MS));
    this.#frame = this.#dots.length ? requestAnimationFrame((next) => this.#move(next)) : null;
  }

  /** Returns false for a dot that has arrived, which is gone then. */
  #place({ way, element, reach }, share) {
    if (share < 0) return true;
    if (share >= 1) {
      element.remove();
      return false;
    }
    if (!element.isConnected) this.#group.append(element);
    const { x, y } = pointAt(way, eased(share) * reach);
    element.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    return true;
  }
}

function eased(share) {
  return share * share * (3 - 2 * share);
}
