/** The page of the playground: a chat with the served model, what it cost, and the request as code. */

import { answerView } from "./answer_view.js";
import { Answer, ask, asMessage } from "./chat.js";
import { codeView } from "./code_view.js";
import { asCurl, asJavaScript, asPython } from "./copy_as.js";
import { el, setAll, setText } from "./dom.js";
import { BadField, labelled, playgroundForm } from "./playground_form.js";

const LANGUAGES = [
  ["curl", asCurl],
  ["Python", asPython],
  ["JavaScript", asJavaScript],
];
const RECORD_TRIES = 5;
const NARROW = 900; // pixels, below which the fields are folded at first

/** See main.js. */
export function openPlayground({ store, session }) {
  const chat = new Chat(store, session);
  return { title: "Playground", element: chat.element, close: () => chat.close() };
}

class Chat {
  #store;
  #session;
  #form;
  #turns = []; // {messages: function(): Object[]}
  #log = el("div.turns", { role: "log", "aria-label": "Chat" });
  #hint = el(
    "p.panel.muted.hint-empty",
    "Send the model a message. Its answer comes here token by token, with the time ",
    "that it took and the workers that served it.",
  );
  #message = labelled("Message", el("textarea", { rows: 3, required: true, keydown: (event) => this.#onKey(event) }));
  #send = el("button.primary", { type: "submit" }, "Send");
  #stop = el("button", { type: "button", disabled: true, click: () => this.#abort?.abort() }, "Stop");
  #status = el("p.unseen", { role: "status" });
  #code = codeView();
  #abort = null;

  constructor(store, session) {
    this.#store = store;
    this.#session = session;
    this.#form = playgroundForm(store.about.models);
    const clear = el("button.quiet", { type: "button", click: () => this.#clear() }, "Begin anew");
    const copies = LANGUAGES.map(([name, make]) =>
      el("button.quiet", { type: "button", click: () => this.#showCode(name, make) }, name),
    );
    const composer = el(
      "form.composer",
      { submit: (event) => this.#onSubmit(event) },
      this.#message.element,
      el(
        "div.row",
        this.#send,
        this.#stop,
        clear,
        el("span.small.muted.hint", "Ctrl+Enter sends"),
        el("span.copies", el("span.small.muted", "Copy as"), copies),
      ),
    );
    const fields = el(
      "details",
      { open: innerWidth > NARROW },
      el("summary", "Fields of the request"),
      this.#form.element,
    );
    this.element = el(
      "div.page.playground",
      el("h1", { tabindex: "-1" }, "Playground"),
      el(
        "div.playground-columns",
        el("section.panel.request-fields", { "aria-label": "Fields of the request" }, fields),
        el("section.chat", { "aria-label": "Chat" }, this.#hint, this.#log, composer, this.#code.element, this.#status),
      ),
    );
  }

  close() {
    this.#abort?.abort();
  }

  #url() {
    return `${this.#store.about.api}/chat/completions`;
  }

  #onKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  }

  #clear() {
    this.#abort?.abort();
    this.#turns = [];
    this.#log.replaceChildren();
    this.#hint.hidden = false;
    this.#message.input.focus();
  }

  #onSubmit(event) {
    event.preventDefault();
    const content = this.#message.input.value;
    const body = this.#body([{ role: "user", content }]);
    if (this.#abort !== null || body === null) return;
    this.#message.input.value = "";
    this.#hint.hidden = true;
    this.#log.append(el("article.turn.user", { "aria-label": "You" }, el("div.text", content)));
    this.#turns.push({ messages: () => [{ role: "user", content }] });
    this.#answer(body, content);
  }

  /** The request with the chat so far and these messages; null: a field cannot be used, which says so. */
  #body(further) {
    try {
      const system = this.#form.system();
      const messages = [
        ...(system ? [{ role: "system", content: system }] : []),
        ...this.#turns.flatMap((turn) => turn.messages()),
        ...further,
      ];
      const { model, ...fields } = this.#form.fields();
      return { model, messages, ...fields };
    } catch (error) {
      if (error instanceof BadField) return null;
      throw error;
    }
  }

  /** Asks for an answer. content: the message that it answers; null: it answers results of tools. */
  async #answer(body, content) {
    const answer = new Answer();
    let chosen = 0;
    const view = answerView(
      (index) => {
        chosen = index;
      },
      (results) => this.#sendResults(results),
    );
    this.#log.append(view.element);
    const turn = { messages: () => (answer.choices[chosen] ? [asMessage(answer.choices[chosen])] : []) };
    this.#turns.push(turn);
    this.#setBusy(true);
    view.show(answer);
    await ask(this.#url(), this.#session.headers(), body, answer, () => view.show(answer), this.#abort.signal);
    this.#setBusy(false);
    if (answer.choices.length === 0) {
      this.#turns.splice(this.#turns.indexOf(turn) - 1, 2); // what was not answered is no part of the chat
      this.#message.input.value ||= content ?? "";
    }
    setText(this.#status, answer.error ? "It failed." : answer.stopped ? "Stopped." : "The answer is complete.");
    if (answer.requestId !== null && answer.choices.length) await this.#showServed(answer.requestId, view);
  }

  #sendResults(results) {
    const messages = results.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
    const body = this.#body(messages);
    if (this.#abort !== null || body === null) return;
    for (const { content } of messages)
      this.#log.append(el("article.turn.tool", { "aria-label": "Result of a tool" }, el("pre", content)));
    this.#turns.push({ messages: () => messages });
    this.#answer(body, null);
  }

  /** Which workers served it, by the gateway's record; a record is complete a moment after the answer's last byte. */
  async #showServed(id, view) {
    for (let attempt = 0; attempt < RECORD_TRIES && this.element.isConnected; attempt += 1) {
      try {
        const record = await this.#session.json(`requests/${encodeURIComponent(id)}`);
        if (record.in_flight) await new Promise((resolve) => setTimeout(resolve, 200));
        else return view.showServed(record);
      } catch {
        return undefined; // its page, which the answer links to, says why there is none
      }
    }
    return undefined;
  }

  #setBusy(busy) {
    this.#abort = busy ? new AbortController() : null;
    setAll(this.#send, { disabled: busy });
    setAll(this.#stop, { disabled: !busy });
    if (busy) setText(this.#status, "Asked.");
  }

  #showCode(name, make) {
    const content = this.#message.input.value;
    const open = content || this.#turns.length === 0 ? [{ role: "user", content: content || "Hello!" }] : [];
    const body = this.#body(open);
    if (body === null) return;
    const base = new URL(this.#store.about.api, location.href.split("#")[0]).href.replace(/\/$/, "");
    this.#code.show(name, make(base, body, this.#store.about.key_id !== null || this.#session.key !== ""));
  }
}
