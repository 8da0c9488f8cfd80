// Vercel's AI SDK with a provider: a long stream, and a tool whose result is answered.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [, , url, model, what, asked, maxTokens, provider] = process.argv;
const makers = { anthropic: createAnthropic, openai: createOpenAI };
const served = makers[provider]({ baseURL: `${url}/v1`, apiKey: "none" })(model);
const say = (value) => console.log(JSON.stringify(value));

if (what === "stream") {
  const result = streamText({
    model: served,
    maxOutputTokens: Number(maxTokens),
    temperature: 0,
    maxRetries: 0,
    prompt: asked,
    onError: ({ error }) => { throw error; },
  });
  for await (const piece of result.textStream) say({ piece });
  say({ text: await result.text, reason: await result.finishReason });
} else {
  const cities = [];
  const tools = {
    get_weather: tool({
      description: "The weather of a city",
      inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
      strict: true,
      execute: async ({ city }) => {
        cities.push(city);
        return "20 degrees";
      },
    }),
  };
  const result = await generateText({
    model: served,
    maxOutputTokens: Number(maxTokens),
    maxRetries: 0,
    prompt: asked,
    tools,
    stopWhen: stepCountIs(2),
    providerOptions: { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  });
  say({ cities, reason: result.finishReason });
}
