/**
 * One request's time as a drawing, the phases that add up to it above, the gateway and every worker below; and the
 * phases as a table with their sum.
 */

import { el, newId, replace, setAll, svg } from "./dom.js";
import { duration } from "./format.js";
import { phaseTable } from "./phase_table.js";
import { axisTicks, lanes, phaseSpans, placeOf } from "./timeline_spans.js";

const LANE = 46;
const BAR = 22;
const CHARACTER = 6.3; // the width of one in a bar, in pixels

export class Timeline {
  #drawing = svg("svg.timeline-drawing", { role: "img" });
  #table = phaseTable();
  #record = null;
  #zoom = "whole";
  #resized = new ResizeObserver(() => this.#draw());

  constructor() {
    this.element = el("div.timeline", this.#zoomChoice(), el("div.panel", this.#drawing), this.#table.element);
    this.#resized.observe(this.#drawing);
  }

  update(record) {
    this.#record = record;
    this.#draw();
    this.#table.show(record);
  }

  close() {
    this.#resized.disconnect();
  }

  #zoomChoice() {
    const name = newId("zoom");
    const choice = (value, title) =>
      el(
        "label.choice",
        el("input", { type: "radio", name, value, checked: value === this.#zoom, change: () => this.#setZoom(value) }),
        el("span", title),
      );
    return el(
      "fieldset.segmented",
      el("legend.unseen", "What the drawing shows"),
      choice("whole", "The whole request"),
      choice("first", "Its beginning"),
    );
  }

  #setZoom(zoom) {
    this.#zoom = zoom;
    this.#draw();
  }

  /** The time that the drawing ends at: the request's, or a little after the handoff. */
  #until() {
    const total = Math.max(this.#record.duration_ms, 0.001);
    if (this.#zoom === "whole") return total;
    const moments = this.#record.attempts.flatMap(({ at_ms: at }) => [at.first_token, at.second_worker, at.sent]);
    const last = Math.max(...moments.filter((ms) => typeof ms === "number"), this.#record.ttft_ms ?? 0);
    return last > 0 ? Math.min(total, last * 1.15) : total;
  }

  #draw() {
    const width = Math.round(this.#drawing.clientWidth);
    if (this.#record === null || width === 0) return;
    const record = this.#record;
    const { phases, total } = phaseSpans(record);
    const until = this.#until();
    const spans = phases.map(({ name, begin, ms }) => ({
      name: name === "rest" ? "no token" : name,
      begin,
      end: begin + ms,
      place: placeOf(name, record),
    }));
    const rows = [{ name: "the request, phase by phase", spans }, ...lanes(record)];
    const height = rows.length * LANE + 30;
    setAll(this.#drawing, { viewBox: `0 0 ${width} ${height}`, height, "aria-label": summary(record, phases, total) });
    const x = (ms) => Math.min(width, (ms / until) * width);
    replace(
      this.#drawing,
      axis(x, until, width, height),
      rows.map((row, index) => lane(row, index * LANE, x, until)),
    );
  }
}

function axis(x, until, width, height) {
  const ticks = axisTicks(until, Math.max(2, Math.floor(width / 110)));
  return svg(
    "g.axis",
    ticks.map((ms) => [
      svg("line", { x1: x(ms), x2: x(ms), y1: 0, y2: height - 20 }),
      svg(
        "text",
        {
          x: x(ms) + (ms === 0 ? 0 : x(ms) > width - 40 ? -3 : 3),
          y: height - 6,
          "text-anchor": x(ms) > width - 40 ? "end" : "start",
        },
        ms === 0 ? "0" : duration(ms),
      ),
    ]),
  );
}

function lane({ name, place, spans, failed }, y, x, until) {
  const bars = spans.filter((span) => span.begin < until).map((span) => bar(span, span.place ?? place, y + 19, x));
  return svg(
    "g.lane",
    { "data-place": place ?? "all", "data-failed": failed ? "yes" : "no" },
    svg("text.lane-name", { x: 0, y: y + 13 }, failed ? `${name}: failed` : name),
    bars,
  );
}

function bar({ name, begin, end }, place, y, x) {
  const width = Math.max(1, x(end) - x(begin));
  const words = `${name} ${duration(end - begin)}`;
  const text = [words, name].find((each) => each.length * CHARACTER + 8 < width);
  return svg(
    "g.span",
    { "data-place": place, "data-name": name },
    svg("title", words),
    svg("rect", { x: x(begin), y, width, height: BAR, rx: Math.min(3, width / 2) }),
    text && svg("text", { x: x(begin) + 5, y: y + 15 }, text),
  );
}

function summary(record, phases, total) {
  const longest = phases.toSorted((a, b) => b.ms - a.ms)[0];
  const first = record.ttft_ms === null ? "no first token" : `the first token after ${duration(record.ttft_ms)}`;
  const all = `${duration(total)} in all, ${first}, longest is ${longest?.name ?? "nothing"}`;
  return `Timeline: ${all}. The table below has all phases.`;
}
