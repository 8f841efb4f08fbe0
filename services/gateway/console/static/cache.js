/** The page of the cache: the hit rate over time, shared prefixes by what they save, evictions, KV in use. */

import { evictions, hitRates, kvInUse, promptTokens } from "./cache_charts.js";
import { Chart, emptyWords, missingWords, windowChoice } from "./charts.js";
import { el, setText } from "./dom.js";
import { figureRow } from "./figures.js";
import { percent, shortCount } from "./format.js";
import { grouped, ratio, recent, total } from "./percentiles.js";
import { prefixSection } from "./prefix_table.js";

const OF_WORKERS = [
  [evictions, "Blocks evicted a second"],
  [kvInUse, "KV in use, by worker"],
];

/** See main.js. */
export function openCache({ store }) {
  const hasPlotly = store.about.has_plotly;
  const seesAll = store.about.sees === "all";
  const choice = windowChoice((chosen) => {
    wanted = chosen;
    show();
  });
  let wanted = choice.first;
  const numbers = figureRow();
  const charts = new Map([
    [hitRates, new Chart("Prompt tokens found in a cache", hasPlotly)],
    [promptTokens, new Chart("Prompt tokens a second", hasPlotly)],
    ...(seesAll ? OF_WORKERS.map(([make, title]) => [make, new Chart(title, hasPlotly)]) : []),
  ]);
  const prefixes = prefixSection();
  const none = el("p.muted", { role: "status" });
  prefixes.element.hidden = !seesAll;
  const element = el(
    "div.page",
    el("div.page-head", el("h1", { tabindex: "-1" }, "Cache"), choice.element),
    el("p.muted", "Prompts that begin alike share KV: what a worker has cached is not computed again."),
    missingWords(hasPlotly),
    none,
    numbers.element,
    el(
      "section",
      { "aria-label": "Over time" },
      el(
        "div.charts",
        [...charts.values()].map((chart) => chart.element),
      ),
    ),
    prefixes.element,
  );

  const show = () => {
    const samples = recent(store.visibleSamples(), store.now(), wanted.seconds);
    const groups = grouped(samples, Math.max(wanted.groupS, store.stepS));
    setText(none, emptyWords(samples));
    const [prompt, cached] = [
      total(samples, (sample) => sample.prompt_tokens),
      total(samples, (sample) => sample.cached_tokens),
    ];
    numbers.show([
      ["Hit rate", percent(ratio(cached, prompt))],
      ["Prompt tokens", shortCount(prompt)],
      ["Of them cached", shortCount(cached)],
      seesAll && ["Blocks evicted", evictedWords(samples)],
    ]);
    for (const [make, chart] of charts) chart.show(make(groups));
  };
  const ends = [
    store.on("samples", show),
    store.on("prefixes", () => prefixes.show(store.prefixes)),
  ];
  prefixes.show(store.prefixes);
  show();
  const close = () => {
    for (const end of ends) end();
    for (const chart of [...charts.values()]) chart.close();
  };
  return { title: "Cache", element, close };
}

function evictedWords(samples) {
  return samples.some((sample) => typeof sample.evicted_blocks === "number")
    ? shortCount(total(samples, (sample) => sample.evicted_blocks))
    : "not counted";
}
