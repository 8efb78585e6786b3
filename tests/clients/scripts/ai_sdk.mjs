// Goes through what programs do with the Vercel AI SDK, and prints what came of it as one JSON object.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateText, streamText } from 'ai';

const url = process.argv[2];
globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: 'headrace', baseURL: `${url}/v1`, apiKey: 'none', includeUsage: true,
});
const chat = provider('scripted-1');
const completion = provider.completionModel('scripted-1');
const common = { model: chat, maxRetries: 0 };

function plain(usage) {
  return {
    input: usage.inputTokens, output: usage.outputTokens, total: usage.totalTokens,
    cached: usage.inputTokenDetails?.cacheReadTokens, reasoning: usage.outputTokenDetails?.reasoningTokens,
  };
}

async function failure(action) {
  try {
    await action();
  } catch (error) {
    return {
      kind: error.name, message: error.message, api: APICallError.isInstance(error),
      status: error.statusCode, retryable: error.isRetryable, body: error.responseBody,
    };
  }
  return null;
}

async function streamed(options) {
  const errors = [];
  const result = streamText({ ...common, ...options, onError: ({ error }) => errors.push(error) });
  const parts = [];
  for await (const part of result.fullStream) parts.push(part);
  const deltas = parts.filter((part) => part.type === 'text-delta').map((part) => part.text);
  const kinds = parts.map((part) => part.type);
  const end = parts.findLast((part) => part.type === 'finish');
  return {
    deltas, kinds, errors: errors.map((error) => error.message ?? JSON.stringify(error)),
    finish: end?.finishReason, usage: end && plain(end.totalUsage),
  };
}

async function generated(options) {
  const { text, finishReason, usage, response } = await generateText({ ...common, ...options });
  return { text, finish: finishReason, usage: plain(usage), id: response.id, model: response.modelId };
}

const scenarios = {
  whole: () => generated({ prompt: 'unicode' }),
  streamed: () => streamed({ prompt: 'unicode' }),

  conversation: () => generated({
    system: 'Be brief.',
    messages: [
      { role: 'user', content: 'hello' },
      { role: 'assistant', content: [{ type: 'text', text: 'Hi.' }] },
      { role: 'user', content: [{ type: 'text', text: 'plain' }] },
    ],
  }),

  cut: () => generated({ prompt: 'plain', maxOutputTokens: 5, temperature: 0, topP: 0.9, seed: 7 }),
  cut_streamed: () => streamed({ prompt: 'plain', maxOutputTokens: 5 }),
  stopped: () => generated({ prompt: 'plain', stopSequences: ['France'] }),
  own_options: () => generated({ prompt: 'plain', providerOptions: { headrace: { stop_token_ids: [32], include_stop_str_in_output: true } } }),
  completion: () => generated({ model: completion, prompt: 'unicode', maxOutputTokens: 400 }),
  completion_streamed: () => streamed({ model: completion, prompt: 'unicode', maxOutputTokens: 400 }),

  async errors() {
    return {
      bad_value: await failure(() => generateText({ ...common, prompt: 'plain', temperature: 9 })),
      no_model: await failure(() => generateText({ ...common, model: provider('nobody'), prompt: 'plain' })),
      engine: await failure(() => generateText({ ...common, prompt: 'faulty at once' })),
    };
  },

  fault_in_a_stream: () => streamed({ prompt: 'faulty later' }),
  bad_value_streamed: () => streamed({ prompt: 'plain', temperature: 9 }),

  async abort() {
    const controller = new AbortController();
    const result = streamText({ ...common, prompt: 'slow', abortSignal: controller.signal });
    const kinds = [];
    for await (const part of result.fullStream) {
      kinds.push(part.type);
      if (part.type === 'text-delta') controller.abort();
    }
    return { kinds };
  },
};

const report = {};
for (const [name, run] of Object.entries(scenarios)) {
  try {
    report[name] = await run();
  } catch (error) {
    report[name] = { unexpected: String(error?.stack ?? error) };
  }
}
process.stdout.write(JSON.stringify(report));
