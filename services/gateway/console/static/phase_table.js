/** The phases of one request as a table, with their sum beside the request's time. */

import { dataTable, tableRow } from "./data_table.js";
import { el, setText } from "./dom.js";
import { exactMs, percent } from "./format.js";
import { phaseSpans, placeOf } from "./timeline_spans.js";

const HEADS = ["Phase", "#Took", "#Share", "Is"];
const MEANING = {
  read: "the gateway reads and checks the body",
  tokenize: "chat template and tokens",
  wait: "for workers, for room, or attempts that brought nothing",
  lookup: "who caches the prompt's beginning",
  place: "the workers are chosen, and sent the request",
  wire: "to the worker and back",
  queue: "the worker has it, and has not begun",
  prefill: "the prompt is computed, to the first token",
  deliver: "the first token becomes text",
  generate: "all further tokens",
  rest: "no token came in this time",
};

/** The table; `show(record)`. */
export function phaseTable() {
  const table = dataTable("", HEADS, [], { shown: true, name: "phases" });
  const show = (record) => {
    setText(table.title, `The phases follow one another.${handoffWords(record.phases_ms.handoff)}`);
    table.show(...phaseRows(record));
  };
  return { element: table.element, show };
}

/** The rows, and that of the foot. */
function phaseRows(record) {
  const { phases, sum, total } = phaseSpans(record);
  const share = (ms) => percent(total ? ms / total : 0);
  const rows = phases.map(({ name, ms }) => {
    const swatch = el("span.swatch", { "data-place": placeOf(name, record), "aria-hidden": "true" });
    const title = [swatch, name === "rest" ? "no token" : name];
    return tableRow(HEADS, [title, exactMs(ms), share(ms), MEANING[name]], { "data-phase": name });
  });
  const cells = ["Sum", exactMs(sum), share(sum), `the request took ${exactMs(total)}`];
  const foot = tableRow(HEADS, cells, { "data-sum": sum.toFixed(3), "data-total": total.toFixed(3) });
  return [rows, foot];
}

function handoffWords(ms) {
  if (ms === undefined) return "";
  return ` Within generate, the handoff took ${exactMs(ms)}: from the first token to the decode worker's first.`;
}
