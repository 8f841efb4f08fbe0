"use strict";
// Draws the plots of the page from the points that it has, in the colours of its style, and again when these change.

const runs = JSON.parse(document.getElementById("points").textContent);
const NAMES = { ttft_ms: "TTFT", itl_ms: "ITL", e2e_ms: "end to end" };
const NUM_COLOURS = 8;

function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

function axis(colour, title, more) {
  return {
    title: { text: title, font: { color: colour("soft"), size: 12 }, standoff: 8 },
    gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"),
    tickfont: { color: colour("soft"), size: 11 }, automargin: true, ...more,
  };
}

function layout(colour, x, y, more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink"), size: 12 },
    margin: { l: 54, r: 14, t: 10, b: 44 }, xaxis: x, yaxis: y, showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink") } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: colour("soft") } }, ...more,
  };
}

// A range of a logarithmic axis: ticks at 1, 2 and 5 of each power of ten that it covers.
function logTicks(values) {
  const positive = values.filter((value) => value > 0);
  if (!positive.length) return { type: "linear" };
  const low = Math.log10(Math.min(...positive)), high = Math.log10(Math.max(...positive));
  const steps = high - low > 3 ? [1] : high - low > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  const ticks = [];
  for (let power = Math.floor(low) - 1; power <= Math.ceil(high) + 1; power += 1) {
    for (const step of steps) ticks.push(step * 10 ** power);
  }
  const pad = Math.max(0.04 * (high - low), 0.02);
  return {
    type: "log", range: [low - pad, high + pad], tickmode: "array", tickvals: ticks,
    ticktext: ticks.map((tick) => (tick >= 1000 ? `${tick / 1000}k` : `${Number(tick.toPrecision(2))}`)),
  };
}

function distribution(colour, figure) {
  const shown = runs.map((run, number) => ({ run, number }))
    .filter(({ run }) => run.distribution && run.distribution[figure].length);
  const traces = shown.map(({ run, number }) => ({
    x: run.distribution[figure], y: run.distribution.shares.map((share) => 100 * share), name: run.label,
    mode: "lines", line: { color: colour(`run-${number % NUM_COLOURS}`), width: 2, dash: number < NUM_COLOURS ? "solid" : "dot" },
    hovertemplate: `%{y:.1f} %: at most %{x:.4~g} ms<extra>%{fullData.name}</extra>`,
  }));
  // A few deltas that came together with others would take most of the width.
  const ticks = logTicks(traces.flatMap((trace) => trace.x.filter((_, at) => trace.y[at] >= 2)));
  const y = axis(colour, "% of all", { range: [0, 101], tickvals: [0, 25, 50, 75, 90, 100] });
  return { traces, layout: layout(colour, axis(colour, "ms", ticks), y) };
}

function load(colour, figure) {
  const traces = [];
  runs.forEach((run, number) => {
    const points = run.runs.filter((point) => point[figure]).sort((a, b) => a.output_tokens_per_s - b.output_tokens_per_s);
    const ink = colour(`run-${number % NUM_COLOURS}`);
    for (const [percentile, dash] of [["p50", "solid"], ["p99", "dot"]]) {
      if (!points.length) continue;
      traces.push({
        x: points.map((point) => point.output_tokens_per_s), y: points.map((point) => point[figure][percentile]),
        text: points.map((point) => point.rate === null ? "" : `at a rate of ${Number(point.rate.toPrecision(3))}/s, `),
        name: `${run.label}, ${percentile}`, mode: points.length > 1 ? "lines+markers" : "markers",
        line: { color: ink, width: 1.5, dash }, hovertemplate: `%{text}%{x:.4~g} tokens/s: %{y:.4~g} ms<extra>%{fullData.name}</extra>`,
        marker: {
          size: 10, color: points.map((point) => (point.keeps === false ? colour("panel") : point.keeps ? ink : `${ink}66`)), line: { color: ink, width: 2 },
          symbol: percentile === "p50" ? "circle" : "diamond",
        },
      });
    }
  });
  const y = axis(colour, `${NAMES[figure]}, ms (circle p50, diamond p99)`, logTicks(traces.flatMap((trace) => trace.y)));
  return { traces, layout: layout(colour, axis(colour, "output tokens/s", { rangemode: "tozero" }), y) };
}

