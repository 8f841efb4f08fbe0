/** A request as code: curl, and OpenAI's clients for Python and JavaScript. A placeholder stands for the key. Pure. */

const KEY = "YOUR_KEY";
// Fields that OpenAI's client for Python has as parameters; it takes others in extra_body.
const OPENAI_FIELDS = new Set([
  "model",
  "messages",
  "max_tokens",
  "max_completion_tokens",
  "temperature",
  "top_p",
  "n",
  "seed",
  "stop",
  "presence_penalty",
  "frequency_penalty",
  "logprobs",
  "top_logprobs",
  "logit_bias",
  "tools",
  "tool_choice",
  "response_format",
  "stream",
  "stream_options",
  "user",
]);

/** @param {string} baseUrl - ends before /chat @param {Object} body @param {boolean} withKey */
export function asCurl(baseUrl, body, withKey) {
  const key = withKey ? [`  -H 'Authorization: Bearer ${KEY}' \\`] : [];
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl ${body.stream ? "-N " : ""}${shellQuoted(`${baseUrl}/chat/completions`)} \\`,
    "  -H 'Content-Type: application/json' \\",
    ...key,
    `  -d '${json}'`,
  ].join("\n");
}

/** See asCurl. */
export function asPython(baseUrl, body, withKey) {
  const known = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const other = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name)));
  const fields = known.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (Object.keys(other).length) fields.push(`    extra_body=${python(other, 1)},`);
  const read = body.stream
    ? [
        "for chunk in answer:",
        "    for choice in chunk.choices:",
        '        print(choice.delta.content or "", end="", flush=True)',
      ]
    : ["for choice in answer.choices:", "    print(choice.message.content)"];
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(baseUrl)}, api_key=${JSON.stringify(withKey ? KEY : "none")})`,
    "answer = client.chat.completions.create(",
    ...fields,
    ")",
    ...read,
  ].join("\n");
}

/** See asCurl. */
export function asJavaScript(baseUrl, body, withKey) {
  const fields = JSON.stringify(body, null, 2);
  const key = withKey ? KEY : "none";
  const read = body.stream
    ? [
        "for await (const chunk of answer) {",
        '  for (const choice of chunk.choices) process.stdout.write(choice.delta.content ?? "");',
        "}",
      ]
    : ["for (const choice of answer.choices) console.log(choice.message.content);"];
  return [
    'import OpenAI from "openai";',
    "",
    `const client = new OpenAI({ baseURL: ${JSON.stringify(baseUrl)}, apiKey: ${JSON.stringify(key)} });`,
    `const answer = await client.chat.completions.create(${fields});`,
    ...read,
  ].join("\n");
}

function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** A JSON value as Python writes it. */
function python(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inside = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  const list = Array.isArray(value);
  const entries = list
    ? value.map((each) => python(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, depth + 1)}`);
  if (entries.length === 0) return list ? "[]" : "{}";
  return `${list ? "[" : "{"}\n${entries.map((entry) => `${inside}${entry},\n`).join("")}${end}${list ? "]" : "}"}`;
}
