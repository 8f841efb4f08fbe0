/** Parts of the fleet's page beside workers: what is unhealthy, the gateway and Redis, events. */

import { el, setText, showList } from "./dom.js";
import { factList } from "./figures.js";
import { bytes, clock, count, counted, dayAndTime, duration, percent, span } from "./format.js";
import { badge, shape } from "./states.js";

const MOST_EVENTS = 50; // that are shown
const EVENT_TONES = {
  worker_up: "good",
  redis_up: "good",
  worker_gone: "bad",
  worker_refused: "bad",
  handoff_failed: "bad",
  redis_down: "bad",
  draining: "warn",
  gateway_draining: "warn",
  link_avoided: "warn",
};

/** What is unhealthy, or the word that nothing is; `show(unhealthy, now)`. */
export function unhealthyList() {
  const fine = el("p.fine", shape("good"), " Everything is healthy.");
  const list = el("ul.unhealthy");
  const element = el("div", { role: "status", "aria-live": "polite", "aria-label": "Health" }, fine, list);
  const entry = () => {
    const words = el("span");
    const why = el("span.muted");
    const since = el("span.muted.since", { "aria-hidden": "true" }); // it changes each second: not to be read aloud
    const update = ({ problem, now }) => {
      setText(words, `${problem.what} ${problem.name ?? ""}`.trim());
      setText(why, problem.why ?? "");
      setText(since, problem.since ? `for ${span(now - problem.since)}` : "");
    };
    return { element: el("li", shape("bad"), words, why, since), update };
  };
  const show = (unhealthy, now) => {
    fine.hidden = unhealthy.length > 0;
    list.hidden = unhealthy.length === 0;
    const number = (problem, index) => unhealthy.slice(0, index).filter((other) => isSame(other, problem)).length;
    const items = unhealthy.map((problem, index) => ({ problem, now, number: number(problem, index) }));
    showList(list, items, (item) => `${item.problem.what} ${item.problem.name} ${item.number}`, entry);
  };
  return { element, show };
}

function isSame(one, other) {
  return one.what === other.what && one.name === other.name;
}

/** The card of the gateway that this page speaks to; `show(tick)`. */
export function gatewayCard() {
  const state = badge("good", "ok");
  const facts = factList();
  const name = el("h3.address");
  const element = el(
    "article.panel.card",
    { "data-card": "gateway" },
    el("header.card-head", el("div", el("span.role", "gateway"), name), state.element),
    facts.element,
  );
  let before = null;
  const show = ({ gateway, gateways, now }) => {
    setText(name, gateway.id);
    state.show(gateway.draining ? "warn" : "good", gateway.draining ? "draining" : "ok");
    const goesOn = before !== null && now > before.now && before.gateway.id === gateway.id;
    const cpu = goesOn ? (gateway.cpu_s - before.gateway.cpu_s) / (now - before.now) : null;
    before = { gateway, now };
    facts.show([
      ["Requests", `${count(gateway.in_flight)} in flight, ${count(gateway.waiting)} waiting for a worker`],
      ["Processor", `${percent(cpu)} of a core, its loop paused ${duration(gateway.loop_pause_ms)} at most`],
      ["Memory", bytes(gateway.rss_bytes)],
      ["Up", span(gateway.uptime_s)],
      ["Version", `${gateway.version}, protocol ${gateway.protocol}, process ${gateway.pid}`],
      gateways?.known > 1 && ["Gateways", `${counted(gateways.known, "gateway")} known, this one among them`],
    ]);
  };
  return { element, show };
}

/** The card of Redis; `show(redis)`. */
export function redisCard() {
  const state = badge("none", "");
  const why = el("p.why");
  const element = el(
    "article.panel.card",
    { "data-card": "redis" },
    el("header.card-head", el("div", el("span.role", "store"), el("h3.address", "Redis")), state.element),
    why,
  );
  const words = {
    ok: "It has the registry of workers, the prefix index and kept responses.",
    none: "None is configured: the gateway was given the workers' addresses, and they tell it what they cache.",
    down: "Requests go on; prefixes are found less often.",
  };
  const show = (redis) => {
    state.show({ ok: "good", down: "bad" }[redis.state] ?? "none", redis.state);
    setText(why, [redis.why, words[redis.state]].filter(Boolean).join(". "));
  };
  return { element, show };
}

/** Fleet events, newest first; `show(events)`. */
export function eventList() {
  const none = el("p.muted", "Nothing so far.");
  const list = el("ol.events");
  const entry = (event) => {
    const time = el(
      "time",
      { datetime: new Date(event.at * 1000).toISOString(), title: dayAndTime(event.at) },
      clock(event.at),
    );
    const kind = badge(EVENT_TONES[event.kind] ?? "none", event.kind.replaceAll("_", " "));
    const text = el("span", [event.name, event.text].filter(Boolean).join(": "));
    return { element: el("li", time, kind.element, text), update: () => undefined };
  };
  const show = (events) => {
    none.hidden = events.length > 0;
    const newest = events.toSorted((a, b) => b.at - a.at).slice(0, MOST_EVENTS);
    showList(list, newest, (event) => `${event.at} ${event.kind} ${event.name} ${event.text}`, entry);
  };
  return { element: el("div", none, list), show };
}
