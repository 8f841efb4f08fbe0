/** The figures of charts as tables. The parameters are those of `Chart.show`. */

import { dataTable, tableRow } from "./data_table.js";
import { el, replace } from "./dom.js";
import { localTime, NONE } from "./format.js";

const MOST_ROWS = 60;

/** The table of a chart; `show(data)`. A table with other headings, as of workers that came, is another one. */
export function chartTable(title) {
  const element = el("div");
  let shown = { heads: [], show: () => undefined };
  const show = (data) => {
    const { about, heads, rows } = data.lines ? timeRows(data) : bucketRows(data);
    if (heads.join("\n") !== shown.heads.join("\n")) {
      const table = dataTable(`${title}, ${about}`, heads, [], { tall: true });
      replace(element, table.element);
      shown = { heads, show: table.show };
    }
    shown.show(rows);
  };
  return { element, show };
}

/** A row for each of the last times, the newest first. */
function timeRows({ times, lines, words }) {
  const heads = ["Time", ...lines.map(({ name }) => `#${name}`)];
  const text = (value) => (value === null ? NONE : words(value));
  const row = (at, index) =>
    tableRow(heads, [localTime(at).slice(11), ...lines.map(({ values }) => text(values[index]))]);
  return { about: "the newest first", heads, rows: times.map(row).slice(-MOST_ROWS).reverse() };
}

/** A row for each bucket, with what it counted in all of the time that is shown. */
function bucketRows({ heat, words }) {
  const heads = ["From, to", "#Counted"];
  const row = (counts, bucket) => {
    const range = `${words(heat.edges[bucket])} to ${words(heat.edges[bucket + 1])}`;
    return tableRow(heads, [range, String(counts.reduce((sum, count) => sum + count, 0))]);
  };
  return { about: "all of the time that is shown", heads, rows: heat.rows.map(row) };
}
