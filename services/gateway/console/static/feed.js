/**
 * The feed of the gateway, followed for as long as the page is open: it connects, passes events on, and after a failure
 * tries again, after a growing wait. A feed that is silent is told as stale, and
 * aborted after a while.
 *
 * States that listeners get: `{kind, why, retryAt, since}` with one of
 *
 *   connecting   nothing has come so far
 *   live         the last second's word is here
 *   stale        nothing came for some seconds; the connection still stands
 *   waiting      it failed, `why`; the next try is at `retryAt` (milliseconds since 1970)
 *   key          the gateway wants a key
 *
 * `since`: when the last event came, in whichever connection (milliseconds since 1970); null: none came so far.
 */

import { serverEvents } from "./server_events.js";
import { failureWords, KeyWanted } from "./session.js";

const STALE_MS = 4000;
const SILENT_MS = 20_000;
const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 30_000;

export class Feed {
  #session;
  #take;
  #tellState;
  #abort = null;
  #wake = () => undefined;
  #heardAt = null; // when the last event came
  #triedAt = 0; // when the last try began
  #failures = 0;
  #running = false;

  /** @param session @param {function(string, Object)} take - gets each event @param {function(Object)} tellState */
  constructor(session, take, tellState) {
    this.#session = session;
    this.#take = take;
    this.#tellState = tellState;
  }

  /** Begins to follow, or tries again at once. */
  start() {
    this.#failures = 0;
    if (this.#running) this.#wake();
    else this.#run();
  }

  /** Ends it, until the next `start`. */
  stop() {
    this.#running = false;
    this.#abort?.abort();
    this.#wake();
  }

  async #run() {
    this.#running = true;
    while (this.#running) {
      this.#tellState({ kind: "connecting" });
      const why = await this.#listen();
      if (why instanceof KeyWanted) {
        this.#running = false;
        this.#tellState({ kind: "key", why: why.message });
      } else if (this.#running) {
        await this.#pause(why);
      }
    }
  }

  /** Follows one connection to its end, and returns the error that ended it. */
  async #listen() {
    this.#abort = new AbortController();
    this.#triedAt = Date.now();
    const watch = setInterval(() => this.#lookAtClock(), 1000);
    try {
      const answer = await this.#session.get("feed", this.#abort.signal);
      for await (const { event, data } of serverEvents(answer.body)) {
        this.#heardAt = Date.now();
        this.#failures = 0;
        if (event === "end") return new Error(JSON.parse(data).why);
        this.#take(event, JSON.parse(data));
        this.#tellState({ kind: "live" });
      }
      return new Error("The gateway ended the feed");
    } catch (error) {
      return error;
    } finally {
      clearInterval(watch);
      this.#abort.abort();
    }
  }

  #lookAtClock() {
    const silent = Date.now() - Math.max(this.#triedAt, this.#heardAt ?? 0);
    if (silent > SILENT_MS) this.#abort.abort(new Error(`nothing came for ${Math.round(silent / 1000)} s`));
    else if (silent > STALE_MS) this.#tellState({ kind: "stale", since: this.#heardAt });
  }

  async #pause(why) {
    const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.#failures) * (0.75 + Math.random() / 2);
    this.#failures += 1;
    this.#tellState({ kind: "waiting", why: failureWords(why), retryAt: Date.now() + wait, since: this.#heardAt });
    await new Promise((resolve) => {
      this.#wake = resolve;
      setTimeout(resolve, wait);
    });
  }
}
