/** A row of the list of requests. */

import { el } from "./dom.js";
import { clock, count, dayAndTime, duration, NONE } from "./format.js";
import { requestHash } from "./router.js";
import { badge, requestTone, requestWord } from "./states.js";

const COLUMNS = [
  ["at", "Arrived"],
  ["state", "State"],
  ["id", "Request"],
  ["model", "Model"],
  ["key", "Key"],
  ["prompt", "Prompt"],
  ["cached", "Cached"],
  ["answer", "Answer"],
  ["ttft", "First token"],
  ["ms", "Time"],
  ["workers", "Workers"],
];

const ID_CHARACTERS = 14; // the whole id is in the link's hint: long texts that are all unlike take time to draw
const TEXTS = COLUMNS.map(([name]) => name).filter((name) => name !== "state" && name !== "id");

/** The row of headings. */
export function requestHeads() {
  return el(
    "div.request-row.heads",
    { role: "row", "aria-rowindex": 1 },
    COLUMNS.map(([name, title]) => el(`div.cell.${name}`, { role: "columnheader" }, title)),
  );
}

/**
 * Makes rows for a VirtualList. While one scrolls, thirty rows may change in a frame: texts of a row are made once, and
 * hints when the pointer comes.
 *
 * @param {function(): number} now - the gateway's clock, in seconds since 1970
 * @param {function(): Map<string, string>} names - returns the short names of addresses; another map when they change
 */
export function requestRows(now, names) {
  let known = new WeakMap(); // texts by row
  let namesKnown = null; // those that these texts have
  const textsOf = (row) => {
    if (namesKnown !== names()) [known, namesKnown] = [new WeakMap(), names()];
    if (!known.has(row)) known.set(row, rowTexts(row, namesKnown));
    return known.get(row);
  };
  return () => {
    const cells = Object.fromEntries(COLUMNS.map(([name]) => [name, el(`div.cell.${name}`, { role: "cell" })]));
    const texts = Object.fromEntries(TEXTS.map((name) => [name, cells[name].appendChild(new Text())]));
    const state = badge("none", "");
    const link = el("a");
    cells.state.append(state.element);
    const linkText = link.appendChild(new Text());
    cells.id.append(link);
    let shown = null;
    let namesShown = null;
    const open = (event) => {
      if (!event.target.closest("a") && getSelection().isCollapsed) link.click();
    };
    const hint = () => showHints(cells, shown);
    const element = el("div.request-row", { role: "row", click: open, mouseenter: hint }, Object.values(cells));
    const show = (row) => {
      if (row.state === "in flight") texts.ms.data = `${duration(Math.max(0, now() - row.at) * 1000)} …`;
      if (row === shown && namesShown === names()) return;
      [shown, namesShown] = [row, names()];
      const wanted = textsOf(row);
      for (const name of TEXTS) if (wanted[name] !== undefined) texts[name].data = wanted[name];
      state.show(requestTone(row.state), requestWord(row));
      link.href = wanted.href;
      link.title = row.id;
      linkText.data = wanted.id;
    };
    return { element, link, show };
  };
}

function rowTexts(row, names) {
  const workers =
    workersOf(row)
      .map((address) => names.get(address) ?? address)
      .join(" → ") || NONE;
  return {
    at: clock(row.at),
    id: row.id.length > ID_CHARACTERS ? `${row.id.slice(0, ID_CHARACTERS)}…` : row.id,
    model: row.model ?? NONE,
    key: row.key ?? NONE,
    prompt: count(row.prompt),
    cached: count(row.cached),
    answer: count(row.generated),
    ttft: duration(row.ttft_ms),
    ms: row.state === "in flight" ? undefined : duration(row.ms), // of one in flight it grows
    workers: row.attempts > 1 ? `${workers} · ${row.attempts} attempts` : workers,
    href: requestHash(row.id, row.n),
  };
}

function workersOf(row) {
  return [row.workers?.prefill, row.workers?.decode].filter(Boolean);
}

function showHints(cells, row) {
  cells.at.title = dayAndTime(row.at);
  cells.state.title = row.error ?? row.finish ?? "";
  cells.workers.title = workersOf(row).join(" → ");
}
