/**
 * Who asks, and how: the key, and requests to the gateway.
 *
 * The key is in this tab's sessionStorage and in the header Authorization, and nowhere else: in no URL, no cookie.
 */

const KEPT = "baton.console.key";

/** The gateway wants a key, or another one. */
export class KeyWanted extends Error {}

/** The gateway answered, with a status that is an error. */
export class Refused extends Error {
  /** @param {number} status @param {string} message - in the gateway's words */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Session {
  /** The key; "" for none. */
  get key() {
    return sessionStorage.getItem(KEPT) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEPT, value);
    else sessionStorage.removeItem(KEPT);
  }

  /** Headers of every request. */
  headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  }

  /**
   * Asks the gateway. `path` is relative to the page.
   *
   * @throws {KeyWanted} for 401 and 403
   * @throws {Refused} for any other status that is an error
   * @throws {TypeError} where there is no answer
   */
  async get(path, signal) {
    const answer = await fetch(path, { headers: this.headers(), signal, cache: "no-store" });
    if (answer.ok) return answer;
    const words = await errorWords(answer);
    if (answer.status === 401 || answer.status === 403) throw new KeyWanted(words);
    throw new Refused(answer.status, words);
  }

  /** The JSON at a path; see `get`. */
  async json(path, signal) {
    return (await this.get(path, signal)).json();
  }
}

/** The words of an answer that is an error: those of the gateway, or the status alone. */
export async function errorWords(answer) {
  return wordsIn(await answer.text()) ?? `HTTP ${answer.status} ${answer.statusText}`.trim();
}

/** The words of an error as JSON, the gateway's or a proxy's; null: it has none, as a proxy's page. */
function wordsIn(text) {
  try {
    const error = JSON.parse(text)?.error;
    return [error?.message, error].find((words) => typeof words === "string") ?? null;
  } catch {
    return null;
  }
}

/** Why there is no answer: browsers say "Failed to fetch" and the like for any reason. */
export function failureWords(error) {
  return error instanceof TypeError ? "The gateway does not answer" : error.message;
}
