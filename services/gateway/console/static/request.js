/** The page of one request: what became of it, its time, its attempts. Asked for again while it is in flight. */

import { attemptParts } from "./attempts.js";
import { el, replace, showParts } from "./dom.js";
import { figureRow } from "./figures.js";
import { bytes, count, dayAndTime, duration, NONE, rate } from "./format.js";
import { failureWords, KeyWanted, Refused } from "./session.js";
import { servedWords } from "./served.js";
import { badge, requestTone, requestWord } from "./states.js";
import { Timeline } from "./timeline.js";

const AGAIN_MS = 1000;
const LEFT = [499, "CANCELLED"]; // the status, HTTP's or gRPC's, of a request whose client left

/** See main.js. */
export function openRequest({ store, session, route }) {
  const { id, query } = route;
  const number = query.get("n");
  const path = `requests/${encodeURIComponent(id)}${number === null ? "" : `?n=${encodeURIComponent(number)}`}`;
  const state = badge("none", "…");
  const told = el("p.told");
  const facts = figureRow();
  const attempts = el("div.attempts");
  const timeline = new Timeline();
  const texts = el("div.attempts");
  const trouble = el("p.why", { role: "status", hidden: true });
  const figures = el("div", { hidden: true }, facts.element);
  const body = el(
    "div",
    { hidden: true },
    el(
      "section",
      { "aria-labelledby": "time-head" },
      el("h2", { id: "time-head" }, "Where its time went"),
      timeline.element,
    ),
    el("section", { "aria-labelledby": "attempts-head" }, el("h2", { id: "attempts-head" }, "Attempts"), attempts),
    texts,
  );
  const element = el(
    "div.page.request-page",
    el("p", el("a", { href: "#/requests" }, "All requests")),
    el("div.page-head", el("h1.id", { tabindex: "-1" }, id), state.element),
    told,
    trouble,
    figures,
    body,
  );
  const abort = new AbortController();
  let timer = null;

  async function load() {
    try {
      show(await session.json(path, abort.signal));
    } catch (error) {
      if (abort.signal.aborted) return;
      trouble.hidden = false;
      replace(trouble, error instanceof KeyWanted ? `This key may not see it: ${error.message}` : failureWords(error));
      if (error instanceof Refused && error.status === 404)
        showRow(store.rows().find((row) => row.id === id && (number === null || String(row.n) === number)));
      if (error instanceof TypeError) timer = setTimeout(load, 3 * AGAIN_MS);
    }
  }

  /** Shows what the list knows of a request whose record is not kept any more. */
  function showRow(row) {
    if (row === undefined) return;
    state.show(requestTone(row.state), requestWord(row));
    const words = "Its record is not kept any more; the list of requests still has this of it.";
    replace(told, `${row.endpoint}, arrived ${dayAndTime(row.at)}. ${servedWords(row)} ${words}`);
    trouble.hidden = true;
    figures.hidden = false;
    facts.show(rowFigures(row));
  }

  function show(record) {
    trouble.hidden = true;
    body.hidden = figures.hidden = false;
    const kind = stateOf(record);
    state.show(requestTone(kind), kind);
    replace(told, toldWords(record));
    facts.show(recordFigures(record));
    timeline.update(record);
    showParts(attempts, attemptParts(record));
    showParts(texts, textParts(record.text));
    if (record.in_flight) timer = setTimeout(load, AGAIN_MS);
  }

  load();
  const close = () => {
    abort.abort();
    clearTimeout(timer);
    timeline.close();
  };
  return { title: `Request ${id}`, element, close };
}

/** Done is what ended with 200 or gRPC's OK, and without an error; and what its client left, as in the list. */
function stateOf(record) {
  if (record.in_flight) return "in flight";
  if (LEFT.includes(record.status)) return "done";
  return record.error === null && (record.status === 200 || record.status === "OK") ? "done" : "failed";
}

function toldWords(record) {
  const key = record.key_id ? ` with key ${record.key_id}` : "";
  const asked = `${record.endpoint} of ${record.model ?? "the model"}${key}`;
  const when = `${asked}, arrived ${dayAndTime(record.arrived_at)}. ${servedWords(record)}`;
  if (record.in_flight) return `${when} The client is being answered.`;
  if (LEFT.includes(record.status)) return `${when} The client left before the end.`;
  const error = record.error ? `, error ${record.error}` : "";
  const finish = record.finish_reason ? `, finish reason ${record.finish_reason}` : "";
  return `${when} The client was told: status ${record.status ?? NONE}${error}${finish}.`;
}

/** Prompt and answers, which a gateway keeps with --console-text alone. */
function textParts(text) {
  if (!text) return [];
  const part = (title, words) => ({
    of: [title, words],
    make: () => el("section", el("h2", title), el("pre.panel", { tabindex: "0" }, words)),
  });
  const answers = text.answers.map((answer, index) =>
    part(text.answers.length > 1 ? `Answer ${index + 1}` : "Answer", answer),
  );
  const cut = text.cut ? [{ of: "cut", make: () => el("p.muted", "Longer texts are cut.") }] : [];
  return [part("Prompt", text.prompt), ...answers, ...cut];
}

function recordFigures(record) {
  const moved = record.attempts
    .flatMap((attempt) => attempt.workers)
    .reduce((sum, worker) => sum + (worker.kv_bytes ?? 0), 0);
  const generating = record.ttft_ms === null ? 0 : record.duration_ms - record.ttft_ms;
  const perSecond =
    record.generated_tokens > 1 && generating > 0 ? ((record.generated_tokens - 1) * 1000) / generating : null;
  return [
    ["Time", duration(record.duration_ms)],
    ["First token", duration(record.ttft_ms)],
    ["Tokens/s after it", rate(perSecond)],
    ["Prompt tokens", count(record.prompt_tokens)],
    ["Of them cached", count(record.cached_tokens)],
    ["Generated tokens", count(record.generated_tokens)],
    ["KV moved", moved ? bytes(moved) : NONE],
  ];
}

function rowFigures(row) {
  return [
    ["Time", duration(row.ms)],
    ["First token", duration(row.ttft_ms)],
    ["Prompt tokens", count(row.prompt)],
    ["Of them cached", count(row.cached)],
    ["Generated tokens", count(row.generated)],
    ["Attempts", count(row.attempts)],
    row.finish && ["Finish reason", row.finish],
    row.error && ["Error", row.error],
  ];
}
