/** Shared prefixes as a table, by what they save. */

import { dataTable, tableRow } from "./data_table.js";
import { el, setText } from "./dom.js";
import { count } from "./format.js";

const HEADS = ["Prefix", "#Tokens", "#Uses", "#Tokens saved", "Cached at"];
const ABOUT =
  "Beginnings of prompts that several requests had, seen lately. A name is the hash of a prefix's last block; " +
  "it says nothing of the text.";

/** The section; `show(prefixes)`, null where nothing was told so far. */
export function prefixSection() {
  const empty = el("p.muted");
  const table = dataTable("Shared prefixes, the largest saving first", HEADS, [], { name: "prefixes", tall: true });
  const head = el("h2", { id: "prefixes-head" }, "Shared prefixes");
  const about = el("p.muted", ABOUT);
  const element = el("section", { "aria-labelledby": "prefixes-head" }, head, about, empty, table.element);
  const show = (prefixes) => {
    const found = prefixes ?? [];
    table.element.hidden = found.length === 0;
    setText(empty, prefixes === null ? "Nothing was told so far." : found.length ? "" : "No prefix was shared lately.");
    const most = Math.max(1, ...found.map((prefix) => prefix.saved_tokens));
    table.show(found.map((prefix) => prefixRow(prefix, most)));
  };
  return { element, show };
}

function prefixRow({ name, tokens, uses, saved_tokens: saved, workers }, most) {
  const part = el("span.bar-part.used");
  part.style.width = `${(saved / most) * 100}%`;
  const bar = el("span.bar", { "aria-hidden": "true" }, part);
  return tableRow(HEADS, [
    el("code", name.slice(0, 16)),
    count(tokens),
    count(uses),
    [count(saved), bar],
    workers.join(", "),
  ]);
}
