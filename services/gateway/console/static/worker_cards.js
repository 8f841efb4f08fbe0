/** Cards of workers: role, state and why, load, KV by tier, what it is. */

import { el, newId, setAll, setText, showList } from "./dom.js";
import { factList } from "./figures.js";
import { count, counted, percent, rate, span } from "./format.js";
import { badge, workerTone } from "./states.js";

/** The share of a worker's KV that is in use, over all tiers: 0 to 1. */
export function kvShare(worker) {
  const tiers = Object.values(worker.kv ?? {});
  const total = tiers.reduce((sum, tier) => sum + tier.total, 0);
  return total ? tiers.reduce((sum, tier) => sum + tier.used, 0) / total : 0;
}

/** The id of a worker's card. */
export function cardId(address) {
  return `worker-${address}`;
}

/** A view for `showList` of `{worker, now}`. */
export function workerCard() {
  const state = badge("none", "");
  const address = el("h3.address");
  const role = el("span.role");
  const why = el("span");
  const since = el("span");
  const facts = factList();
  const tiers = el("div.tiers");
  const element = el(
    "article.panel.card",
    { tabindex: "-1" },
    el("header.card-head", el("div", role, address), state.element),
    el("p.why", why, since),
    tiers,
    facts.element,
  );
  const update = ({ worker, now }) => {
    setAll(element, { id: cardId(worker.address), "data-tone": workerTone(worker.state), "data-role": worker.role });
    setText(role, worker.role ?? "worker");
    setText(address, worker.address);
    state.show(workerTone(worker.state), worker.state);
    setText(why, worker.why ?? "");
    setAll(why, { title: worker.detail });
    setText(since, [worker.why && ", ", worker.since && `${worker.state} for ${span(now - worker.since)}`].join(""));
    showList(tiers, Object.entries(worker.kv ?? {}), ([name]) => name, tierBar);
    facts.show(worker.role ? workerFacts(worker) : []);
  };
  return { element, update };
}

function workerFacts(worker) {
  const versions = [worker.protocol && `protocol ${worker.protocol}`, worker.kernels].filter(Boolean).join(", ");
  const isHere = worker.state !== "gone"; // else these are its last words
  return [
    isHere && [
      "Load",
      `${count(worker.running)} of ${count(worker.max_num_seqs)} running, ${count(worker.waiting)} waiting`,
    ],
    isHere && ["Tokens", `${rate(worker.tokens_per_s)}/s`],
    ["Context", `${count(worker.max_model_len)} tokens, blocks of ${count(worker.block_size)}`],
    ["Version", versions],
    ["Transports", (worker.transports ?? []).join(", ")],
    worker.restarted > 0 && ["Restarts", count(worker.restarted)],
  ].filter((fact) => fact && fact[1]);
}

function tierBar() {
  const id = newId("tier");
  const name = el("span", { id });
  const words = el("span.muted");
  const used = el("span.bar-part.used");
  const quarantined = el("span.bar-part.quarantined");
  const bar = el("div.bar", { role: "meter", "aria-labelledby": id, "aria-valuemin": 0 }, used, quarantined);
  const update = ([tier, { used: inUse, total, quarantined: kept }]) => {
    const share = total ? inUse / total : 0;
    setText(name, `KV, ${tier}`);
    const apart = kept ? `, ${count(kept)} in quarantine` : "";
    setText(words, `${percent(share)} of ${counted(total, "block")}${apart}`);
    setAll(bar, { "aria-valuemax": total, "aria-valuenow": inUse, "aria-valuetext": words.textContent });
    used.style.width = `${share * 100}%`;
    quarantined.style.width = `${total ? (kept / total) * 100 : 0}%`;
  };
  return { element: el("div.tier", el("div.tier-head", name, words), bar), update };
}
