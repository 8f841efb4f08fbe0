// OpenAI's client for Node, as a program uses it. Arguments: the gateway's URL.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Which weather has Paris?" }];
const chat = { model: "tiny", messages, temperature: 0, max_tokens: 16 };
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

const programs = {
  async chatIsStreamedAsItIsWhole() {
    const whole = await client.chat.completions.create(chat);
    const stream = await client.chat.completions.create({
      ...chat,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },

  async toolIsCalledAndItsResultSentBack() {
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const asked = await client.chat.completions.create({
      ...chat,
      tools,
      tool_choice: "required",
      parallel_tool_calls: false,
      max_tokens: 128,
    });
    const [{ finish_reason, message }] = asked.choices;
    assert.equal(finish_reason, "tool_calls");
    const [call] = message.tool_calls;
    assert.equal(call.function.name, "weather");
    assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
    const result = { role: "tool", tool_call_id: call.id, content: "Rain." };
    const answer = await client.chat.completions.create({
      ...chat,
      tools,
      tool_choice: "none",
      messages: [...messages, message, result],
    });
    assert.ok(answer.choices[0].message.content);
  },

  async responseIsStreamedAsItIsWhole() {
    const fields = { model: "tiny", input: "Hello", temperature: 0, max_output_tokens: 16 };
    const whole = await client.responses.create(fields);
    const stream = client.responses.stream(fields);
    let text = "";
    stream.on("response.output_text.delta", ({ delta }) => (text += delta));
    const last = await stream.finalResponse();
    assert.equal(text, whole.output_text);
    assert.equal(last.output_text, whole.output_text);
    const turn = await client.responses.create({ ...fields, input: "Go on", previous_response_id: whole.id });
    assert.ok(turn.usage.input_tokens > whole.usage.input_tokens);
  },
};

for (const [name, program] of Object.entries(programs)) {
  console.log(name);
  await program();
}
