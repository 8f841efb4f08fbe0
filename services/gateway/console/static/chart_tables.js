/** The figures of charts as tables. The parameters are those of `Chart.show`. */

import { el } from "./dom.js";
import { localTime, NONE } from "./format.js";

const MOST_ROWS = 30;

/** A row for each of the last times, the newest first. */
export function lineTable(title, { times, lines, words }) {
  const from = Math.max(0, times.length - MOST_ROWS);
  const cell = (value) => el("td.number", {}, value === null ? NONE : words(value));
  const row = (at, index) => el("tr", {},
    el("th", { scope: "row" }, localTime(at).slice(11)), lines.map(({ values }) => cell(values[from + index])));
  const rows = times.slice(from).map(row).reverse();
  return dataTable(`${title}, the newest first`, ["Time", ...lines.map(({ name }) => name)], rows);
}

/** A row for each bucket, with what it counted in all of the time that is shown. */
export function heatTable(title, { heat, words }) {
  const row = (counts, bucket) => el("tr", {},
    el("th", { scope: "row" }, `${words(heat.edges[bucket])} to ${words(heat.edges[bucket + 1])}`),
    el("td.number", {}, counts.reduce((sum, count) => sum + count, 0)));
  return dataTable(`${title}, all of the time that is shown`, ["From, to", "Counted"], heat.rows.map(row));
}

function dataTable(caption, heads, rows) {
  const cells = heads.map((head, index) => el(index ? "th.number" : "th", { scope: "col" }, head));
  return el("table", {},
    el("caption.unseen", {}, caption), el("thead", {}, el("tr", {}, cells)), el("tbody", {}, rows));
}
