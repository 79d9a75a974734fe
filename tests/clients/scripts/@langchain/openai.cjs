const { ChatOpenAI, OpenAIEmbeddings } = require("@langchain/openai");
const { HISTORY, Job, JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, TEXTS, V1, report } = require("case.cjs");

async function main() {
  const where = { model: MODEL, apiKey: KEY, configuration: { baseURL: V1 } };
  const chat = new ChatOpenAI({ ...where, temperature: 0, maxTokens: MAX_TOKENS });
  const typed = new ChatOpenAI({ ...where, temperature: 0, maxTokens: JOB_MAX_TOKENS });
  let stream = "";
  let usage = 0;
  for await (const chunk of await chat.stream(PROMPT)) {
    stream += chunk.content;
    usage += chunk.usage_metadata?.output_tokens ?? 0;
  }
  report({
    text: (await chat.invoke(PROMPT)).content,
    stream: stream,
    usage: usage,
    structured: await typed.withStructuredOutput(Job, { method: "jsonSchema" }).invoke(JOB_PROMPT),
    embeddings: await new OpenAIEmbeddings(where).embedDocuments(TEXTS),
    tool_history: (await chat.invoke(HISTORY)).content,
  });
}

main();
