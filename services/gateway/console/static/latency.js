/** The page of latency: percentiles and heat maps over time, of the histograms in samples; SLO attainment. */

import { Chart, missingWords, windowChoice } from "./charts.js";
import { el, setText } from "./dom.js";
import { figureRow } from "./figures.js";
import { count, duration, NONE, percent } from "./format.js";
import { OWN_MEASURES } from "./own_samples.js";
import { addUp, grouped, matrix, percentile, ratio, recent, total } from "./percentiles.js";

const MEASURES = [
  ["ttft", "Time to the first token", "Time from a request's arrival to its first token."],
  ["itl", "Between tokens (ITL)", "Time between two deltas of a choice, after the first token."],
  ["e2e", "End to end", "Time of whole requests."],
  ["queue", "Queue", "Time at the worker that computes the prompt, before it begins."],
];
const SHARES = [
  ["p50", 0.5, "--series-1", "solid"],
  ["p90", 0.9, "--series-2", "dash"],
  ["p99", 0.99, "--series-3", "dot"],
];

/** See main.js. */
export function openLatency({ store }) {
  const hasPlotly = store.about.has_plotly;
  const choice = windowChoice((chosen) => {
    wanted = chosen;
    show();
  });
  let wanted = choice.first;
  const seesAll = store.about.sees === "all";
  const slo = sloSection(hasPlotly);
  const measures = MEASURES.filter(([name]) => seesAll || OWN_MEASURES.includes(name)).map(([name, title, about]) =>
    measureSection(name, title, about, hasPlotly),
  );
  const none = el("p.muted", { role: "status" });
  const element = el(
    "div.page",
    el("div.page-head", el("h1", { tabindex: "-1" }, "Latency"), choice.element),
    !seesAll && el("p.muted", "Of the requests of this key, as the list of requests has them."),
    missingWords(hasPlotly),
    none,
    slo.element,
    measures.map((measure) => measure.element),
  );
  const show = () => {
    const samples = recent(store.visibleSamples(), store.now(), wanted.seconds);
    setText(
      none,
      samples.length ? "" : "No figures of this time so far: they come every few seconds while the gateway serves.",
    );
    const groups = grouped(samples, Math.max(wanted.groupS, store.stepS));
    slo.show(samples, groups, seesAll ? store.about.slo?.ttft_s : null);
    for (const measure of measures) measure.show(samples, groups, store.bounds, Math.max(wanted.groupS, store.stepS));
  };
  const end = store.on(seesAll ? "samples" : "rows", show);
  show();
  const close = () => {
    end();
    slo.close();
    for (const measure of measures) measure.close();
  };
  return { title: "Latency", element, close };
}

function words(seconds) {
  return duration(seconds * 1000);
}

function measureSection(name, title, about, hasPlotly) {
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
  const show = (samples, groups, bounds, stepS) => {
    const edges = bounds[name] ?? [];
    const of = (members) =>
      addUp(
        members.map((sample) => sample[name] ?? []),
        edges.length + 1,
      );
    const all = of(samples);
    const counted = all.reduce((sum, number) => sum + number, 0);
    const known = samples.some((sample) => sample.sums?.[name] !== undefined);
    const mean = known
      ? ratio(
          total(samples, (sample) => sample.sums?.[name]),
          counted,
        )
      : null;
    const found = SHARES.map(([label, share]) => [label, percentile(all, edges, share)]);
    const shown = found.map(([label, seconds]) => [label, seconds === null ? NONE : words(seconds)]);
    numbers.show([["Counted", count(counted)], known && ["Mean", mean === null ? NONE : words(mean)], ...shown]);
    if (counted === 0) {
      lines.show(null);
      heat.show(null);
      return;
    }
    const columns = groups.map((group) => of(group.samples));
    const times = groups.map((group) => group.at);
    const summary = found.map(([label, seconds]) => `${label} ${words(seconds)}`).join(", ");
    lines.show({
      times,
      words,
      summary,
      lines: SHARES.map(([label, share, tone, dash]) => ({
        name: label,
        tone,
        dash,
        values: columns.map((counts) => percentile(counts, edges, share)),
      })),
      axis: { ticksuffix: " s" },
    });
    heat.show({ times, heat: matrix(columns, edges), words, summary, stepS });
  };
  const close = () => {
    lines.close();
    heat.close();
  };
  return { element, show, close };
}

function sloSection(hasPlotly) {
  const chart = new Chart("Requests whose first token came in time", hasPlotly);
  const words = el("p.muted");
  const numbers = figureRow();
  const element = el(
    "section",
    { "aria-labelledby": "slo-head" },
    el("h2", { id: "slo-head" }, "SLO attainment"),
    words,
    numbers.element,
    chart.element,
  );
  const show = (samples, groups, ttftS) => {
    element.hidden = typeof ttftS !== "number";
    if (element.hidden) return;
    setText(words, `The first token is wanted within ${duration(ttftS * 1000)} (--ttft-slo).`);
    const met = (members) =>
      ratio(
        total(members, (sample) => sample.ttft_slo_met),
        total(members, (sample) => sample.ttft_slo_total),
      );
    const all = met(samples);
    numbers.show([
      ["In time", percent(all)],
      ["Of requests", count(total(samples, (sample) => sample.ttft_slo_total))],
    ]);
    chart.show(
      all === null
        ? null
        : {
            times: groups.map((group) => group.at),
            words: percent,
            summary: percent(all),
            lines: [{ name: "in time", tone: "--series-1", values: groups.map((group) => met(group.samples)) }],
            axis: { tickformat: ".0%", range: [0, 1.02] },
          },
    );
  };
  return { element, show, close: () => chart.close() };
}
