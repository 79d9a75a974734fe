const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { HISTORY, Job, JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, STORY, TEXTS, USER, V1, report } = require("case.cjs");

async function main() {
  const client = new OpenAI({ baseURL: V1, apiKey: KEY });
  const options = { model: MODEL, temperature: 0, max_tokens: MAX_TOKENS };
  const ask = async (messages) =>
    (await client.chat.completions.create({ messages, ...options })).choices[0].message.content;
  let stream = "";
  let usage = null;
  const chunks = await client.chat.completions.create({
    messages: USER, stream: true, stream_options: { include_usage: true }, ...options,
  });
  for await (const chunk of chunks) {
    stream += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage?.completion_tokens ?? usage;
  }
  const job = await client.chat.completions.parse({
    messages: [{ role: "user", content: JOB_PROMPT }],
    response_format: zodResponseFormat(Job, "job"),
    model: MODEL, temperature: 0, max_tokens: JOB_MAX_TOKENS,
  });
  const embeddings = await client.embeddings.create({ model: MODEL, input: TEXTS });
  const models = [];
  for await (const card of client.models.list()) models.push(card.id);
  report({
    text: await ask(USER),
    stream: stream,
    usage: usage,
    completion: (await client.completions.create({ prompt: STORY, ...options })).choices[0].text,
    structured: job.choices[0].message.parsed,
    embeddings: embeddings.data.map((item) => item.embedding),
    tool_history: await ask(HISTORY),
    models: models,
  });
}

main();
