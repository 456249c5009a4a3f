// The gateway's API as the page uses it.

import { events } from "./events.js";

export const TOP_TOKENS = 5;
const HTTP_BAD_REQUEST = 400;

/** An answer that is an error. `status`: of HTTP, 0 within a stream. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const authorization = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** Calls `path` and returns the response. Throws `ApiError` for a status that is an error. */
export async function call(path, key, { method = "GET", body, headers = {}, signal } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method, signal, cache: "no-store", credentials: "omit", redirect: "error", body: body === undefined ? undefined : JSON.stringify(body),
      headers: { ...authorization(key), ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway does not answer. Is it running?", 0);
  }
  if (response.ok) return response;
  let message = `The gateway answers with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* The status says it. */ }
  throw new ApiError(String(message), response.status);
}

/** Returns the models that are served: `[{id, versions}]`, the versions of the weights as "INCARNATION.STEP". */
export async function listModels(key) {
  const { data } = await (await call("/v1/models", key)).json();
  return data.map(({ id, weight_versions: versions = [] }) => ({ id, versions }));
}

/** Returns path and body of the request for the next answer. `plain`: the last message alone is the prompt, for models that have no chat template. */
export function requestOf({ model, messages, system, sampling, probabilities, plain }) {
  const common = { model, stream: true, stream_options: { include_usage: true }, ...sampling };
  if (plain) {
    return ["/v1/completions", { ...common, prompt: messages.at(-1).content, ...(probabilities ? { logprobs: TOP_TOKENS } : {}) }];
  }
  const opening = system ? [{ role: "system", content: system }] : [];
  const tops = probabilities ? { logprobs: true, top_logprobs: TOP_TOKENS } : {};
  return ["/v1/chat/completions", { ...common, messages: [...opening, ...messages], ...tops }];
}

/**
 * Yields the parts of an answer as they come: `{text, reasoning, tokens, versions, finish, usage, isPlain}`, each optional.
 * `format`: "chat", "plain", or "auto", with which a model that has no chat template is asked again with plain text.
 */
export async function* answers(request, { key, signal, format }) {
  let plain = format === "plain";
  for (;;) {
    const [path, body] = requestOf({ ...request, plain });
    let response;
    try {
      response = await call(path, key, { method: "POST", body, signal });
    } catch (error) {
      if (format !== "auto" || plain || error.status !== HTTP_BAD_REQUEST || !/chat.?template/i.test(error.message)) throw error;
      plain = true;
      continue;
    }
    if (plain) yield { isPlain: true };
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      yield part(JSON.parse(data));
    }
    throw new ApiError("The answer broke off.", 0);
  }
}

/** Returns what one event adds to the answer. Throws `ApiError` for one that is an error. */
export function part(event) {
  if (event.error) throw new ApiError(String(event.error.message ?? "The answer broke off."), 0);
  const choice = event.choices?.[0];
  const delta = choice?.delta;
  return {
    text: delta?.content ?? choice?.text ?? "",
    reasoning: delta?.reasoning ?? delta?.reasoning_content ?? "",
    tokens: tokensOf(choice?.logprobs),
    versions: (event.weight_versions ?? []).map((version) => version.join(".")),
    finish: choice?.finish_reason ?? null,
    usage: event.usage ?? null,
  };
}

/** Returns `[{text, logprob, top: [[text, logprob]]}]` for the log-probabilities of a chat or of a completion, most likely first. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  const sorted = (pairs) => pairs.sort((one, other) => other[1] - one[1]);
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => (
      { text: token, logprob, top: sorted((top ?? []).map((each) => [each.token, each.logprob])) }
    ));
  }
  return (logprobs.tokens ?? []).map((text, number) => (
    { text, logprob: logprobs.token_logprobs[number], top: sorted(Object.entries(logprobs.top_logprobs?.[number] ?? {})) }
  ));
}
