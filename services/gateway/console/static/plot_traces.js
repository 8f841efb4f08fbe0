/** What charts give to plotly: traces of lines or of a heat map, and the layout around them, in the page's colours. */

import { localTime } from "./format.js";
import { colour } from "./theme.js";

const TYPICAL_WIDTH = Math.log(1.2); // of a bucket

/** The traces of lines; the parameter is that of `Chart.show`. */
export function lineTraces({ times, lines, words }) {
  const x = times.map(localTime);
  return lines.map(({ name, values, tone, dash }) => ({
    type: "scatter",
    mode: times.length > 1 ? "lines" : "markers",
    name,
    x,
    y: values,
    connectgaps: false,
    line: { color: colour(tone), width: 2, dash: dash ?? "solid" },
    marker: { color: colour(tone) },
    text: values.map((value) => (value === null ? "" : words(value))),
    hovertemplate: `${name} %{text}<extra></extra>`,
  }));
}

/**
 * The trace of a heat map. Colours go by the logarithm of what was counted, so that the few are seen beside the many; a
 * bucket that is twice as wide, on the axis, looks half as dense.
 */
export function heatTrace({ times, stepS, heat, words }) {
  const width = (bucket) => Math.log(heat.edges[bucket + 1] / heat.edges[bucket]);
  const density = (number, bucket) => (number ? Math.log10(1 + (number * TYPICAL_WIDTH) / width(bucket)) : null);
  const range = (bucket) => `${words(heat.edges[bucket])} to ${words(heat.edges[bucket + 1])}`;
  return [
    {
      type: "heatmap",
      x: [...times, times.at(-1) + stepS].map(localTime),
      y: heat.edges,
      z: heat.rows.map((row, bucket) => row.map((number) => density(number, bucket))),
      text: heat.rows.map((row, bucket) => row.map((number) => `${number} of ${range(bucket)}`)),
      hovertemplate: "%{x}<br>%{text}<extra></extra>",
      showscale: false,
      hoverongaps: false,
      zmin: 0,
      colorscale: [
        [0, colour("--heat-0")],
        [0.5, colour("--heat-1")],
        [1, colour("--heat-2")],
      ],
    },
  ];
}

/** The layout of either. width: of the drawing, in pixels. */
export function chartLayout({ lines, heat, axis, words }, width) {
  const [grid, muted] = [colour("--line"), colour("--muted")];
  const common = {
    gridcolor: grid,
    zerolinecolor: grid,
    linecolor: grid,
    tickfont: { color: muted, size: 12 },
    fixedrange: true,
  };
  return {
    height: 240,
    margin: { l: 60, r: 12, t: 8, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: muted, size: 12 },
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: grid, font: { color: colour("--text") } },
    hovermode: heat ? "closest" : "x unified",
    showlegend: Boolean(lines && lines.length > 1),
    legend: { orientation: "h", x: 0, y: 1.14, font: { color: muted } },
    dragmode: false,
    xaxis: { ...common, type: "date", tickangle: 0, nticks: Math.max(2, Math.min(6, Math.floor(width / 85))) },
    yaxis: { ...common, ...(heat ? logAxis(heat.edges, words) : { rangemode: "tozero" }), ...axis },
  };
}

/** An axis with ticks at 1, 2 and 5 of each power of ten, or at the powers alone where these are many. */
function logAxis(edges, words) {
  const [least, most] = [edges[0], edges.at(-1)];
  const powers = Array.from({ length: 12 }, (_, index) => 10 ** (index - 6));
  const inside = (value) => value >= least && value <= most;
  const fine = powers.flatMap((power) => [power, 2 * power, 5 * power]).filter(inside);
  const tickvals = fine.length > 8 ? powers.filter(inside) : fine;
  return { type: "log", tickvals, ticktext: tickvals.map(words), range: [Math.log10(least), Math.log10(most)] };
}
