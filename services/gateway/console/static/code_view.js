/** A request as code, which it puts on the clipboard. */

import { el, setText } from "./dom.js";

/** The view; `show(language, code)`. */
export function codeView() {
  const code = el("code");
  const title = el("h2.small");
  const told = el("span.small.muted", { role: "status" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      setText(told, "Copied.");
    } catch {
      getSelection().selectAllChildren(code); // no clipboard without TLS or permission
      setText(told, "Selected: copy it with the keyboard.");
    }
  };
  let opener = null; // what had the keyboard before
  const close = () => {
    opener?.focus();
    element.hidden = true;
  };
  const element = el(
    "section.panel.code-view",
    { hidden: true, "aria-label": "The request as code" },
    el(
      "div.card-head",
      title,
      el(
        "div.row",
        told,
        el("button.quiet", { type: "button", click: copy }, "Copy"),
        el("button.quiet", { type: "button", click: close }, "Close"),
      ),
    ),
    el("pre", { tabindex: "0" }, code),
  );
  const show = (name, text) => {
    setText(title, `As ${name}`);
    setText(code, text);
    setText(told, "");
    opener = document.activeElement;
    element.hidden = false;
    copy();
    element.scrollIntoView({ block: "nearest" });
  };
  return { element, show };
}
