/** The attempts at one request: where each went and why, what it found cached, what moved, every candidate with its cost. */

import { el, newId } from "./dom.js";
import { bytes, count, duration, NONE } from "./format.js";
import { badge } from "./states.js";

const WHY = {
  forced: "the policy leaves no choice",
  "no pair": "there is no prefill worker, or none that can pair",
  "one token": "one token is wanted: nothing would be left to do after a handoff",
  embedding: "no token is to be generated",
  cached: "all but a block is in the decode worker's cache",
  threshold: "the policy's own threshold",
  trial: "tried, to learn what this plan costs",
  sooner: "it was expected sooner: less waiting, its own and others'",
  suspect: "it may be what ends workers, and is computed apart",
};

/** All attempts of a record. */
export function attemptSections(record) {
  const more = record.num_attempts - record.attempts.length;
  return [
    ...record.attempts.map((attempt) => attemptSection(attempt, record.attempts.length)),
    more > 0 && el("p.muted", {}, `${more} further attempts were made whose records are not kept.`),
  ].filter(Boolean);
}

function attemptSection(attempt, of) {
  const ends = attempt.ends.map((end) => end.reason);
  const failed = Boolean(attempt.failure) || ends.some((reason) => reason !== "finished");
  const word = attempt.failure ? "failed" : ends.length ? [...new Set(ends)].join(", ").replaceAll("_", " ") : "under way";
  const state = badge(ends.length === 0 ? "busy" : failed ? "bad" : "good", word);
  const handoff = attempt.workers.length > 1;
  return el("section.panel.attempt", { "data-attempt": attempt.number },
    el("header.card-head", {}, el("h3", {}, of > 1 ? `Attempt ${attempt.number}: ` : "", handoff ? "a handoff" : "one worker alone"), state.element),
    attempt.failure && el("p.why", {}, attempt.failure),
    attempt.why && el("p", {}, planWords(attempt)),
    workerTable(attempt),
    candidateTable(attempt));
}

function planWords({ why, expected_s: expected }) {
  const times = [["a pair", expected?.pair], ["a decode worker alone", expected?.alone]]
    .filter(([, seconds]) => typeof seconds === "number").map(([what, seconds]) => `${what} ${duration(seconds * 1000)}`);
  return `Why: ${WHY[why] ?? why}.${times.length ? ` Expected: ${times.join(", ")}.` : ""}`;
}

function workerTable(attempt) {
  const rows = attempt.workers.map((worker) => el("tr", {},
    el("th", { scope: "row" }, worker.role), el("td", {}, worker.worker),
    el("td.number", {}, count(worker.cached_tokens.predicted)), el("td.number", {}, count(worker.cached_tokens.found)),
    el("td.number", {}, worker.kv_bytes ? bytes(worker.kv_bytes) : NONE),
    el("td", { title: worker.why_transport ?? "" }, worker.transport ?? NONE),
    el("td.number", {}, worker.reading_ms ? duration(worker.reading_ms) : NONE),
    el("td.number", {}, duration(worker.wire_ms))));
  return table("Its workers.",
    ["Role", "Worker", "Cached, predicted|n", "Cached, found|n", "KV read|n", "Transport", "Reading|n", "On the wire|n"], rows);
}

function candidateTable({ candidates }) {
  if (!candidates) return null;
  const sorted = candidates.toSorted((a, b) => Number(b.verdict === "chosen") - Number(a.verdict === "chosen") || a.cost - b.cost);
  const rows = sorted.map((each) => el("tr", { "data-verdict": each.verdict === "chosen" ? "chosen" : "lost" },
    el("th", { scope: "row" }, each.role), el("td", {}, each.worker), el("td.number", {}, count(each.cost)),
    el("td.number", {}, count(each.cached_tokens)), el("td.number", {}, count(each.queued_tokens)),
    el("td.number", {}, count(each.sequences)), el("td", {}, each.verdict === "chosen" ? badge("good", "chosen").element : each.verdict)));
  return table("Every candidate. A cost is the prompt tokens to compute or fetch, those queued before, and 16 for each sequence.",
    ["Role", "Worker", "Cost|n", "Cached tokens|n", "Queued tokens|n", "Sequences|n", "Verdict"], rows);
}

/** A table with its title; a heading that ends with "|n" is one of numbers. */
function table(title, heads, rows) {
  const id = newId("table");
  const cells = heads.map((head) => el(head.endsWith("|n") ? "th.number" : "th", { scope: "col" }, head.replace("|n", "")));
  return [
    el("p.muted.small", { id }, title),
    el("div.scroll-x", { tabindex: "0", role: "region", "aria-labelledby": id },
      el("table", { "aria-labelledby": id }, el("thead", {}, el("tr", {}, cells)), el("tbody", {}, rows))),
  ];
}
