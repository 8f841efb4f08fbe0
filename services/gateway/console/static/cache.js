/** The page of the cache: the hit rate over time, shared prefixes by what they save, evictions, KV in use. */

import { Chart, missingWords, windowChoice } from "./charts.js";
import { el, replace, setText } from "./dom.js";
import { figureRow } from "./figures.js";
import { count, percent, rate, shortCount, shortNames } from "./format.js";
import { grouped, ratio, recent, total } from "./percentiles.js";

const SERIES = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

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
  const charts = {
    hits: new Chart("Prompt tokens found in a cache", hasPlotly),
    tokens: new Chart("Prompt tokens a second", hasPlotly),
    evicted: new Chart("Blocks evicted a second", hasPlotly),
    kv: new Chart("KV in use, by worker", hasPlotly),
  };
  const prefixes = prefixSection();
  const none = el("p.muted", { role: "status" });
  charts.evicted.element.hidden = charts.kv.element.hidden = prefixes.element.hidden = !seesAll;
  const element = el("div.page", {},
    el("div.page-head", {}, el("h1", { tabindex: "-1" }, "Cache"), choice.element),
    el("p.muted", {}, "Prompts that begin alike share KV: what a worker has cached is not computed again."),
    missingWords(hasPlotly), none, numbers.element,
    el("section", { "aria-label": "Over time" }, el("div.charts", {}, Object.values(charts).map((chart) => chart.element))), prefixes.element);

  const show = () => {
    const samples = recent(store.samples, store.now(), wanted.seconds);
    const groups = grouped(samples, Math.max(wanted.groupS, store.stepS));
    setText(none, samples.length ? "" : "No figures of this time so far: they come every few seconds while the gateway serves.");
    const [prompt, cached] = [total(samples, (sample) => sample.prompt_tokens), total(samples, (sample) => sample.cached_tokens)];
    numbers.show([["Hit rate", percent(ratio(cached, prompt))], ["Prompt tokens", shortCount(prompt)], ["Of them cached", shortCount(cached)],
      seesAll && ["Blocks evicted", evictedWords(samples)]]);
    showCharts(charts, groups, prompt);
  };
  const ends = [store.on("samples", show), store.on("prefixes", () => prefixes.show(store.prefixes))];
  prefixes.show(store.prefixes);
  show();
  const close = () => {
    for (const end of ends) end();
    for (const chart of Object.values(charts)) chart.close();
  };
  return { title: "Cache", element, close };
}

function evictedWords(samples) {
  return samples.some((sample) => typeof sample.evicted_blocks === "number") ? shortCount(total(samples, (sample) => sample.evicted_blocks)) : "not counted";
}

function showCharts(charts, groups, prompt) {
  const times = groups.map((group) => group.at);
  const perSecond = (field) => groups.map(({ samples }) => ratio(total(samples, (sample) => sample[field]), total(samples, (sample) => sample.s)));
  const hits = groups.map(({ samples }) => ratio(total(samples, (sample) => sample.cached_tokens), total(samples, (sample) => sample.prompt_tokens)));
  charts.hits.show(prompt === 0 ? null : {
    times, words: percent, summary: `last ${percent(hits.findLast((value) => value !== null))}`,
    lines: [{ name: "hit rate", tone: SERIES[0], values: hits }], axis: { tickformat: ".0%", range: [0, 1.02] },
  });
  charts.tokens.show(prompt === 0 ? null : {
    times, words: rate, summary: "computed and cached",
    lines: [{ name: "all", tone: SERIES[0], values: perSecond("prompt_tokens") }, { name: "cached", tone: SERIES[1], dash: "dash", values: perSecond("cached_tokens") }],
  });
  const evicted = groups.some(({ samples }) => samples.some((sample) => typeof sample.evicted_blocks === "number"));
  charts.evicted.show(evicted ? { times, words: rate, summary: "by all workers", lines: [{ name: "evicted", tone: SERIES[2], values: perSecond("evicted_blocks") }] } : null);
  charts.kv.show(kvLines(groups, times));
}

function kvLines(groups, times) {
  const workers = [...new Set(groups.flatMap(({ samples }) => samples.flatMap((sample) => Object.keys(sample.kv_used ?? {}))))].sort();
  if (workers.length === 0) return null;
  const names = shortNames(workers);
  const used = (samples, worker) => samples.map((sample) => sample.kv_used?.[worker]).findLast((value) => value !== undefined) ?? null;
  const lines = workers.map((worker, index) => ({
    name: names.get(worker), tone: SERIES[index % SERIES.length], dash: index < SERIES.length ? "solid" : "dot",
    values: groups.map(({ samples }) => used(samples, worker)),
  }));
  return { times, words: percent, summary: `${workers.length} workers`, lines, axis: { tickformat: ".0%", range: [0, 1.02] } };
}

function prefixSection() {
  const body = el("tbody");
  const empty = el("p.muted");
  const heads = [["Prefix"], ["Tokens", 1], ["Uses", 1], ["Tokens saved", 1], ["Cached at"]];
  const table = el("table.prefixes", {}, el("caption.unseen", {}, "Shared prefixes, the largest saving first"),
    el("thead", {}, el("tr", {}, heads.map(([head, number]) => el(number ? "th.number" : "th", { scope: "col" }, head)))), body);
  const scroll = el("div.scroll-x", { tabindex: "0", role: "region", "aria-label": "Shared prefixes" }, table);
  const element = el("section", { "aria-labelledby": "prefixes-head" }, el("h2", { id: "prefixes-head" }, "Shared prefixes"),
    el("p.muted", {}, "Beginnings of prompts that several requests had, seen lately. A name is the hash of a prefix's last block; it says nothing of the text."), empty, scroll);
  const show = (prefixes) => {
    const found = prefixes ?? [];
    scroll.hidden = found.length === 0;
    setText(empty, prefixes === null ? "Nothing was told so far." : found.length === 0 ? "No prefix was shared lately." : "");
    const most = Math.max(1, ...found.map((prefix) => prefix.saved_tokens));
    replace(body, found.map((prefix) => {
      const fill = el("span.bar-part.used");
      fill.style.width = `${(prefix.saved_tokens / most) * 100}%`;
      return el("tr", {}, el("th", { scope: "row" }, el("code", {}, prefix.name.slice(0, 16))), el("td.number", {}, count(prefix.tokens)),
        el("td.number", {}, count(prefix.uses)), el("td.number.saved", {}, count(prefix.saved_tokens), el("span.bar", { "aria-hidden": "true" }, fill)),
        el("td", {}, prefix.workers.join(", ")));
    }));
  };
  return { element, show };
}
