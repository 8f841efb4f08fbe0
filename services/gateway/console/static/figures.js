/** Figures with their names: large ones in a row, small ones as a list in a card. */

import { el, setText, showList } from "./dom.js";

/** A row of figures; `show` gets pairs of name and text, and leaves out what is false. */
export function figureRow() {
  return pairs("dl.figures", "div.figure");
}

/** A list of facts; `show` as that of `figureRow`. */
export function factList() {
  return pairs("dl.facts", "div");
}

function pairs(list, item) {
  const element = el(list);
  const make = ([name]) => {
    const value = el("dd");
    return { element: el(item, {}, el("dt", name), value), update: ([, text]) => setText(value, text) };
  };
  return { element, show: (found) => showList(element, found.filter(Boolean), ([name]) => name, make) };
}
