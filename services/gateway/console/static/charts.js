/**
 * Charts with their figures as a table: where plotly is missing the tables are open, and the page says what to install.
 */

import { chartTable } from "./chart_tables.js";
import { el } from "./dom.js";
import { chartLayout, heatTrace, lineTraces } from "./plot_traces.js";
import { INSTALL, loadPlotly } from "./plotly.js";
import { onTheme } from "./theme.js";

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };
const WINDOWS = [
  ["5 minutes", 300, 5],
  ["15 minutes", 900, 15],
  ["1 hour", 3600, 60],
]; // seconds, and of a point
const FIRST_WINDOW = 1;

/** The words of a page without samples; "" where there are some. */
export function emptyWords(samples) {
  return samples.length ? "" : "No figures of this time so far: they come every few seconds while the gateway serves.";
}

/** The words where charts cannot be drawn; null where they can. */
export function missingWords(hasPlotly) {
  if (hasPlotly) return null;
  return el(
    "p.panel.note",
    { role: "note" },
    "Charts need the Python package plotly, which is not installed where the gateway runs: ",
    el("code", INSTALL),
    ". The tables have the same figures.",
  );
}

/** A chart in a page: its title, a drawing, a table. */
export class Chart {
  #plot = el("div.plot", { role: "img", hidden: true });
  #empty = el("p.muted.empty", "Nothing was counted in this time.");
  #table;
  #details;
  #plotly = null;
  #last = null;
  #closed = false;
  #endTheme = onTheme(() => this.#draw());

  /** @param {string} title @param {boolean} hasPlotly - at the gateway @param {string} [subject] - not in the title */
  constructor(title, hasPlotly, subject = "") {
    this.title = subject ? `${subject}: ${title}` : title;
    this.#table = chartTable(this.title);
    this.#details = el("details", { open: !hasPlotly }, el("summary", "As a table"), this.#table.element);
    this.element = el("figure.panel.chart", el("figcaption", title), this.#empty, this.#plot, this.#details);
    if (hasPlotly) this.#load();
  }

  /**
   * @param {Object|null} data - null: there is nothing to draw
   * @param {number[]} data.times - seconds since 1970, rising
   * @param {Array<{name: string, values: Array<number|null>, tone: string, dash?: string}>} [data.lines]
   * @param {{edges: number[], rows: number[][]}} [data.heat] - in the place of lines; see `matrix`
   * @param {number} [data.stepS] - from one time to the next, of a heat map
   * @param {function(number): string} data.words - a value in words
   * @param {string} data.summary - for those who do not see the drawing
   * @param {Object} [data.axis] - more of the axis of values, as plotly has it
   */
  show(data) {
    this.#last = data;
    this.#empty.hidden = data !== null;
    this.#details.hidden = data === null;
    this.#plot.hidden = data === null || this.#plotly === null;
    if (data === null) return;
    this.#plot.setAttribute("aria-label", `${this.title}: ${data.summary}`);
    this.#table.show(data);
    this.#draw();
  }

  close() {
    this.#closed = true;
    this.#endTheme();
    if (this.#plotly) this.#plotly.purge(this.#plot);
  }

  async #load() {
    const plotly = await loadPlotly();
    if (this.#closed) return;
    this.#plotly = plotly;
    if (plotly === null) this.#details.open = true;
    else if (this.#last !== null) this.show(this.#last);
  }

  #draw() {
    if (this.#plotly === null || this.#plot.hidden) return;
    const traces = this.#last.lines ? lineTraces(this.#last) : heatTrace(this.#last);
    this.#plotly.react(this.#plot, traces, chartLayout(this.#last, this.#plot.clientWidth), CONFIG);
  }
}

/** Radio buttons for the time that charts show. `onChange` gets `{seconds, groupS}`, as `first` is. */
export function windowChoice(onChange) {
  const choice = ([title, seconds, groupS], index) => {
    const change = () => onChange({ seconds, groupS });
    const input = el("input", { type: "radio", name: "window", checked: index === FIRST_WINDOW, change });
    return el("label.choice", input, el("span", title));
  };
  const element = el("fieldset.segmented", el("legend.unseen", "Time that is shown"), WINDOWS.map(choice));
  const [, seconds, groupS] = WINDOWS[FIRST_WINDOW];
  return { element, first: { seconds, groupS } };
}
