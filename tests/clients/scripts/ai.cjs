const { embedMany, generateObject, generateText, streamText } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { Job, JOB_MAX_TOKENS, JOB_PROMPT, KEY, MAX_TOKENS, MODEL, PROMPT, TEXTS, V1, report } = require("case.cjs");

async function main() {
  const foreword = createOpenAICompatible({
    name: "foreword", baseURL: V1, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
  });
  const options = { temperature: 0, maxOutputTokens: MAX_TOKENS, prompt: PROMPT };
  const streamed = streamText({ model: foreword(MODEL), ...options });
  let stream = "";
  for await (const piece of streamed.textStream) stream += piece;
  const job = await generateObject({
    model: foreword(MODEL), schema: Job, prompt: JOB_PROMPT, temperature: 0, maxOutputTokens: JOB_MAX_TOKENS,
  });
  // Its default model asks /v1/responses.
  const openai = createOpenAI({ baseURL: V1, apiKey: KEY });
  report({
    text: (await generateText({ model: foreword(MODEL), ...options })).text,
    stream: stream,
    usage: (await streamed.usage).outputTokens,
    structured: job.object,
    embeddings: (await embedMany({ model: foreword.embeddingModel(MODEL), values: TEXTS })).embeddings,
    openai_chat: (await generateText({ model: openai.chat(MODEL), ...options })).text,
  });
}

main();
