/**
 * States as a badge: a shape, a colour and a word, so that none of them carries the meaning alone.
 *
 *   good  circle     all is well
 *   busy  half       something is under way
 *   warn  triangle   it works, and somebody should know
 *   bad   cross      it does not work
 *   none  ring       nothing is known, or nothing is there
 */

import { el, setText, svg } from "./dom.js";

const SHAPES = {
  good: "M6 1a5 5 0 1 0 0 10A5 5 0 0 0 6 1Z",
  busy: "M6 1a5 5 0 1 0 0 10A5 5 0 0 0 6 1Zm0 1.6v6.8a3.4 3.4 0 0 1 0-6.8Z",
  warn: "M6 1 11.5 11H.5Z",
  bad: "M2.6 1 6 4.4 9.4 1 11 2.6 7.6 6 11 9.4 9.4 11 6 7.6 2.6 11 1 9.4 4.4 6 1 2.6Z",
  none: "M6 1a5 5 0 1 0 0 10A5 5 0 0 0 6 1Zm0 1.6a3.4 3.4 0 1 1 0 6.8 3.4 3.4 0 0 1 0-6.8Z",
};
const WORKER_TONES = { ok: "good", draining: "warn", connecting: "busy", gone: "bad", refused: "bad" };
const REQUEST_TONES = { done: "good", failed: "bad", "in flight": "busy" };

/** A shape alone, for people who see it; others get the word beside it. */
export function shape(tone) {
  const path = svg("path", { d: SHAPES[tone] ?? SHAPES.none, "fill-rule": "evenodd" });
  return svg("svg.shape", { viewBox: "0 0 12 12", "aria-hidden": "true" }, path);
}

/** A badge whose `show(tone, word)` changes it. */
export function badge(tone, word) {
  const text = el("span", word);
  const element = el("span.badge", { "data-tone": tone }, shape(tone), text);
  const show = (newTone, newWord) => {
    setText(text, newWord);
    if (element.dataset.tone === newTone) return;
    element.dataset.tone = newTone;
    element.replaceChild(shape(newTone), element.firstChild);
  };
  return { element, show };
}

/** The tone of a worker's state. */
export function workerTone(state) {
  return WORKER_TONES[state] ?? "none";
}

/** The tone of a request's state. */
export function requestTone(state) {
  return REQUEST_TONES[state] ?? "none";
}

/** A request's state in words: the phase while it is in flight, and the status it ended with. */
export function requestWord(row) {
  if (row.state === "in flight") return row.phase ?? "in flight";
  if (row.state === "done") return "done";
  return row.status ? `failed ${row.status}` : "failed";
}
