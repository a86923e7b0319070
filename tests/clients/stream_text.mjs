// One call of the AI SDK's streamText, as an application makes it: node stream_text.mjs API URL KEY PROMPT
// Prints what the application got as JSON; exits with 1 if it got an error.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

// The packages are in the folder that $CLIENTS names, not beside this file.
const require = createRequire(`${process.env.CLIENTS}/package.json`)
const load = (name) => import(pathToFileURL(require.resolve(name)))
const { jsonSchema, stepCountIs, streamText, tool } = await load('ai')
const { createAnthropic } = await load('@ai-sdk/anthropic')
const { createOpenAI } = await load('@ai-sdk/openai')
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible')

globalThis.AI_SDK_LOG_WARNINGS = false
const [api, url, apiKey, prompt] = process.argv.slice(2)
const baseURL = `${url}/v1`
const models = {
  chat: () => createOpenAI({ baseURL, apiKey }).chat('fake'),
  compatible: () => createOpenAICompatible({ name: 'numa-launcher', baseURL, apiKey })('fake'),
  responses: () => createOpenAI({ baseURL, apiKey }).responses('fake'),
  messages: () => createAnthropic({ baseURL, apiKey })('fake'),
}
const weather = tool({
  description: 'The weather of a city',
  inputSchema: jsonSchema({ type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }),
  execute: async ({ city }) => `rain in ${city}`,
})

const got = { text: '', tools: [], errors: [], finish: null }
const stream = streamText({
  model: models[api](), prompt, tools: { weather }, stopWhen: stepCountIs(3), maxOutputTokens: 99, onError: () => {},
})
for await (const part of stream.fullStream) {
  if (part.type === 'text-delta') got.text += part.text
  if (part.type === 'tool-result') got.tools.push(part.output)
  if (part.type === 'finish') got.finish = part.finishReason
  if (part.type === 'error') {
    const { name, message, isRetryable, statusCode } = part.error
    got.errors.push({ name, message, retryable: isRetryable, status: statusCode })
  }
}
console.log(JSON.stringify(got))
process.exitCode = got.errors.length > 0 ? 1 : 0
