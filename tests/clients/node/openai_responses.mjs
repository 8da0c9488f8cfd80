// openai's Responses: a long stream, and a tool with its output.
import OpenAI from "openai";

const [, , url, model, what, asked, maxTokens] = process.argv;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const say = (value) => console.log(JSON.stringify(value));

if (what === "stream") {
  const stream = client.responses.stream({ model, max_output_tokens: Number(maxTokens), temperature: 0, input: asked });
  stream.on("response.output_text.delta", (event) => say({ piece: event.delta }));
  const response = await stream.finalResponse();
  say({ text: response.output_text, reason: response.status });
} else {
  const tools = [
    {
      type: "function",
      name: "get_weather",
      description: "The weather of a city",
      strict: true,
      parameters: {
        type: "object",
        properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  ];
  const input = [{ role: "user", content: asked }];
  const said = await client.responses
    .stream({ model, max_output_tokens: Number(maxTokens), input, tools, tool_choice: "required" })
    .finalResponse();
  const calls = said.output.filter((item) => item.type === "function_call");
  const outputs = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "20 degrees" }));
  const last = await client.responses.create({
    model,
    max_output_tokens: 5,
    tools,
    input: [...input, ...said.output, ...outputs],
  });
  say({ cities: calls.map((call) => JSON.parse(call.arguments).city), reason: last.status });
}
