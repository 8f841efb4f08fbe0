/**
 * The console: begins here. One page is shown at a time, by the address after #.
 *
 * A page is a function of `{store, session, route}` that returns `{title, element, close}`. `close` ends its timers and
 * subscriptions.
 */

import { openCache } from "./cache.js";
import { el, replace } from "./dom.js";
import { Feed } from "./feed.js";
import { openFleet } from "./fleet.js";
import { keyForm } from "./key_form.js";
import { openLatency } from "./latency.js";
import { openPlayground } from "./playground.js";
import { openRequest } from "./request.js";
import { openRequests } from "./requests.js";
import { readHash } from "./router.js";
import { Session } from "./session.js";
import { shell, visiblePages } from "./shell.js";
import { Store } from "./store.js";

const PAGES = [
  { name: "fleet", title: "Fleet", open: openFleet, forAll: true },
  { name: "requests", title: "Requests", open: openRequests, openOne: openRequest },
  { name: "cache", title: "Cache", open: openCache },
  { name: "latency", title: "Latency", open: openLatency },
  { name: "playground", title: "Playground", open: openPlayground },
];

const session = new Session();
const store = new Store();
const main = document.getElementById("content");
const feed = new Feed(session, (event, data) => store.take(event, data), onFeed);
const frame = shell(PAGES, {
  onRetry: () => feed.start(),
  onKeyRemoved: () => {
    session.key = "";
    location.reload(); // nothing that the key showed stays in memory
  },
});
let shown = null; // the page
let shownAs = null; // its name and id
let wantsKey = false;

function onFeed(state) {
  frame.showFeed(state);
  if (state.kind === "live") wantsKey = false;
  if (state.kind === "key") askForKey(state.why);
}

function askForKey(why) {
  wantsKey = true;
  const taken = (key) => {
    wantsKey = false;
    session.key = key;
    frame.showKey(true);
    shownAs = null;
    showWaiting();
    main.focus(); // the form is gone, which had the keyboard
    feed.start();
  };
  show("", keyForm(session.key ? `The gateway does not take this key: ${why}` : why, taken));
  main.querySelector("input").focus();
}

function showWaiting() {
  const element = el("p.muted.waiting", { role: "status" }, "Waiting for the gateway's first word …");
  show("", { title: "Connecting", element, close: () => undefined });
}

function show(name, page) {
  shown?.close();
  shown = page;
  frame.showPage(name, page.title);
  replace(main, page.element);
}

/** Shows the page that the address names. anew: also where it is the one that is shown, with other filters. */
function showRoute(anew) {
  if (store.about === null || wantsKey) return;
  const pages = visiblePages(PAGES, store.about);
  const route = readHash(location.hash);
  const page = pages.find((each) => each.name === route.page) ?? pages[0];
  const one = route.id !== null && page.openOne !== undefined && route.page === page.name;
  const name = `${page.name}/${one ? `${route.id} ${route.query}` : ""}`;
  if (name === shownAs && !anew) return;
  const moved = shownAs !== null;
  shownAs = name;
  show(page.name, (one ? page.openOne : page.open)({ store, session, route }));
  if (moved) {
    scrollTo(0, 0);
    main.querySelector("h1")?.focus({ preventScroll: true });
  }
}

store.on("about", () => {
  frame.showAbout(store.about);
  showRoute(false);
});
addEventListener("hashchange", () => showRoute(true));
addEventListener("pagehide", () => feed.stop());
addEventListener("pageshow", (event) => event.persisted && feed.start());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address after # names the page
  main.focus();
});
frame.showAbout(null);
frame.showKey(session.key !== "");
showWaiting();
feed.start();