function timeline(colour, run) {
  if (!run.timeline) return { traces: [] };
  const line = (name, values, ink) => ({
    x: run.timeline.seconds, y: values, name, mode: "lines", line: { color: ink, width: 1.5, shape: "hv" },
    fill: "tozeroy", fillcolor: `${ink}22`, hovertemplate: "%{y} at %{x:.3~g} s<extra>%{fullData.name}</extra>",
  });
  const traces = [
    line("running", run.timeline.running, colour("running")), line("waiting", run.timeline.waiting, colour("waiting")),
    {
      x: run.timeline.seconds, y: run.timeline.output_tokens_per_s, name: "tokens/s", yaxis: "y2", mode: "lines",
      line: { color: colour("soft"), width: 1, dash: "dot" }, hovertemplate: "%{y:.4~g} tokens/s at %{x:.3~g} s<extra></extra>",
    },
  ];
  const second = axis(colour, "tokens/s", { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, tickmode: "auto", nticks: 6 });
  return { traces, layout: layout(colour, axis(colour, "s", {}), axis(colour, "requests", { rangemode: "tozero" }),
    { showlegend: true, yaxis2: second, margin: { l: 54, r: 54, t: 34, b: 44 } }) };
}

function gapMap(colour, run) {
  if (!run.gap_map) return { traces: [] };
  const middles = (edges) => edges.slice(1).map((edge, at) => (edge + edges[at]) / 2);
  const counts = run.gap_map.ms.slice(1).map((_, row) => run.gap_map.counts.map((column) => column[row]));
  const most = Math.max(...counts.flat(), 1);
  const ticks = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].filter((tick) => tick <= most);
  const traces = [{
    type: "heatmap", x: middles(run.gap_map.seconds), y: middles(run.gap_map.ms),
    z: counts.map((row) => row.map((count) => (count ? Math.log10(count + 0.5) : null))), customdata: counts,
    zmin: 0, zmax: Math.log10(most + 1), hoverongaps: false,
    colorscale: [[0, colour("map-low")], [0.5, colour("map-middle")], [1, colour("map-high")]],
    hovertemplate: "%{customdata} deltas of about %{y:.3~g} ms at %{x:.3~g} s<extra></extra>",
    colorbar: {
      tickvals: ticks.map((tick) => Math.log10(tick + 0.5)), ticktext: ticks.map((tick) => tick.toLocaleString("en")),
      tickfont: { color: colour("soft"), size: 11 }, thickness: 10, outlinewidth: 0,
    },
  }];
  return { traces, layout: layout(colour, axis(colour, "s", { showgrid: false }),
    axis(colour, "ms", { ...logTicks(run.gap_map.ms), showgrid: false })) };
}

function made(colour, place) {
  const kind = place.dataset.plot, run = runs[Number(place.dataset.run)];
  if (kind === "timeline") return timeline(colour, run);
  if (kind === "gap_map") return gapMap(colour, run);
  return kind.startsWith("load-") ? load(colour, kind.slice("load-".length)) : distribution(colour, kind);
}

function draw() {
  const colour = colours();
  for (const place of document.querySelectorAll(".plot")) {
    const plot = made(colour, place);
    if (!plot.traces.length) {
      place.innerHTML = "<p>There is nothing to draw.</p>";
      continue;
    }
    Plotly.react(place, plot.traces, plot.layout, { displayModeBar: false });
  }
}

// Plots follow their places, whose width changes without the window's, too.
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.classList.contains("js-plotly-plot")) Plotly.Plots.resize(target);
});

draw();
for (const place of document.querySelectorAll(".plot")) widths.observe(place);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
