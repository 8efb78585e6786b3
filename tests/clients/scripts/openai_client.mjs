// Goes through what programs do with the openai client, and prints what came of it as one JSON object.
import OpenAI from 'openai';

const url = process.argv[2];
const model = 'scripted-1';
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
const ask = (content) => [{ role: 'user', content }];

async function failure(action) {
  try {
    await action();
  } catch (error) {
    const { status, code, param, type, requestID } = error;
    return { kind: error.constructor.name, message: error.message, status, code, param, type, requestID };
  }
  return null;
}

const scenarios = {
  async whole() {
    return await client.chat.completions.create({ model, messages: ask('unicode') });
  },

  async streamed() {
    const chunks = [];
    const stream = await client.chat.completions.create({
      model, messages: ask('unicode'), stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) chunks.push(chunk);
    return chunks;
  },

  async helper() {
    const deltas = [];
    const runner = client.chat.completions
      .stream({ model, messages: ask('unicode'), logprobs: true, top_logprobs: 1, stream_options: { include_usage: true } })
      .on('content', (delta) => deltas.push(delta));
    const final = await runner.finalChatCompletion();
    return { deltas, final, content: await runner.finalContent(), usage: await runner.totalUsage() };
  },

  async two_choices() {
    const messages = ask('plain');
    const whole = await client.chat.completions.create({ model, messages, n: 2 });
    const texts = ['', ''];
    for await (const chunk of await client.chat.completions.create({ model, messages, n: 2, stream: true })) {
      for (const choice of chunk.choices) texts[choice.index] += choice.delta.content ?? '';
    }
    return { whole, texts };
  },

  async completions() {
    const prompt = ['unicode', 'plain'];
    const whole = await client.completions.create({ model, prompt, max_tokens: 400, logprobs: 2 });
    const texts = ['', ''];
    for await (const chunk of await client.completions.create({ model, prompt, max_tokens: 400, stream: true })) {
      for (const choice of chunk.choices) texts[choice.index] += choice.text;
    }
    return { whole, texts };
  },

  async models() {
    const names = [];
    for await (const entry of client.models.list()) names.push(entry.id);
    return { names, one: await client.models.retrieve(model) };
  },

  async response_headers() {
    const { data, response, request_id } = await client.chat.completions
      .create({ model, messages: ask('plain') }, { headers: { 'x-request-id': 'mine-1' } })
      .withResponse();
    return { text: data.choices[0].message.content, type: response.headers.get('content-type'), request_id };
  },

  async errors() {
    const chat = (fields) => () => client.chat.completions.create({ model, messages: ask('plain'), ...fields });
    return {
      bad_value: await failure(chat({ temperature: 9 })),
      bad_value_streamed: await failure(chat({ temperature: 9, stream: true })),
      no_model: await failure(chat({ model: 'nobody' })),
      no_route: await failure(() => client.post('/nowhere', { body: {} })),
      too_long: await failure(chat({ messages: ask('x'.repeat(100_000)) })),
      engine: await failure(chat({ messages: ask('faulty at once') })),
    };
  },

  async fault_in_a_stream() {
    let text = '';
    const failed = await failure(async () => {
      const stream = await client.chat.completions.create({ model, messages: ask('faulty later'), stream: true });
      for await (const chunk of stream) text += chunk.choices[0].delta.content ?? '';
    });
    return { text, failed };
  },

  async abort() {
    let text = '';
    const stream = await client.chat.completions.create({ model, messages: ask('slow'), stream: true });
    for await (const chunk of stream) {
      text += chunk.choices[0].delta.content ?? '';
      if (text.length >= 2) stream.controller.abort();
    }
    return { text };
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
