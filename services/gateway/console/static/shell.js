/** What stands around every page: the name, the pages, the feed's state, the theme, the key. */

import { el, replace, setAll, setText } from "./dom.js";
import { span } from "./format.js";
import { badge } from "./states.js";
import { nextTheme, theme } from "./theme.js";

const FEED = {
  connecting: ["busy", "connecting"],
  live: ["good", "live"],
  stale: ["warn", "stale"],
  waiting: ["bad", "not connected"],
  key: ["none", "key wanted"],
};

/**
 * @param {Array<{name: string, title: string}>} pages
 * @param {function()} onKeyRemoved @param {function()} onRetry
 */
export function shell(pages, { onKeyRemoved, onRetry }) {
  const links = new Map(pages.map(({ name, title }) => [name, el("a", { href: `#/${name}` }, title)]));
  const feedBadge = badge("busy", "connecting");
  setAll(feedBadge.element, { role: "status", "aria-label": "Connection to the gateway" });
  const feedWords = el("span.feed-words.muted.small");
  const feed = el("p.feed", { tabindex: "-1" }, feedBadge.element, feedWords);
  const retry = el("button.quiet", { type: "button", hidden: true, click: onRetry }, "Try now");
  const removeKey = el("button.quiet", { type: "button", hidden: true, click: onKeyRemoved }, "Remove key");
  const items = [...links.values()].map((link) => el("li", link));
  replace(
    document.getElementById("head"),
    el(
      "div.head-inner",
      el(
        "a.brand",
        { href: "#/fleet", "aria-label": "Baton console, first page" },
        el("img", { src: "icon.svg", alt: "", width: 22, height: 22 }),
        el("span", "Baton"),
      ),
      el("nav", { "aria-label": "Pages" }, el("ul", items)),
      el("div.head-end", feed, retry, removeKey, themeButton()),
    ),
  );
  let state = { kind: "connecting" };
  const showClock = () => setText(feedWords, feedText(state));
  setInterval(showClock, 1000);
  return {
    showFeed(newState) {
      state = newState;
      feedBadge.show(...FEED[state.kind]);
      const isOver = state.kind !== "waiting";
      if (isOver && retry === document.activeElement) feed.focus(); // what hides loses the keyboard
      retry.hidden = isOver;
      showClock();
    },
    showKey(hasKey) {
      removeKey.hidden = !hasKey;
    },
    showAbout(about) {
      const names = about ? visiblePages(pages, about).map((page) => page.name) : [];
      for (const [name, link] of links) link.parentElement.hidden = about !== null && !names.includes(name);
      replace(document.getElementById("foot"), about ? aboutWords(about) : []);
    },
    showPage(name, title) {
      for (const [each, link] of links) setAll(link, { "aria-current": each === name ? "page" : null });
      document.title = `${title} · Baton console`;
    },
  };
}

/** The pages that a viewer may see: a tenant has no fleet. */
export function visiblePages(pages, about) {
  return pages.filter((page) => about.sees === "all" || !page.forAll);
}

function feedText(state) {
  const age = state.since ? span((Date.now() - state.since) / 1000) : null;
  if (state.kind === "stale") return age ? `last word ${age} ago` : "no word so far";
  if (state.kind !== "waiting") return "";
  const left = Math.max(0, state.retryAt - Date.now()) / 1000;
  return `${state.why}; ${age ? `what you see is ${age} old, ` : ""}next try in ${span(left)}`;
}

function themeButton() {
  const button = el("button.quiet", { type: "button" });
  const show = () => {
    setText(button, `Theme: ${theme()}`);
  };
  button.addEventListener("click", () => {
    nextTheme();
    show();
  });
  show();
  return button;
}

function aboutWords(about) {
  const sees = about.sees === "all" ? "sees everything" : "sees the requests of its own key alone";
  const who = about.key_id ? `Key ${about.key_id} ${sees}.` : "No key is asked for.";
  const process = about.gateway === undefined ? "" : ` · gateway ${about.gateway} · process ${about.pid}`;
  return [
    el("p", `Baton ${about.version}${process} · ${about.models.join(", ")}`),
    el("p", `${who} ${about.text ? "Texts of prompts are shown (--console-text)." : "No text of prompts is shown."}`),
  ];
}
