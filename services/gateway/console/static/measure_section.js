/** One measure of latency: its figures, percentiles over time, and a heat map. */

import { Chart } from "./charts.js";
import { el } from "./dom.js";
import { figureRow } from "./figures.js";
import { count, duration, NONE } from "./format.js";
import { addUp, matrix, percentile, total } from "./percentiles.js";

const SHARES = [
  ["p50", 0.5, "--series-1", "solid"],
  ["p90", 0.9, "--series-2", "dash"],
  ["p99", 0.99, "--series-3", "dot"],
];

/**
 * @param {{name: string, title: string, about: string, hasPlotly: boolean, edgesOf: function(): number[]}} measure
 *   - name: of the histogram in samples. edgesOf: returns the upper ends of its buckets, in seconds
 * @returns {{element: Element, show: function(Object[], number), close: function()}} show gets groups of samples (see
 *   `grouped`) and their length in seconds
 */
export function measureSection({ name, title, about, hasPlotly, edgesOf }) {
  const numbers = figureRow();
  const lines = new Chart("Percentiles", hasPlotly, title);
  const heat = new Chart("How many took how long", hasPlotly, title);
  const id = `measure-${name}`;
  const element = el(
    "section",
    { "aria-labelledby": id, "data-measure": name },
    el("h2", { id }, title),
    el("p.muted", about),
    numbers.element,
    el("div.charts", lines.element, heat.element),
  );
  const show = (groups, stepS) => {
    const edges = edgesOf();
    const countsOf = (samples) =>
      addUp(
        samples.map((sample) => sample[name] ?? []),
        edges.length + 1,
      );
    const times = groups.map((group) => group.at);
    const columns = groups.map((group) => countsOf(group.samples));
    const all = addUp(columns, edges.length + 1);
    const found = SHARES.map(([label, share]) => [label, words(percentile(all, edges, share))]);
    numbers.show([["Counted", count(sum(all))], meanFigure(groups, name, sum(all)), ...found]);
    const isEmpty = sum(all) === 0;
    const summary = found.map((pair) => pair.join(" ")).join(", ");
    const drawn = isEmpty ? null : percentileLines(columns, edges);
    lines.show(isEmpty ? null : { times, words, summary, lines: drawn, axis: { ticksuffix: " s" } });
    heat.show(isEmpty ? null : { times, words, summary, heat: matrix(columns, edges), stepS });
  };
  const close = () => {
    lines.close();
    heat.close();
  };
  return { element, show, close };
}

function words(seconds) {
  return seconds === null ? NONE : duration(seconds * 1000);
}

function sum(counts) {
  return counts.reduce((all, number) => all + number, 0);
}

/** The mean; false where samples have no sums of times. */
function meanFigure(groups, name, counted) {
  const samples = groups.flatMap((group) => group.samples);
  if (!samples.some((sample) => sample.sums?.[name] !== undefined)) return false;
  return ["Mean", words(counted ? total(samples, (sample) => sample.sums?.[name]) / counted : null)];
}

function percentileLines(columns, edges) {
  return SHARES.map(([label, share, tone, dash]) => {
    return { name: label, tone, dash, values: columns.map((counts) => percentile(counts, edges, share)) };
  });
}
