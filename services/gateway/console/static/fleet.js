/** The page of the fleet: what is unhealthy, handoffs between workers, every worker, the gateway, Redis, events. */

import { el, setText, showList } from "./dom.js";
import { figureRow } from "./figures.js";
import { bytes, count, rate } from "./format.js";
import { eventList, gatewayCard, redisCard, unhealthyList } from "./fleet_parts.js";
import { linkTable } from "./link_table.js";
import { LinksDrawing } from "./links_drawing.js";
import { movedRates } from "./moved.js";
import { cardId, workerCard } from "./worker_cards.js";

const ABOUT_HANDOFFS =
  "A prefill worker reads a prompt and writes its KV cache, the model's memory of it. A handoff moves this KV to a " +
  "decode worker, which generates the answer from there. A dot is a handoff that was completed in the last second";
const ORDER = { gone: 0, refused: 1, connecting: 2, draining: 3, ok: 4 };

/** See main.js. */
export function openFleet({ store }) {
  const unhealthy = unhealthyList();
  const figures = figureRow();
  const drawing = new LinksDrawing((address) => document.getElementById(cardId(address))?.focus());
  const scale = el("span");
  const links = linkTable();
  const gateway = gatewayCard();
  const redis = redisCard();
  const events = eventList();
  const prefill = workerGroup("Prefill workers", "They read prompts and write their KV.");
  const decode = workerGroup(
    "Decode workers",
    "They generate answers, over KV that was handed to them or that they computed.",
  );
  const unknown = workerGroup("Workers that never connected", "Their role is not known.");
  const element = el(
    "div.page",
    el("h1", { tabindex: "-1" }, "Fleet"),
    el("section", { "aria-label": "Health" }, unhealthy.element),
    figures.element,
    el(
      "section",
      { "aria-labelledby": "handoffs-head" },
      el("h2", { id: "handoffs-head" }, "Handoffs"),
      el(
        "figure.panel",
        drawing.element,
        el(
          "figcaption.small.muted",
          ABOUT_HANDOFFS,
          scale,
          "; the larger, the more KV it moved. A cross is one that failed. The bar in a worker is its KV in use.",
        ),
      ),
      links.element,
    ),
    prefill.element,
    decode.element,
    unknown.element,
    el(
      "section",
      { "aria-labelledby": "around-head" },
      el("h2", { id: "around-head" }, "Gateway and Redis"),
      el("div.cards", gateway.element, redis.element),
    ),
    el(
      "section",
      { "aria-labelledby": "events-head" },
      el("h2", { id: "events-head" }, "What happened"),
      events.element,
    ),
  );

  const showTick = () => {
    const { tick, moved } = store;
    if (tick === null) return;
    unhealthy.show(tick.unhealthy, tick.now);
    figures.show(fleetFigures(tick, moved));
    drawing.update(tick, moved);
    const perDot = drawing.handoffsPerDot;
    setText(scale, perDot > 1 ? `, now one dot for ${count(perDot)} handoffs` : "");
    links.show(tick.links, moved);
    prefill.show(
      tick.workers.filter((worker) => worker.role === "prefill"),
      tick.now,
    );
    decode.show(
      tick.workers.filter((worker) => worker.role === "decode"),
      tick.now,
    );
    const strangers = tick.workers.filter((worker) => worker.role === undefined);
    unknown.show(strangers, tick.now);
    unknown.element.hidden = strangers.length === 0;
    gateway.show(tick);
    redis.show(tick.redis);
  };
  const ends = [store.on("tick", showTick), store.on("events", () => events.show(store.events))];
  events.show(store.events);
  showTick();
  const close = () => {
    for (const end of ends) end();
    drawing.close();
  };
  return { title: "Fleet", element, close };
}

function workerGroup(title, words) {
  const id = title.toLowerCase().replaceAll(" ", "-");
  const cards = el("div.cards");
  const about = el("p.muted");
  const element = el("section", { "aria-labelledby": id }, el("h2", { id }, title), about, cards);
  const show = (workers, now) => {
    setText(about, workers.length ? words : "None is known.");
    const sorted = workers.toSorted(
      (a, b) => ORDER[a.state] - ORDER[b.state] || a.address.localeCompare(b.address, undefined, { numeric: true }),
    );
    showList(
      cards,
      sorted.map((worker) => ({ worker, now })),
      ({ worker }) => worker.address,
      workerCard,
    );
  };
  return { element, show };
}

function fleetFigures({ gateway, workers }, moved) {
  const rates = movedRates(moved);
  const live = workers.filter((worker) => worker.state === "ok").length;
  const tokens = workers.reduce((sum, worker) => sum + (worker.tokens_per_s ?? 0), 0);
  return [
    ["Requests in flight", count(gateway.in_flight)],
    ["Waiting for a worker", count(gateway.waiting)],
    ["Tokens/s", rate(tokens)],
    ["Handoffs/s", rate(rates.handoffs)],
    ["KV moved/s", bytes(rates.bytes)],
    ["Workers ok", `${count(live)} of ${count(workers.length)}`],
  ];
}
