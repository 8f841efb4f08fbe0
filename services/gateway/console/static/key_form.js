/** The form that asks for a key, where the gateway wants one. */

import { el, newId } from "./dom.js";

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
  const submit = (event) => {
    event.preventDefault();
    onKey(input.value.trim());
  };
  const form = el(
    "form.panel.key-form",
    { submit },
    el("h1", { tabindex: "-1" }, "This gateway asks for a key"),
    el("p.note", { role: "status" }, why),
    el("label", { for: id }, "API key"),
    el("div.row", input, el("button.primary", { type: "submit" }, "Open the console")),
    el(
      "p.small.muted",
      { id: `${id}-about` },
      "A key with the right admin sees the whole fleet, any other key its own requests. The key stays in this tab, ",
      "until you close it, and is sent in the header Authorization alone.",
    ),
  );
  return { title: "Key", element: form, close: () => undefined };
}
