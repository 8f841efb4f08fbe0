/** The attempts at one request: where each went and why, what it found cached, what moved, and every candidate. */

import { dataTable, tableRow } from "./data_table.js";
import { el } from "./dom.js";
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

/** All attempts of a record, for `showParts`. */
export function attemptParts(record) {
  const { length } = record.attempts;
  const parts = record.attempts.map((attempt) => ({
    of: [attempt, length],
    make: () => attemptSection(attempt, length),
  }));
  const more = record.num_attempts - length;
  const words = `${more} further attempts were made whose records are not kept.`;
  return more > 0 ? [...parts, { of: more, make: () => el("p.muted", words) }] : parts;
}

function attemptSection(attempt, of) {
  const ends = attempt.ends.map((end) => end.reason);
  const failed = Boolean(attempt.failure) || ends.some((reason) => reason !== "finished");
  const word = attempt.failure
    ? "failed"
    : ends.length
      ? [...new Set(ends)].join(", ").replaceAll("_", " ")
      : "under way";
  const state = badge(ends.length === 0 ? "busy" : failed ? "bad" : "good", word);
  const handoff = attempt.workers.length > 1;
  return el(
    "section.panel.attempt",
    { "data-attempt": attempt.number },
    el(
      "header.card-head",
      el("h3", of > 1 ? `Attempt ${attempt.number}: ` : "", handoff ? "a handoff" : "one worker alone"),
      state.element,
    ),
    attempt.failure && el("p.why", attempt.failure),
    attempt.why && el("p", planWords(attempt)),
    workerTable(attempt),
    candidateTable(attempt),
  );
}

function planWords({ why, expected_s: expected }) {
  const times = [
    ["a pair", expected?.pair],
    ["a decode worker alone", expected?.alone],
  ]
    .filter(([, seconds]) => typeof seconds === "number")
    .map(([what, seconds]) => `${what} ${duration(seconds * 1000)}`);
  return `Why: ${WHY[why] ?? why}.${times.length ? ` Expected: ${times.join(", ")}.` : ""}`;
}

function workerTable(attempt) {
  const named = attempt.workers.some((worker) => worker.worker !== undefined); // or this key may not know which
  const heads = [
    "Role",
    ...(named ? ["Worker"] : []),
    "#Cached, predicted",
    "#Cached, found",
    "#KV read",
    "#Reading",
    "#On the wire",
    ...(named ? ["Transport"] : []),
  ];
  const rows = attempt.workers.map((worker) =>
    tableRow(heads, [
      worker.role,
      ...(named ? [worker.worker] : []),
      count(worker.cached_tokens.predicted),
      count(worker.cached_tokens.found),
      worker.kv_bytes ? bytes(worker.kv_bytes) : NONE,
      worker.reading_ms ? duration(worker.reading_ms) : NONE,
      duration(worker.wire_ms),
      ...(named ? [[worker.transport, worker.why_transport].filter(Boolean).join(": ") || NONE] : []),
    ]),
  );
  return dataTable("Its workers.", heads, rows, { shown: true }).element;
}

function candidateTable({ candidates }) {
  if (!candidates) return null;
  const heads = ["Role", "Worker", "#Cost", "#Cached tokens", "#Queued tokens", "#Sequences", "Verdict"];
  const chosen = (candidate) => candidate.verdict === "chosen";
  const sorted = candidates.toSorted((a, b) => Number(chosen(b)) - Number(chosen(a)) || a.cost - b.cost);
  const rows = sorted.map((each) => {
    const figures = [each.cost, each.cached_tokens, each.queued_tokens, each.sequences].map(count);
    const verdict = chosen(each) ? badge("good", "chosen").element : each.verdict;
    return tableRow(heads, [each.role, each.worker, ...figures, verdict], {
      "data-verdict": chosen(each) ? "chosen" : "lost",
    });
  });
  const title =
    "Every candidate. A cost is the prompt tokens to compute or fetch, those queued before, and 16 for each sequence.";
  return dataTable(title, heads, rows, { shown: true }).element;
}
