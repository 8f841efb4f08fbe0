/** SLO attainment: how many requests had their first token in time. */

import { Chart } from "./charts.js";
import { el, setText } from "./dom.js";
import { figureRow } from "./figures.js";
import { count, duration, percent } from "./format.js";
import { ratio, total } from "./percentiles.js";

/** The section; `show(samples, groups, ttftS)`, where ttftS is the gateway's limit in seconds, null for none. */
export function sloSection(hasPlotly) {
  const chart = new Chart("Requests whose first token came in time", hasPlotly);
  const about = el("p.muted");
  const numbers = figureRow();
  const head = el("h2", { id: "slo-head" }, "SLO attainment");
  const element = el("section", { "aria-labelledby": "slo-head" }, head, about, numbers.element, chart.element);
  const show = (samples, groups, ttftS) => {
    const limited = total(samples, (sample) => sample.ttft_slo_total);
    element.hidden = ttftS === null && limited === 0;
    setText(about, aboutWords(ttftS));
    numbers.show([
      ["In time", percent(met(samples))],
      ["Of requests", count(limited)],
    ]);
    const values = groups.map((group) => met(group.samples));
    const data = {
      times: groups.map((group) => group.at),
      words: percent,
      summary: percent(met(samples)),
      lines: [{ name: "in time", tone: "--series-1", values }],
      axis: { tickformat: ".0%", range: [0, 1.02] },
    };
    chart.show(limited === 0 ? null : data);
  };
  return { element, show, close: () => chart.close() };
}

function aboutWords(ttftS) {
  const own = "A request may name a limit of its own (x-slo-ttft-ms).";
  return ttftS === null ? own : `The first token is wanted within ${duration(ttftS * 1000)} (--ttft-slo). ${own}`;
}

function met(samples) {
  return ratio(
    total(samples, (sample) => sample.ttft_slo_met),
    total(samples, (sample) => sample.ttft_slo_total),
  );
}
