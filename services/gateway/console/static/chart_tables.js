/** The figures of charts as tables. The parameters are those of `Chart.show`. */

import { dataTable, tableRow } from "./data_table.js";
import { localTime, NONE } from "./format.js";

const MOST_ROWS = 60;

/** A row for each of the last times, the newest first. */
export function lineTable(title, { times, lines, words }) {
  const heads = ["Time", ...lines.map(({ name }) => `#${name}`)];
  const text = (value) => (value === null ? NONE : words(value));
  const row = (at, index) =>
    tableRow(heads, [localTime(at).slice(11), ...lines.map(({ values }) => text(values[index]))]);
  const rows = times.map(row).slice(-MOST_ROWS).reverse();
  return dataTable(`${title}, the newest first`, heads, rows, { tall: true }).element;
}

/** A row for each bucket, with what it counted in all of the time that is shown. */
export function heatTable(title, { heat, words }) {
  const heads = ["From, to", "#Counted"];
  const row = (counts, bucket) => {
    const range = `${words(heat.edges[bucket])} to ${words(heat.edges[bucket + 1])}`;
    return tableRow(heads, [range, String(counts.reduce((sum, count) => sum + count, 0))]);
  };
  return dataTable(`${title}, all of the time that is shown`, heads, heat.rows.map(row), { tall: true }).element;
}
