/** The form that asks for a key, where the gateway wants one. */

import { el, newId, setAll, setText } from "./dom.js";

const SENDABLE = /^[\x21-\x7e]+$/; // in a header

/**
 * @param {string} why - the gateway's words
 * @param {function(string)} onKey - gets the key
 */
export function keyForm(why, onKey) {
  const id = newId("key");
  const input = el("input", {
    id,
    type: "password",
    name: "key",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": `${id}-about`,
    size: 44,
  });
  const told = el("p.note", { role: "status", id: `${id}-told` }, why);
  const submit = (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (SENDABLE.test(key)) {
      onKey(key);
      return;
    }
    setText(told, "This cannot be a key: keys have ASCII letters, digits and signs alone, and no spaces.");
    setAll(input, { "aria-invalid": "true", "aria-describedby": `${told.id} ${id}-about` });
    input.focus();
  };
  const form = el(
    "form.panel.key-form",
    { submit },
    el("h1", { tabindex: "-1" }, "This gateway asks for a key"),
    told,
    el("label", { for: id }, "API key"),
    el("div.row", input, el("button.primary", { type: "submit" }, "Open the console")),
    el(
      "p.small.muted",
      { id: `${id}-about` },
      "A key with the right admin sees the whole fleet. Any other key sees its own requests, at the API's port alone. ",
      "The key stays in this tab, until you close it, and is sent in the header Authorization alone.",
    ),
  );
  return { title: "Key", element: form, close: () => undefined };
}
