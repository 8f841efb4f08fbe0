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

let kept = null; // the chat of this tab, which stays while other pages are shown; and the key that it was had with

/** See main.js. */
export function openPlayground({ store, session }) {
  if (kept?.key !== session.key) kept = { chat: new Chat(store, session), key: session.key };
  const { chat } = kept;
  chat.offerModels();
  return { title: "Playground", element: chat.element, close: () => chat.stop() };
}

class Chat {
  #store;
  #session;
  #form;
  #turns = []; // {messages: function(): Object[], view: of an answer}
  #log = el("div.turns", { role: "log", "aria-label": "Chat" });
  #hint = el(
    "p.panel.muted.hint-empty",
    "Send the model a message. Its answer comes here token by token, with the time ",
    "that it took and the workers that served it.",
  );
  #message = labelled("Message", el("textarea", { rows: 3, required: true, keydown: (event) => this.#onKey(event) }));
  #send = el("button.primary", { type: "submit" }, "Send");
  #stop = el("button", { type: "button", disabled: true, click: () => this.stop() }, "Stop");
  #status = el("p.unseen", { role: "status" });
  #code = codeView();
  #abort = null;

  constructor(store, session) {
    this.#store = store;
    this.#session = session;
    this.#form = playgroundForm();
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

  /** Lets the viewer choose among the models that the gateway has now. */
  offerModels() {
    this.#form.offerModels(this.#store.about.models);
  }

  /** Stops the answer that is under way, if there is one. */
  stop() {
    this.#abort?.abort();
  }

  #url() {
    return `${this.#store.about.api}/chat/completions`;
  }

  #onKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  }

  #clear() {
    this.stop();
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
    this.#answer(body, { messages: () => [{ role: "user", content }] }, content);
  }

  /** The request with these turns and further messages; null: a field cannot be used, which says so. */
  #body(further, turns = this.#turns) {
    try {
      const system = this.#form.system();
      const messages = [
        ...(system ? [{ role: "system", content: system }] : []),
        ...turns.flatMap((turn) => turn.messages()),
        ...further,
      ];
      const { model, ...fields } = this.#form.fields();
      return { model, messages, ...fields };
    } catch (error) {
      if (error instanceof BadField) return null;
      throw error;
    }
  }

  /** Asks for an answer to a turn. content: the message of that turn; null: results of tools. */
  async #answer(body, asked, content) {
    const answer = new Answer();
    let chosen = 0;
    const view = answerView(
      (index) => {
        chosen = index;
      },
      (results) => this.#sendResults(results),
    );
    this.#log.append(view.element);
    const turn = { messages: () => (answer.choices[chosen] ? [asMessage(answer.choices[chosen])] : []), view };
    this.#setBusy(true);
    this.#setTurns([...this.#turns, asked, turn]);
    view.show(answer);
    await ask(this.#url(), this.#session.headers(), body, answer, () => view.show(answer), this.#abort.signal);
    if (answer.choices.length === 0 && this.#turns.includes(turn)) {
      this.#setTurns(this.#turns.filter((each) => each !== asked && each !== turn)); // it is no part of the chat
      this.#message.input.value ||= content ?? "";
    }
    this.#setBusy(false);
    setText(this.#status, answer.error ? "It failed." : answer.stopped ? "Stopped." : "The answer is complete.");
    if (answer.requestId !== null && answer.choices.length) await this.#showServed(answer.requestId, view);
  }

  /** The chat so far. Only of its last turn, where that is an answer, there are choices to be made. */
  #setTurns(turns) {
    this.#turns = turns;
    for (const turn of turns) turn.view?.setOpen(turn === turns.at(-1));
  }

  #sendResults(results) {
    const messages = results.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
    const body = this.#body(messages);
    if (this.#abort !== null || body === null) return;
    for (const { content } of messages)
      this.#log.append(el("article.turn.tool", { "aria-label": "Result of a tool" }, el("pre", content)));
    this.#answer(body, { messages: () => messages }, null);
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

  /** The keyboard goes with what can be pressed: from Send, or a form for results, to Stop, and back to Send. */
  #setBusy(busy) {
    this.#abort = busy ? new AbortController() : null;
    const focused = document.activeElement;
    const [from, to] = busy ? [this.#send, this.#stop] : [this.#stop, this.#send];
    setAll(to, { disabled: false });
    if (focused === from || (busy && this.#log.contains(focused))) to.focus();
    setAll(from, { disabled: true });
    if (busy) setText(this.#status, "Asked.");
  }

  #showCode(name, make) {
    const content = this.#message.input.value;
    const asked = this.#turns.at(-1)?.view ? this.#turns.slice(0, -1) : this.#turns; // without its answer
    const further = content || asked.length === 0 ? [{ role: "user", content: content || "Hello!" }] : [];
    const body = this.#body(further, content ? this.#turns : asked);
    if (body === null) return;
    const base = new URL(this.#store.about.api, location.href.split("#")[0]).href.replace(/\/$/, "");
    this.#code.show(name, make(base, body, this.#store.about.key_id !== null || this.#session.key !== ""));
  }
}
