/** Tables of figures in a region that scrolls. A heading that begins with "#" is one of numbers. */

import { el, newId, replace } from "./dom.js";

/**
 * @param {string} title @param {string[]} heads
 * @param {Array<Element>} [rows] - see `tableRow`
 * @param {{shown?: boolean, tall?: boolean, name?: string}} [options] - shown: the title is, and not only read aloud.
 *   tall: it may have many rows, and scrolls. name: a class
 * @returns {{element: Element, title: Element, body: Element, show: function(Array<Element>, Element)}} show puts rows,
 *   and a last one for the foot, in the place of those that are there; the region keeps the keyboard and its scroll
 */
export function dataTable(
  title,
  heads,
  rows = [],
  { shown = false, tall = false, name = "figures-table" } = {},
) {
  const id = newId("table");
  const body = el("tbody", rows);
  const foot = el("tfoot");
  const heading = el(shown ? "p.muted.small" : "p.unseen", { id }, title);
  const cells = heads.map((head) => el(isNumber(head) ? "th.number" : "th", { scope: "col" }, head.replace("#", "")));
  const table = el(
    "table",
    { class: name, "aria-labelledby": id },
    el("thead", el("tr", cells)),
    body,
    foot,
  );
  const region = el(
    tall ? "div.scroll-x.tall" : "div.scroll-x",
    { tabindex: "0", role: "region", "aria-labelledby": id },
    table,
  );
  const show = (newRows, newFoot = null) => {
    replace(body, newRows);
    replace(foot, newFoot);
  };
  return { element: el("div.table", heading, region), title: heading, body, show };
}

/** A row; its first cell is its heading. @param {string[]} heads @param {Array<string|Node|Array>} cells */
export function tableRow(heads, cells, attributes = {}) {
  const cell = (content, index) => {
    if (index === 0) return el("th", { scope: "row" }, content);
    return el(isNumber(heads[index]) ? "td.number" : "td", content);
  };
  return el("tr", attributes, cells.map(cell));
}

function isNumber(head) {
  return head.startsWith("#");
}
