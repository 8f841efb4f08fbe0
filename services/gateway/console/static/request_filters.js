/** Filters of the list of requests: state, model, key, slow ones, a text in the id. They are in the page's address. */

import { el, newId, replace, setText } from "./dom.js";
import { counted } from "./format.js";

const STATES = [
  ["", "All"],
  ["in flight", "In flight"],
  ["done", "Done"],
  ["failed", "Failed"],
];

/**
 * The rows that pass.
 *
 * @param {Object[]} rows @param {number} now - seconds since 1970
 * @param {{state: string, model: string, key: string, slow: string, text: string}} wanted - "" for any
 */
export function passing(rows, wanted, now) {
  const slow = Number(wanted.slow) || 0;
  const text = wanted.text.toLowerCase();
  return rows.filter(
    (row) =>
      (!wanted.state || row.state === wanted.state) &&
      (!wanted.model || row.model === wanted.model) &&
      (!wanted.key || row.key === wanted.key) &&
      (!slow || (row.ms ?? (now - row.at) * 1000) > slow) &&
      (!text || row.id.toLowerCase().includes(text)),
  );
}

/** The form. `onChange` gets what is wanted; `offer(rows)` renews models and keys to choose from. */
export function filterForm(query, withKeys, onChange) {
  const wanted = { state: "", model: "", key: "", slow: "", text: "" };
  for (const name of Object.keys(wanted)) wanted[name] = query.get(name) ?? "";
  let isNew = false; // the number that is shown next answers a change
  const changed = (name) => (event) => {
    wanted[name] = event.target.value;
    isNew = true;
    onChange(wanted);
  };
  const group = newId("state");
  const states = STATES.map(([value, title]) =>
    el(
      "label.choice",
      el("input", { type: "radio", name: group, value, checked: wanted.state === value, change: changed("state") }),
      el("span", title),
    ),
  );
  const model = chooser("Model", "any model", wanted.model, changed("model"));
  const key = chooser("Key", "any key", wanted.key, changed("key"));
  key.element.hidden = !withKeys;
  const slow = field("Slower than, ms", {
    type: "number",
    min: 0,
    step: 100,
    value: wanted.slow,
    input: changed("slow"),
  });
  const text = field("Id has", { type: "search", value: wanted.text, spellcheck: "false", input: changed("text") });
  const number = el("span.how-many.muted");
  const told = el("p.unseen", { role: "status" }); // read aloud, which the number is not: it changes each second
  const element = el(
    "form.filters",
    { submit: (event) => event.preventDefault(), role: "search", "aria-label": "Filter requests" },
    el("fieldset.segmented", el("legend.unseen", "State"), states),
    model.element,
    key.element,
    slow,
    text,
    number,
    told,
  );
  return {
    element,
    wanted,
    /** Returns how many models and keys there are, those of rows without one counted as one more. */
    offer(rows) {
      const [models, keys] = [new Set(rows.map((row) => row.model)), new Set(rows.map((row) => row.key))];
      model.offer(models);
      key.offer(keys);
      return { models: models.size, keys: keys.size };
    },
    showNumber(shown, all) {
      setText(number, shown === all ? counted(all, "request") : `${shown} of ${counted(all, "request")}`);
      if (isNew) setText(told, number.textContent);
      isNew = false;
    },
  };
}

function field(title, attributes) {
  const id = newId("filter");
  return el("div.field", el("label", { for: id }, title), el("input", { id, ...attributes }));
}

function chooser(title, any, value, change) {
  const id = newId("filter");
  const select = el("select", { id, change });
  let offered = "";
  const offer = (names) => {
    const found = [...new Set([...names, select.value || value])].filter(Boolean).sort();
    if (found.join("\n") === offered && select.options.length) return;
    offered = found.join("\n");
    const chosen = select.options.length ? select.value : value;
    replace(
      select,
      el("option", { value: "" }, any),
      found.map((name) => el("option", { value: name }, name)),
    );
    select.value = chosen;
  };
  offer([]);
  return { element: el("div.field", el("label", { for: id }, title), select), offer };
}
