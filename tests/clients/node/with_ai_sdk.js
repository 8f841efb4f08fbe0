// The AI SDK with each provider that takes a server's URL. Arguments: the gateway's URL, the provider's name.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [, , url, name] = process.argv;
const base = { baseURL: `${url}/v1`, apiKey: "none" };
const compatible = { name: "baton", includeUsage: true, supportsStructuredOutputs: true };
const models = {
  "openai chat": () => createOpenAI(base).chat("m"),
  "openai responses": () => createOpenAI(base).responses("m"),
  anthropic: () => createAnthropic(base)("m"),
  compatible: () => createOpenAICompatible({ ...base, ...compatible })("m"),
  "open responses": () => createOpenResponses({ name: "baton", url: `${base.baseURL}/responses`, apiKey: "none" })("m"),
};
const asked = z.object({ city: z.enum(["Paris", "Rome"]), days: z.number().int() });

let called = [];
const tools = {
  weather: tool({
    description: "Tells the weather of a city.",
    inputSchema: asked,
    execute: async (input) => {
      called.push(input.city);
      return "Rain.";
    },
  }),
};
const work = { model: models[name](), tools, prompt: "Follow plan:weather.", stopWhen: stepCountIs(8), maxRetries: 0 };

const programs = {
  async toolsAreCalledOverThreeRounds() {
    const { text, steps, reasoningText } = await generateText(work);
    assert.equal(text, "It rains.");
    assert.deepEqual(called, ["Paris", "Rome", "Paris", "Rome"]);
    assert.equal(steps.length, 4);
    assert.equal(steps[0].finishReason, "tool-calls");
    if (!name.startsWith("openai")) assert.equal(reasoningText, "I follow the plan."); // that one reads summaries alone
  },

  async whatIsStreamedIsTheSame() {
    const errors = [];
    const result = streamText({ ...work, onError: ({ error }) => errors.push(error) });
    let text = "";
    for await (const part of result.textStream) text += part;
    assert.deepEqual(errors, []);
    assert.equal(text, "It rains.");
    assert.deepEqual(called, ["Paris", "Rome", "Paris", "Rome"]);
    const usage = await result.totalUsage;
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  },

  async anAnswerHasTheFormOfASchema() {
    const { output } = await generateText({
      model: work.model,
      prompt: "Follow plan:object.",
      output: Output.object({ schema: asked }),
      maxRetries: 0,
    });
    assert.deepEqual(output, { city: "Rome", days: 2 });
  },
};

for (const [program, run] of Object.entries(programs)) {
  console.log(program);
  called = [];
  await run();
}
