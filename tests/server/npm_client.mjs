// Smoke test of the official `openai` package of npm. Run by test_npm_client.py.
import { createRequire } from "node:module";
import assert from "node:assert/strict";

const [, , packages, url] = process.argv;
const OpenAI = createRequire(`${packages}/`)("openai").default;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "a person" }];
const request = { model: "builtin", messages, seed: 1, max_tokens: 80 };

const whole = await client.chat.completions.create(request);
assert.ok(whole.choices[0].message.content.length > 0);
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

const stream = await client.chat.completions.create({
  ...request,
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
assert.deepEqual([usage.prompt_tokens, usage.completion_tokens], [whole.usage.prompt_tokens, whole.usage.completion_tokens]);

const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 8 }, age: { type: "integer", maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...request,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "person", schema } },
});
assert.deepEqual(Object.keys(JSON.parse(structured.choices[0].message.content)), ["name", "age"]);

const response = await client.responses.create({ model: "builtin", input: "a person", max_output_tokens: 20 });
assert.ok(response.output_text.length > 0);

await assert.rejects(
  client.chat.completions.create({ ...request, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(
  client.chat.completions.create({ ...request, model: "absent" }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
console.log("ok");
