/** The fields of a request in the playground, and the request that they make. */

import { el, newId, replace, setAll, setText } from "./dom.js";

const NUMBERS = [
  ["max_tokens", "Most tokens", { min: 1, step: 1, value: "256" }],
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "top_p", { min: 0, max: 1, step: 0.05 }],
  ["n", "Answers (n)", { min: 1, max: 8, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
];
const TOOLS_EXAMPLE = `[{"type": "function", "function": {"name": "weather", "description": "The weather of a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]`;
const SCHEMA_EXAMPLE = `{"type": "object", "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
  "required": ["city", "people"], "additionalProperties": false}`;

/** A field whose value cannot be used. */
export class BadField extends Error {}

/**
 * The form. `fields()` returns the request without its messages, or raises BadField; `system()` the system prompt.
 * `offerModels(names)` renews the models to choose from.
 */
export function playgroundForm() {
  const model = labelled("Model", el("select"));
  const system = labelled("System prompt", el("textarea", { rows: 3 }));
  const numbers = NUMBERS.map(([name, title, attributes]) => [
    name,
    labelled(title, el("input", { type: "number", ...attributes })),
  ]);
  const stop = labelled("Stop strings, one a line", el("textarea", { rows: 2, spellcheck: "false" }));
  const stream = checkbox("Stream", true);
  const logprobs = checkbox("Logprobs, as colours", false);
  const alternatives = labelled(
    "Alternatives of each token",
    el("input", { type: "number", min: 0, max: 20, step: 1, value: "5" }),
  );
  const tools = labelled(
    "Tools, as JSON",
    el("textarea.code", { rows: 4, spellcheck: "false", placeholder: TOOLS_EXAMPLE }),
  );
  const toolChoice = labelled(
    "Tool choice",
    el(
      "select",
      ["auto", "none", "required"].map((name) => el("option", { value: name }, name)),
    ),
  );
  const schema = labelled(
    "JSON schema of the answer",
    el("textarea.code", { rows: 4, spellcheck: "false", placeholder: SCHEMA_EXAMPLE }),
  );
  const more = labelled(
    "Further fields, as JSON",
    el("textarea.code", { rows: 2, spellcheck: "false", placeholder: '{"top_k": 20, "priority": 5}' }),
  );
  const [maxTokens, temperature, ...further] = numbers.map(([, field]) => field.element);
  const element = el(
    "div.fields",
    model.element,
    system.element,
    el("div.pair", maxTokens, temperature),
    el("div.checks", stream.element, logprobs.element),
    alternatives.element,
    el("details", el("summary", "Sampling"), el("div.pair", further), stop.element),
    el("details", el("summary", "Tools"), tools.element, toolChoice.element),
    el("details", el("summary", "JSON schema"), schema.element),
    el("details", el("summary", "Further fields"), more.element),
  );
  const showAlternatives = () => {
    alternatives.element.hidden = !logprobs.input.checked;
  };
  logprobs.input.addEventListener("change", showAlternatives);
  showAlternatives();

  const fields = () => {
    const body = { model: model.input.value };
    for (const [name, field] of numbers) if (field.input.value !== "") body[name] = Number(field.input.value);
    const stops = stop.input.value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops;
    if (logprobs.input.checked)
      Object.assign(body, { logprobs: true, top_logprobs: Number(alternatives.input.value) || 0 });
    const toolList = json(tools, Array.isArray, "It must be a list of tools.");
    if (toolList) Object.assign(body, { tools: toolList, tool_choice: toolChoice.input.value });
    const form = json(schema, isObject, "It must be a JSON schema, an object.");
    if (form)
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: form, strict: true } };
    if (stream.input.checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
    return { ...body, ...(json(more, isObject, "It must be an object.") ?? {}) };
  };
  return { element, fields, system: () => system.input.value, offerModels: (names) => offer(model.input, names) };
}

function offer(select, names) {
  const chosen = names.includes(select.value) ? select.value : names[0];
  replace(
    select,
    names.map((name) => el("option", { value: name }, name)),
  );
  select.value = chosen;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The JSON of a field, null for an empty one. What is wrong is told at the field, which gets the focus. */
function json(field, fits, otherwise) {
  const text = field.input.value.trim();
  field.showError("");
  if (text === "") return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return fail(field, `It is no JSON: ${error.message}`);
  }
  return fits(value) ? value : fail(field, otherwise);
}

function fail(field, words) {
  const details = field.element.closest("details");
  if (details) details.open = true;
  field.showError(words);
  field.input.focus();
  throw new BadField(words);
}

/** A field with its label and a place for what is wrong with it. */
export function labelled(title, input) {
  const id = newId("field");
  const error = el("p.error", { id: `${id}-error`, hidden: true });
  setAll(input, { id });
  const showError = (words) => {
    setText(error, words);
    error.hidden = words === "";
    setAll(input, { "aria-invalid": words ? "true" : null, "aria-describedby": words ? error.id : null });
  };
  return { element: el("div.field", el("label", { for: id }, title), input, error), input, showError };
}

function checkbox(title, checked) {
  const input = el("input", { type: "checkbox", checked });
  return { element: el("label.check", input, title), input };
}
