/**
 * What the feed has told so far. It grows to a limit: the newest rows, an hour of samples, the last fleet events.
 *
 * Listeners are told by topic: "about", "tick", "rows", "samples", "events", "prefixes". What one of them raises is its
 * own failure: the console of the browser has it, and all others are told.
 */

import { movedBetween } from "./moved.js";
import { ownSamples } from "./own_samples.js";

const MOST_ROWS = 10_000;
const MOST_SAMPLES = 720;
const MOST_EVENTS = 200;

export class Store {
  about = null;
  tick = null;
  /** What each link moved between the last two ticks, by its name; see moved.js. */
  moved = new Map();
  bounds = {};
  stepS = 5;
  samples = [];
  events = [];
  prefixes = null;
  #rows = new Map(); // by number: ids are the clients' and may repeat
  #newestFirst = null;
  #listeners = new Map();
  #lead = 0;
  #step = null; // of samples, the number of the one that the last tick was in

  /** Calls `listener` after each change of a topic. Returns a function that ends this. */
  on(topic, listener) {
    if (!this.#listeners.has(topic)) this.#listeners.set(topic, new Set());
    this.#listeners.get(topic).add(listener);
    return () => this.#listeners.get(topic).delete(listener);
  }

  /** The gateway's clock, in seconds since 1970. */
  now() {
    return Date.now() / 1000 + this.#lead;
  }

  /** The rows of requests, newest first. The array is the caller's to read, not to change. */
  rows() {
    this.#newestFirst ??= [...this.#rows.values()].sort((a, b) => b.n - a.n);
    return this.#newestFirst;
  }

  /** The samples of what the viewer sees: of all requests, or those of its own ones, which are made of their rows. */
  visibleSamples() {
    return this.about.sees === "all" ? this.samples : ownSamples(this.rows(), this.bounds, this.stepS, this.now());
  }

  /** Takes an event of the feed. One that this page does not know is left alone: the gateway may be newer. */
  take(event, data) {
    if (event === "hello") this.#hello(data);
    else if (event === "tick") this.#tick(data);
    else if (event === "requests") this.#takeRows(data.rows);
    else if (event === "sample") this.#add("samples", this.samples, data, MOST_SAMPLES);
    else if (event === "event") this.#add("events", this.events, data, MOST_EVENTS);
    else if (event === "prefixes") {
      this.prefixes = data.prefixes;
      this.#tell("prefixes");
    }
  }

  /** Begins anew: the first event of a stream, and again where a slow stream has missed something. */
  #hello(hello) {
    this.about = hello;
    this.#lead = hello.now - Date.now() / 1000;
    this.bounds = hello.history.bounds;
    this.stepS = hello.history.step_s;
    this.samples = hello.history.samples.slice(-MOST_SAMPLES);
    this.events = hello.events;
    this.tick = null;
    this.#step = null;
    this.moved = new Map();
    this.#rows = new Map();
    for (const topic of ["about", "samples", "events"]) this.#tell(topic);
    this.#takeRows(hello.requests);
  }

  #tick(tick) {
    this.#lead = tick.now - Date.now() / 1000;
    this.moved = movedBetween(this.tick, tick);
    this.tick = tick;
    this.#tell("tick");
    if (this.about.sees !== "all") this.#lookForStep(tick.now);
  }

  /** Tells of own samples, which no event does, once in a step. */
  #lookForStep(now) {
    const step = Math.floor(now / this.stepS);
    if (step === this.#step) return;
    this.#step = step;
    this.#tell("samples");
  }

  #takeRows(rows) {
    for (const row of rows) this.#rows.set(row.n, row);
    this.#newestFirst = null;
    if (this.#rows.size > MOST_ROWS) {
      for (const row of this.rows().slice(MOST_ROWS)) this.#rows.delete(row.n);
      this.#newestFirst = null;
    }
    this.#tell("rows");
  }

  #add(topic, list, item, most) {
    list.push(item);
    if (list.length > most) list.splice(0, list.length - most);
    this.#tell(topic);
  }

  #tell(topic) {
    for (const listener of this.#listeners.get(topic) ?? []) {
      try {
        listener();
      } catch (error) {
        console.error(error);
      }
    }
  }
}
