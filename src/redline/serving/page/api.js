// Requests to the server, and sentences for everything that can go wrong with them.

import { readEvents } from "./events.js";

// `isKey` means that the API key is missing or wrong.
export class ApiError extends Error {
  constructor(message, { status = 0, isKey = false } = {}) {
    super(message);
    Object.assign(this, { status, isKey });
  }
}

const LOST = "The connection was lost before the answer was complete.";

// Addresses are relative to the page, so that it also works below a path of a proxy.
const address = (path) => new URL(path, document.baseURI);
const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function request(path, key, options = {}) {
  let response;
  try {
    response = await fetch(address(path), { cache: "no-store", ...options, headers: { ...headers(key), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Check that it is running, and try again.");
  }
  if (!response.ok) throw await problem(response);
  return response;
}

async function problem(response) {
  let said = "";
  try {
    const body = await response.json();
    said = String(body?.error?.message ?? body?.message ?? body?.detail ?? "");
  } catch { /* Not JSON: the status has to do. */ }
  const status = response.status, detail = said ? ` The server says: ${said}` : "";
  if (status === 401 || status === 403)
    return new ApiError(`The server needs an API key, or refuses the one in the settings.${detail}`, { status, isKey: true });
  if (status === 429) return new ApiError(`The server is busy (429). Try again ${soon(response)}.${detail}`, { status });
  if (status === 503)
    return new ApiError(`The server is not ready (503): it is starting, restarting or shutting down. Try again ${soon(response)}.${detail}`, { status });
  return new ApiError(said ? `${said} (${status})` : `The server answered with the error ${status}.`, { status });
}

function soon(response) {
  const seconds = Number(response.headers.get("Retry-After"));
  return seconds > 0 ? `in ${Math.ceil(seconds)} s` : "in a moment";
}

export async function listModels(key) {
  const body = await (await request("v1/models", key)).json();
  return (body.data || []).map((model) => String(model.id));
}

export async function readMetrics(key, signal) {
  return (await request("metrics", key, { signal })).text();
}

// Yields { text, reasoning, finish, usage } as they arrive. Throws ApiError, or AbortError after `signal`.
export async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let isFinished = false;
  try {
    for await (const { name, data } of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parse(data);
      if (name === "error" || chunk.error) throw new ApiError(String(chunk.error?.message ?? chunk.message ?? "The server reported an error."));
      const choice = chunk.choices?.[0], delta = choice?.delta ?? {};
      if (choice?.finish_reason) isFinished = true;
      yield {
        text: delta.content ?? "", reasoning: delta.reasoning_content ?? delta.reasoning ?? "",
        finish: choice?.finish_reason ?? "", usage: chunk.usage ?? null,
      };
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(LOST);
  }
  if (!isFinished) throw new ApiError(LOST);
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server sent an answer that is not valid JSON.");
  }
}
