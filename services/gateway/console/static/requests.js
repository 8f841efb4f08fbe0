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
      () => names,
    ),
  );
  const form = filterForm(route.query, store.about.sees === "all", (wanted) => {
    keepQuery("requests", wanted);
    standing = null;
    show();
  });
  const pause = el("button", { type: "button", click: () => setPaused(!paused) }, "Pause");
  const fresh = el("button.primary.fresh", { type: "button", hidden: true, click: showNewest });
  const empty = el("p.muted.empty", { role: "status" });
  const panel = el("div.panel.list", list.element, empty);
  let names = new Map(); // short ones of addresses: another map when they change
  let paused = false;
  let standing = null; // numbers of the rows of a list that stands still, whatever becomes of them; null: it moves

  function setPaused(wanted) {
    paused = wanted;
    setText(pause, paused ? "Go on" : "Pause");
    if (!paused) standing = null;
    show();
  }

  function showNewest() {
    standing = null;
    list.focus();
    list.toTop();
    if (paused) setPaused(false);
    else show();
  }

  /** False from a hello to the first tick: numbers begin anew with a gateway, and older rows are still to come. */
  function standsStill() {
    return store.tick !== null && (paused || !list.atTop || list.hasFocus);
  }

  function show() {
    const all = store.rows();
    const { models, keys } = form.offer(all);
    setAll(panel, { "data-models": models > 1 ? "differ" : "alike", "data-keys": keys > 1 ? "differ" : "alike" });
    names = renewed(names, addresses(all));
    const rows = passing(all, form.wanted, store.now());
    standing = standsStill() ? (standing ?? new Set(rows.map((row) => row.n))) : null;
    const shown = standing === null ? rows : all.filter((row) => standing.has(row.n));
    list.show(shown);
    form.showNumber(rows.length, all.length);
    const numNew = standing === null ? 0 : rows.filter((row) => !standing.has(row.n)).length;
    if (numNew === 0 && fresh === document.activeElement) list.focus(); // what hides loses the keyboard
    fresh.hidden = numNew === 0;
    setText(fresh, `${counted(numNew, "new request")}, show`);
    empty.hidden = rows.length > 0 || shown.length > 0;
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

/** The short names of addresses: the same map while the addresses are the same. */
function renewed(names, found) {
  return found.length === names.size && found.every((address) => names.has(address)) ? names : shortNames(found);
}
