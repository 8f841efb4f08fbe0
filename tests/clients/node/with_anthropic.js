// Anthropic's client for TypeScript: its tool runner, whole and streamed. Arguments: the gateway's URL.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
let called = [];
const weather = betaZodTool({
  name: "weather",
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]), days: z.number().int() }),
  run: async ({ city }) => {
    called.push(city);
    return "Rain.";
  },
});
const work = {
  model: "m",
  max_tokens: 1024,
  messages: [{ role: "user", content: "Follow plan:weather." }],
  tools: [weather],
};
const lastText = (message) => message.content.at(-1).text;

const programs = {
  async theRunnerCallsUntilTheModelAnswers() {
    const message = await client.beta.messages.toolRunner(work);
    assert.equal(lastText(message), "It rains.");
    assert.equal(message.stop_reason, "end_turn");
  },

  async theRunnerStreams() {
    const runner = client.beta.messages.toolRunner({ ...work, stream: true });
    const stops = [];
    for await (const stream of runner) {
      let text = "";
      stream.on("text", (piece) => (text += piece));
      const message = await stream.finalMessage();
      stops.push(message.stop_reason);
      if (message.stop_reason === "end_turn") assert.equal(text, "It rains.");
    }
    assert.deepEqual(stops, ["tool_use", "tool_use", "tool_use", "end_turn"]);
  },
};

for (const [name, program] of Object.entries(programs)) {
  console.log(name);
  called = [];
  await program();
  assert.deepEqual(called, ["Paris", "Rome", "Paris", "Rome"]);
}
