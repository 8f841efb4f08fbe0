/** The page of latency: percentiles and heat maps over time, of the histograms in samples; SLO attainment. */

import { emptyWords, missingWords, windowChoice } from "./charts.js";
import { el, setText } from "./dom.js";
import { measureSection } from "./measure_section.js";
import { OWN_MEASURES } from "./own_samples.js";
import { grouped, recent } from "./percentiles.js";
import { sloSection } from "./slo_section.js";

const MEASURES = [
  ["ttft", "Time to the first token", "Time from a request's arrival to its first token."],
  ["itl", "Between tokens (ITL)", "Time between two deltas of a choice, after the first token."],
  ["e2e", "End to end", "Time of whole requests."],
  ["queue", "Queue", "Time at the worker that computes the prompt, before it begins."],
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
    measureSection({ name, title, about, hasPlotly, edgesOf: () => store.bounds[name] }),
  );
  const none = el("p.muted", { role: "status" });
  const element = el(
    "div.page",
    el("div.page-head", el("h1", { tabindex: "-1" }, "Latency"), choice.element),
    !seesAll && el("p.muted", "Of the requests of this key, as the list of requests has them."),
    missingWords(hasPlotly),
    none,
    seesAll && slo.element,
    measures.map((measure) => measure.element),
  );
  const show = () => {
    const samples = recent(store.visibleSamples(), store.now(), wanted.seconds);
    setText(none, emptyWords(samples));
    const groups = grouped(samples, Math.max(wanted.groupS, store.stepS));
    slo.show(samples, groups, store.about.slo?.ttft_s ?? null);
    for (const measure of measures) measure.show(groups, Math.max(wanted.groupS, store.stepS));
  };
  const end = store.on("samples", show);
  show();
  const close = () => {
    end();
    slo.close();
    for (const measure of measures) measure.close();
  };
  return { title: "Latency", element, close };
}
