/**
 * The page of requests: a live list, newest first. It stands still while the viewer has scrolled down, is in a row with
 * the keyboard, or has paused it, so that a row stays where it is read; a button says how many are new.
 */

import { el, setAll, setText } from "./dom.js";
import { counted, shortNames } from "./format.js";
import { filterForm, passing } from "./request_filters.js";
import { requestHeads, requestRows } from "./request_row.js";
import { keepQuery } from "./router.js";
import { VirtualList } from "./virtual_list.js";

/** See main.js. */
export function openRequests({ store, route }) {
  const list = new VirtualList(
    "Requests",
    requestHeads(),
    requestRows(
      () => store.now(),
      (address) => names.get(address) ?? address,
    ),
  );
  const form = filterForm(route.query, store.about.sees === "all", (wanted) => {
    keepQuery("requests", wanted);
    standing = null;
    show();
  });
  const pause = el("button", { type: "button", "aria-pressed": "false", click: () => setPaused(!paused) }, "Pause");
  const fresh = el("button.primary.fresh", { type: "button", hidden: true, click: showNewest });
  const empty = el("p.muted.empty", { role: "status" });
  const panel = el("div.panel.list", list.element, empty);
  let names = new Map();
  let paused = false;
  let standing = null; // numbers of the rows that a list which stands still has; null: it moves

  function setPaused(wanted) {
    paused = wanted;
    setAll(pause, { "aria-pressed": String(paused) });
    setText(pause, paused ? "Go on" : "Pause");
    if (!paused) standing = null;
    show();
  }

  function showNewest() {
    standing = null;
    list.toTop();
    if (paused) setPaused(false);
    else show();
  }

  function show() {
    const all = store.rows();
    const { models, keys } = form.offer(all);
    setAll(panel, { "data-models": models > 1 ? "differ" : "alike", "data-keys": keys > 1 ? "differ" : "alike" });
    names = shortNames(addresses(all));
    const rows = passing(all, form.wanted, store.now());
    standing = paused || !list.atTop || list.hasFocus ? (standing ?? new Set(rows.map((row) => row.n))) : null;
    const shown = standing === null ? rows : rows.filter((row) => standing.has(row.n));
    list.show(shown);
    form.showNumber(rows.length, all.length);
    fresh.hidden = rows.length === shown.length;
    setText(fresh, `${counted(rows.length - shown.length, "new request")}, show`);
    empty.hidden = rows.length > 0;
    setText(
      empty,
      all.length ? "No request passes these filters." : "No request so far. Those that come are shown here at once.",
    );
  }

  const element = el(
    "div.page.requests-page",
    el("div.page-head", el("h1", { tabindex: "-1" }, "Requests"), el("div.row", fresh, pause)),
    form.element,
    panel,
  );
  const ends = [store.on("rows", show), store.on("tick", show)];
  show();
  const close = () => {
    for (const end of ends) end();
    list.close();
  };
  return { title: "Requests", element, close };
}

function addresses(rows) {
  return [...new Set(rows.flatMap((row) => Object.values(row.workers ?? {})))];
}
