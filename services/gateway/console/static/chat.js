/** One answer of the chat completions API as it comes in, streamed or whole. */

import { serverEvents } from "./server_events.js";
import { errorWords, failureWords } from "./session.js";

/** An answer so far. Moments are milliseconds of `performance.now`. */
export class Answer {
  choices = []; // {text, reasoning, calls: [{id, name, arguments}], logprobs: [...], finish}
  usage = null;
  error = null;
  requestId = null;
  sentAt = performance.now();
  firstAt = null;
  endedAt = null;
  stopped = false;

  /** The choice of that number, made where it is new. */
  choice(index) {
    while (this.choices.length <= index)
      this.choices.push({ text: "", reasoning: "", calls: [], logprobs: [], finish: null });
    return this.choices[index];
  }

  /** Milliseconds until the first token came here; null: none came, or the answer came whole. */
  get ttftMs() {
    return this.firstAt === null ? null : this.firstAt - this.sentAt;
  }

  /** Tokens a second of all choices after the first token; null: not known. */
  get tokensPerSecond() {
    const tokens = this.usage?.completion_tokens;
    const begin = this.firstAt ?? this.sentAt;
    const more = this.firstAt === null ? tokens : tokens - this.choices.length;
    return tokens && this.endedAt > begin && more > 0 ? (more * 1000) / (this.endedAt - begin) : null;
  }
}

/**
 * Asks for an answer, and returns when it has ended, whatever ended it.
 *
 * @param {string} url @param {Object} headers @param {Object} body - of the request
 * @param {function(Answer)} onChange - called after each piece
 * @param {AbortSignal} signal - stops it
 */
export async function ask(url, headers, body, answer, onChange, signal) {
  try {
    const response = await fetch(url, {
      method: "POST",
      signal,
      cache: "no-store",
      body: JSON.stringify(body),
      headers: { ...headers, "content-type": "application/json" },
    });
    answer.requestId = response.headers.get("x-request-id");
    if (!response.ok) answer.error = `HTTP ${response.status}: ${await errorWords(response)}`;
    else if (body.stream) await readStream(response, answer, onChange);
    else takeWhole(await response.json(), answer);
  } catch (error) {
    if (signal.aborted) answer.stopped = true;
    else answer.error = failureWords(error);
  }
  answer.endedAt = performance.now();
  onChange(answer);
}

async function readStream(response, answer, onChange) {
  for await (const { data } of serverEvents(response.body)) {
    if (data === "[DONE]") return;
    takeChunk(JSON.parse(data), answer);
    onChange(answer);
  }
}

function takeChunk(chunk, answer) {
  if (chunk.error) answer.error = chunk.error.message;
  if (chunk.usage) answer.usage = chunk.usage;
  for (const { index, delta, logprobs, finish_reason: finish } of chunk.choices ?? []) {
    const choice = answer.choice(index);
    takeMessage(choice, delta ?? {});
    choice.logprobs.push(...(logprobs?.content ?? []));
    choice.finish = finish ?? choice.finish;
    if (choice.text || choice.reasoning || choice.calls.length) answer.firstAt ??= performance.now();
  }
}

function takeWhole(body, answer) {
  answer.usage = body.usage;
  for (const { index, message, logprobs, finish_reason: finish } of body.choices) {
    const choice = answer.choice(index);
    takeMessage(choice, message);
    choice.logprobs.push(...(logprobs?.content ?? []));
    choice.finish = finish;
  }
}

function takeMessage(choice, message) {
  choice.text += message.content ?? "";
  choice.reasoning += message.reasoning_content ?? "";
  for (const [position, part] of (message.tool_calls ?? []).entries()) {
    const index = part.index ?? position;
    while (choice.calls.length <= index) choice.calls.push({ id: "", name: "", arguments: "" });
    const call = choice.calls[index];
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

/** A choice as a message of the next request. */
export function asMessage(choice) {
  const message = { role: "assistant", content: choice.text || null };
  if (choice.calls.length) {
    message.tool_calls = choice.calls.map(({ id, name, arguments: words }) => ({
      id,
      type: "function",
      function: { name, arguments: words },
    }));
  }
  return message;
}
