/**
 * An answer's tokens coloured by how likely each was, with its alternatives in a tooltip. The tokens are one stop of
 * the Tab key; arrows go from token to token.
 */

import { el, newId, setAll } from "./dom.js";
import { percent } from "./format.js";

const BORDERS = [0.9, 0.6, 0.3, 0.1]; // between the five classes of colours, from likely to unlikely

/** The class of a probability: 0 for the likeliest. */
function likelihoodClass(probability) {
  const index = BORDERS.findIndex((border) => probability >= border);
  return index < 0 ? BORDERS.length : index;
}

/** A view of tokens; `show(entries)` adds those that are new. */
export function logprobView() {
  const tooltip = el("div.tooltip", { role: "tooltip", id: newId("alternatives"), hidden: true });
  const tokens = el("div.tokens", {
    role: "group",
    "aria-label": "Tokens with their probabilities; arrow keys move between them",
  });
  const element = el("div.logprobs", tokens, tooltip);
  let entries = [];
  let stop = null; // the token that the Tab key leads to

  function enter(token) {
    if (stop !== null) stop.tabIndex = -1;
    stop = token;
    stop.tabIndex = 0;
    open(token);
  }

  function open(token) {
    tooltip.replaceChildren(...tooltipParts(entries[Number(token.dataset.index)]));
    tooltip.hidden = false;
    const [box, around] = [token.getBoundingClientRect(), element.getBoundingClientRect()];
    const left = Math.max(0, Math.min(box.left - around.left, around.width - tooltip.offsetWidth));
    tooltip.style.left = `${left}px`;
    tooltip.style.top = `${box.bottom - around.top + 4}px`;
    setAll(token, { "aria-describedby": tooltip.id });
  }

  function close(token) {
    tooltip.hidden = true;
    token.removeAttribute("aria-describedby");
  }

  function move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") tooltip.hidden = true;
    const next = step && tokens.children[Number(event.target.dataset.index) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  const add = (entry, index) => {
    const probability = Math.exp(entry.logprob);
    const shown = entry.token.replaceAll("\n", "⏎\n");
    const token = tokens.appendChild(
      el(
        `button.token.likely-${likelihoodClass(probability)}`,
        {
          type: "button",
          tabindex: index === 0 ? "0" : "-1",
          "data-index": index,
          focus: (event) => enter(event.target),
          blur: (event) => close(event.target),
          keydown: move,
          mouseenter: (event) => open(event.target),
          mouseleave: (event) => event.target !== document.activeElement && close(event.target),
        },
        shown,
      ),
    );
    stop ??= token;
  };
  const show = (all) => {
    entries = all;
    for (let index = tokens.children.length; index < all.length; index += 1) add(all[index], index);
    element.hidden = all.length === 0;
  };
  show([]);
  return { element, show };
}

function tooltipParts(entry) {
  const top = entry.top_logprobs ?? [];
  const has = top.some((other) => other.token === entry.token && other.logprob === entry.logprob);
  const rows = (has ? top : [entry, ...top]).map((other) =>
    el(
      "tr",
      { "data-chosen": other.token === entry.token ? "yes" : "no" },
      el("td", el("code", JSON.stringify(other.token))),
      el("td.number", percent(Math.exp(other.logprob))),
    ),
  );
  return [el("table", el("tbody", rows))];
}

/** What the colours mean. */
export function logprobLegend() {
  const names = ["90 % or more", "60 %", "30 %", "10 %", "less"];
  return el(
    "p.legend.small",
    "Probability of the token: ",
    names.map((name, index) => el(`span.token.likely-${index}`, {}, name)),
  );
}
