/**
 * The times of one request's record, as spans to draw. Pure. All times are milliseconds after the request's arrival.
 *
 * The phases of a record follow one another and add up to the request's time, but for `handoff`, which lies within
 * `generate`. What of the time no phase covers, as in a request that failed before its first token, is a phase of its
 * own here, so that the sum always is the whole.
 */

const IN_ORDER = ["read", "tokenize", "wait", "lookup", "place", "wire", "queue", "prefill", "deliver", "generate"];
const WHERE = { queue: "computes", prefill: "computes", wire: "wire", generate: "generates" };
const LEAST_MS = 0.005; // records are rounded to a thousandth

/**
 * @param {Object} record - what /console/requests/ID has
 * @returns {{phases: Array<{name, ms, begin}>, sum: number, total: number}} phases lie end to end
 */
export function phaseSpans(record) {
  const total = record.duration_ms;
  const phases = [];
  let end = 0;
  for (const name of IN_ORDER) {
    const ms = record.phases_ms[name];
    if (ms === undefined) continue;
    phases.push({ name, ms, begin: end });
    end += ms;
  }
  if (total - end > LEAST_MS * IN_ORDER.length) {
    phases.push({ name: "rest", ms: total - end, begin: end });
    end = total;
  }
  return { phases, sum: end, total };
}

/** Where a phase is spent: "gateway", "wire", "prefill" or "decode". */
export function placeOf(name, record) {
  const roles = rolesOf(record);
  const computes = roles.includes("prefill") ? "prefill" : "decode";
  const generates = roles.includes("decode") ? "decode" : "prefill";
  return { computes, generates, wire: "wire" }[WHERE[name]] ?? (name === "rest" ? "rest" : "gateway");
}

/** The roles of the workers that brought the first token, by the attempts where the record does not name workers. */
function rolesOf({ workers, attempts }) {
  if (workers !== undefined) return Object.keys(workers ?? {});
  const [first] = attempts
    .filter((attempt) => attempt.at_ms.first_token !== null)
    .toSorted((a, b) => a.at_ms.first_token - b.at_ms.first_token);
  return first?.workers.map(({ role }) => role) ?? [];
}

/**
 * Lanes below that of the phases: the gateway, and each attempt at each of its workers.
 *
 * @returns {Array<{name: string, place: string, spans: Array<{name, begin, end}>}>}
 */
export function lanes(record) {
  return [gatewayLane(record), ...record.attempts.flatMap((attempt) => attemptLanes(attempt, record))];
}

function gatewayLane({ at_ms: at, attempts, duration_ms: total }) {
  const spans = [];
  add(spans, "read", 0, at.parsed);
  add(spans, "tokenize", at.parsed, at.tokenized);
  let since = at.tokenized;
  for (const { at_ms: attempt } of attempts) {
    add(spans, "wait", since, attempt.look_up_began);
    add(spans, "lookup", attempt.look_up_began, attempt.looked_up);
    add(spans, "place", attempt.looked_up, attempt.sent);
    since = null; // from here on a worker has it; further waits are between attempts
  }
  const first = attempts
    .map((attempt) => attempt.at_ms.first_token)
    .filter((ms) => ms !== null)
    .sort((a, b) => a - b)[0];
  add(spans, "deliver", first, at.first_token);
  add(spans, "stream to the client", at.first_token, at.ended ?? total);
  return { name: "gateway", place: "gateway", spans };
}

function attemptLanes(attempt, record) {
  const ended = Math.max(...attempt.ends.map((end) => end.at_ms), 0) || record.at_ms.ended || record.duration_ms;
  return attempt.workers.map((worker) => ({
    name: `${worker.role} ${worker.worker ?? "worker"}${record.attempts.length > 1 ? `, attempt ${attempt.number}` : ""}`,
    place: worker.role,
    failed: Boolean(attempt.failure),
    spans: workerSpans(worker, attempt, ended),
  }));
}

function workerSpans({ role, at_ms: at }, attempt, ended) {
  const spans = [];
  const alone = attempt.workers.length === 1;
  if (at === null) {
    // Its words have not come, or never came: only what the gateway saw is known.
    add(spans, "sent, no word of its times", attempt.at_ms.sent, attempt.at_ms.first_token ?? ended);
    return spans;
  }
  add(spans, "way there", attempt.at_ms.sent, at.received);
  let since = at.received;
  const computes = alone || role === "prefill";
  for (const [name, until] of [
    ["wait for blocks", at.announced],
    ["queue", at.admitted],
    ["read KV", at.ready],
    [computes ? "prefill" : "join", at.sent],
  ]) {
    if (until === null || until === undefined) continue;
    add(spans, name, since, until);
    since = until;
  }
  if (alone || role === "decode") add(spans, "generate", since, ended);
  return spans;
}

function add(spans, name, begin, end) {
  if (typeof begin === "number" && typeof end === "number" && end >= begin) spans.push({ name, begin, end });
}

/** Round times for an axis up to `until`: at most `most` of them. */
export function axisTicks(until, most) {
  const rough = until / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-6)));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(until / step) + 1 }, (_, index) => index * step);
}
