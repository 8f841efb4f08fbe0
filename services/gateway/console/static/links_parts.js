/** The parts of the drawing of links, each a view for `showList`: nodes, links, arrows to and from the gateway. */

import { setAll, setText, svg } from "./dom.js";
import { bytes, count } from "./format.js";
import { curve } from "./links_layout.js";
import { shape, workerTone } from "./states.js";
import { kvShare } from "./worker_cards.js";

const NAME_WIDTH = 6.9; // of a character, in pixels, at the size of parts' names
const LOAD_WIDTH = 5.9;

/** The marker at the end of an arrow. */
export function arrowHead() {
  const marker = { id: "arrow", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" };
  return svg("defs", svg("marker", marker, svg("path", { d: "M0 0 8 4 0 8Z" })));
}

/** An arrow with its name: `{name, d, x, y}`. */
export function flowArrow() {
  const path = svg("path", { "marker-end": "url(#arrow)" });
  const text = svg("text", { "text-anchor": "middle" });
  const update = (flow) => {
    setAll(path, { d: flow.d });
    setAll(text, { x: flow.x, y: flow.y });
    setText(text, flow.name);
  };
  return { element: svg("g", path, text), update };
}

/** A link: `{link, way, moved}`; it is the wider, the more it moved. */
export function linkPath() {
  const title = svg("title");
  const element = svg("path.link", title);
  const update = ({ link, way, moved }) => {
    const width = moved ? Math.min(6, 1.5 + Math.log2(1 + moved.handoffs / moved.seconds)) : 1.25;
    setAll(element, {
      d: curve(way),
      "stroke-width": width.toFixed(2),
      "data-busy": moved ? "yes" : "no",
      "data-avoided": link.avoided ? "yes" : "no",
    });
    const avoided = link.avoided ? ", avoided after failures" : "";
    setText(
      title,
      `${link.prefill} to ${link.decode}${avoided}: ${count(link.handoffs)} handoffs, ${bytes(link.bytes)}`,
    );
  };
  return { element, update };
}

/** A worker: `{worker, name, at, width, height}`. */
export function workerNode(onWorker) {
  const box = boxWithMark("g.node");
  const track = svg("rect.track", { x: 10, y: 42, height: 4, rx: 2 });
  const fill = svg("rect.fill", { x: 10, y: 42, height: 4, rx: 2 });
  let address = null;
  box.element.addEventListener("click", () => onWorker(address));
  box.element.append(track, fill);
  const update = ({ worker, name, at, width, height }) => {
    address = worker.address;
    const isNarrow = width < 180;
    const words = isNarrow ? ["run", "wait"] : ["running", "waiting"];
    const load = `${count(worker.running)} ${words[0]} · ${count(worker.waiting)} ${words[1]}`;
    const place = { x: at.x, y: at.y, width, height };
    const title = isNarrow ? name : `${worker.role} ${name}`;
    box.show(place, workerTone(worker.state), title, worker.state === "ok" ? load : worker.state);
    setAll(box.element, { "data-role": worker.role, "data-worker": worker.address });
    setAll(track, { width: width - 20 });
    setAll(fill, { width: ((width - 20) * kvShare(worker)).toFixed(1) });
  };
  return { element: box.element, update };
}

/** The gateway, or Redis: `{box, tone, first, second}`; second: null for a lower box. */
export function otherBox() {
  const box = boxWithMark("g.node.other");
  const update = ({ box: place, tone, first, second }) => box.show(place, tone, first, second);
  return { element: box.element, update };
}

function boxWithMark(name) {
  const rect = svg("rect.box", { rx: 8 });
  const mark = svg("g");
  const first = svg("text.name", { x: 27 });
  const second = svg("text.load", { x: 10, y: 35 });
  const element = svg(name, {}, rect, mark, first, second);
  const show = ({ x, y, width, height }, tone, firstWords, secondWords) => {
    setAll(element, { transform: `translate(${x} ${y})` });
    setAll(rect, { width, height });
    if (element.dataset.tone !== tone) {
      element.dataset.tone = tone;
      mark.replaceChildren(shape(tone));
    }
    const low = secondWords === null;
    setAll(mark.firstChild, { x: 10, y: low ? 9 : 10, width: 11, height: 11 });
    setAll(first, { y: low ? 19 : 20 });
    setText(first, cut(firstWords, (width - 34) / NAME_WIDTH));
    setText(second, cut(secondWords ?? "", (width - 16) / LOAD_WIDTH));
  };
  return { element, show };
}

function cut(text, characters) {
  return text.length <= characters ? text : `${text.slice(0, Math.max(1, Math.floor(characters) - 1))}…`;
}
