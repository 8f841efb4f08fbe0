/** The links of a fleet as a table. */

import { dataTable, tableRow } from "./data_table.js";
import { setText, showList } from "./dom.js";
import { bytes, count, rate } from "./format.js";
import { linkName } from "./moved.js";

const HEADS = ["Prefill", "Decode", "#Handoffs/s", "#Moved/s", "#Handoffs", "#Failed", "#Moved", "Transport", "State"];

/** The table; `show(links, moved)`. */
export function linkTable() {
  const { element, body } = dataTable("Links between prefill and decode workers", HEADS, [], { tall: true });
  const show = (links, moved) => {
    element.hidden = links.length === 0;
    const items = links.map((link) => ({ link, moved: moved.get(linkName(link)) }));
    showList(body, items, ({ link }) => linkName(link), linkRow);
  };
  return { element, show };
}

function linkRow() {
  const element = tableRow(
    HEADS,
    HEADS.map(() => ""),
  );
  const update = (item) => linkTexts(item).forEach((text, index) => setText(element.children[index], text));
  return { element, update };
}

function linkTexts({ link, moved }) {
  const each = (field) => (moved ? moved[field] / moved.seconds : 0);
  return [
    link.prefill,
    link.decode,
    rate(each("handoffs")),
    bytes(each("bytes")),
    count(link.handoffs),
    count(link.failed),
    bytes(link.bytes),
    [link.transport ?? "none so far", link.why].filter(Boolean).join(": "),
    link.avoided ? "avoided after failures" : "in use",
  ];
}
