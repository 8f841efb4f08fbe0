/**
 * The drawing of a fleet: its workers, the links between them, and handoffs that move. What it shows is in tables too,
 * so for a screen reader it is one picture with a summary.
 */

import { setAll, setText, showList, svg } from "./dom.js";
import { bytes, count, rate, shortNames } from "./format.js";
import { layout, linkWay } from "./links_layout.js";
import { arrowHead, flowArrow, linkPath, otherBox, workerNode } from "./links_parts.js";
import { linkName, movedRates } from "./moved.js";
import { handoffsPerDot, MovingDots } from "./moving_dots.js";

const CONNECTED = ["ok", "draining"]; // states of workers

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class LinksDrawing {
  #flows = svg("g.flows");
  #links = svg("g.links");
  #nodes = svg("g.nodes");
  #others = svg("g.others");
  #rate = svg("text.rate", { "text-anchor": "middle", y: 82 });
  #dotGroup = svg("g.dots");
  #dots = new MovingDots(this.#dotGroup);
  #resized = new ResizeObserver(() => this.#draw());
  #tick = null;
  #moved = new Map();
  #drawn = []; // links, each with its way and what it moved
  #onWorker;

  /** @param {function(string)} onWorker - gets the address of a worker that was clicked */
  constructor(onWorker) {
    this.#onWorker = onWorker;
    const groups = [this.#flows, this.#links, this.#dotGroup, this.#nodes, this.#others, this.#rate];
    this.element = svg("svg.links-drawing", { role: "img" }, arrowHead(), groups);
    this.#resized.observe(this.element);
  }

  /** Shows a tick, and sends dots for what moved since the one before. */
  update(tick, moved) {
    this.#tick = tick;
    this.#moved = moved;
    this.#draw();
    if (!still.matches) this.#sendDots();
  }

  /** How many handoffs a dot stands for now. */
  get handoffsPerDot() {
    return handoffsPerDot([...this.#moved.values()].reduce((sum, each) => sum + each.handoffs, 0));
  }

  close() {
    this.#resized.disconnect();
    this.#dots.close();
  }

  #draw() {
    const width = Math.round(this.element.clientWidth);
    if (this.#tick === null || width === 0) return;
    const { workers, redis } = this.#tick;
    const columns = { prefill: ofRole(workers, "prefill"), decode: ofRole(workers, "decode") };
    const places = layout(width, columns.prefill.length, columns.decode.length, redis.state !== "none");
    const size = { viewBox: `0 0 ${width} ${places.height}`, height: places.height };
    setAll(this.element, { ...size, "aria-label": this.#summary() });
    showList(this.#flows, flows(places, columns), (flow) => flow.name, flowArrow);
    this.#drawWorkers(places, columns);
    showList(this.#others, this.#otherBoxes(places), (item) => item.name, otherBox);
    const rates = movedRates(this.#moved);
    setAll(this.#rate, { x: places.middle });
    setText(this.#rate, rates.handoffs ? `${rate(rates.handoffs)} handoffs/s · ${bytes(rates.bytes)}/s` : "");
  }

  #drawWorkers(places, columns) {
    const names = shortNames(this.#tick.workers.map((worker) => worker.address));
    const size = { width: places.nodeWidth, height: places.nodeHeight };
    const nodes = Object.entries(columns).flatMap(([role, workers]) =>
      workers.map((worker, index) => ({ worker, name: names.get(worker.address), at: places[role](index), ...size })),
    );
    const at = new Map(nodes.map((node) => [node.worker.address, node.at]));
    const drawn = this.#tick.links.filter((link) => at.has(link.prefill) && at.has(link.decode));
    this.#drawn = drawn.map((link) => ({
      link,
      way: linkWay(places, at.get(link.prefill), at.get(link.decode)),
      moved: this.#moved.get(linkName(link)),
    }));
    showList(this.#links, this.#drawn, ({ link }) => linkName(link), linkPath);
    showList(
      this.#nodes,
      nodes,
      (node) => `${node.worker.role} ${node.worker.address}`,
      () => workerNode(this.#onWorker),
    );
  }

  #otherBoxes(places) {
    const { gateway, redis } = this.#tick;
    const words = `${count(gateway.in_flight)} in flight`;
    const boxes = [
      {
        name: "gateway",
        box: places.gateway,
        tone: gateway.draining ? "warn" : "good",
        first: "gateway",
        second: words,
      },
    ];
    if (redis.state === "none") return boxes;
    const tone = redis.state === "ok" ? "good" : "bad";
    return [...boxes, { name: "redis", box: places.redis, tone, first: `Redis: ${redis.state}`, second: null }];
  }

  #sendDots() {
    for (const { way, moved } of this.#drawn) {
      if (!moved) continue;
      const number = moved.handoffs ? Math.max(1, Math.round(moved.handoffs / this.handoffsPerDot)) : 0;
      this.#dots.send(way, number, { radius: radius(moved.bytes / Math.max(1, moved.handoffs)), failed: false });
      this.#dots.send(way, Math.min(3, moved.failed), { radius: 0, failed: true });
    }
  }

  #summary() {
    const { workers, links } = this.#tick;
    const live = workers.filter((worker) => CONNECTED.includes(worker.state)).length;
    const rates = movedRates(this.#moved);
    return (
      `Drawing of ${live} connected workers and ${links.length} links between prefill and decode workers: ` +
      `${rate(rates.handoffs)} handoffs and ${bytes(rates.bytes)} a second. The tables below have the same figures.`
    );
  }
}

function ofRole(workers, role) {
  const found = workers.filter((worker) => worker.role === role);
  return found.sort((a, b) => a.address.localeCompare(b.address, undefined, { numeric: true }));
}

/** Arrows between the gateway and the two columns: prompts go down on the left, tokens come up on the right. */
function flows({ gateway, nodeWidth, prefill, decode }, columns) {
  const y = gateway.y + gateway.height / 2;
  const left = prefill(0).x + nodeWidth / 2;
  const right = decode(0).x + nodeWidth / 2;
  const from = gateway.x;
  const to = gateway.x + gateway.width + 6;
  const down = `M${from} ${y}H${left + 16}Q${left} ${y} ${left} ${y + 16}V${prefill(0).y - 6}`;
  const up = `M${right} ${decode(0).y}V${y + 16}Q${right} ${y} ${right - 16} ${y}H${to}`;
  return [
    { name: "prompts", d: down, x: (from + left) / 2, y: y - 8, drawn: columns.prefill.length },
    { name: "tokens", d: up, x: (to + right) / 2, y: y - 8, drawn: columns.decode.length },
  ].filter((flow) => flow.drawn);
}

/** A handoff of 64 KiB has a small dot, one of 64 MiB and more a large one. */
function radius(size) {
  return Math.min(7, 3 + Math.log2(Math.max(1, size / 65_536)) * 0.4);
}
