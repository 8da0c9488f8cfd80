// @anthropic-ai/sdk: a long stream, and a tool with its result.
import Anthropic from "@anthropic-ai/sdk";

const [, , url, model, what, asked, maxTokens] = process.argv;
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const say = (value) => console.log(JSON.stringify(value));

if (what === "stream") {
  const stream = client.messages.stream({
    model,
    max_tokens: Number(maxTokens),
    temperature: 0,
    messages: [{ role: "user", content: asked }],
  });
  stream.on("text", (piece) => say({ piece }));
  const message = await stream.finalMessage();
  say({ text: message.content.map((block) => block.text).join(""), reason: message.stop_reason });
} else {
  const tools = [
    {
      name: "get_weather",
      description: "The weather of a city",
      strict: true,
      input_schema: {
        type: "object",
        properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  ];
  const messages = [{ role: "user", content: asked }];
  const said = await client.messages
    .stream({ model, max_tokens: Number(maxTokens), messages, tools, tool_choice: { type: "any" } })
    .finalMessage();
  const calls = said.content.filter((block) => block.type === "tool_use");
  const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "20 degrees" }));
  const last = await client.messages.create({
    model,
    max_tokens: 5,
    tools,
    messages: [...messages, { role: "assistant", content: said.content }, { role: "user", content: results }],
  });
  say({ cities: calls.map((call) => call.input.city), reason: last.stop_reason });
}
