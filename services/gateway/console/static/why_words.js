/** Why a worker is not connected, in words: what gRPC says of it is for who reads its source. Pure. */

const STATUS = /^(?:it ended the stream \()?([A-Z][A-Z_]+): /;
/** What is found in gRPC's text, the most telling first, and what it means. */
const MEANINGS = [
  [/connection refused/i, "nothing listens at its address"],
  [/socket closed|connection reset|broken pipe|connection aborted|goaway|end of tcp stream/i, "its connection broke"],
  [/ping|keepalive/i, "it answers no ping"],
  [/dns|name resolution|name or service|nodename/i, "its name leads to no address"],
  [/handshake|certificate|ssl/i, "it and the gateway do not agree on TLS"],
  [/no route|unreachable/i, "no way leads to its host"],
  [/timed out|timeout|^DEADLINE_EXCEEDED/i, "it does not answer in time"],
  [/^it ended the stream/, "it ended the stream"],
  [/^UNAVAILABLE/, "it cannot be reached"],
];

/** @param {string|null} why - as a tick or an event has it. Words that are not gRPC's, which name a status, stay. */
export function whyWords(why) {
  if (!why) return "";
  if (!STATUS.test(why)) return why;
  return MEANINGS.find(([found]) => found.test(why))?.[1] ?? why.replace(STATUS, "");
}
