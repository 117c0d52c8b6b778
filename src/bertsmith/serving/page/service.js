// What the page asks of the service, with the key where one is needed, and its errors as the sentences they are.

const KEY = "bertsmith-key";

export const key = {
  get value() { return sessionStorage.getItem(KEY) || ""; },
  set value(given) {
    if (given) sessionStorage.setItem(KEY, given);
    else sessionStorage.removeItem(KEY);
  },
};

export class Refusal extends Error {
  constructor(status, sentence, retryAfter) {
    super(sentence);
    Object.assign(this, { status, retryAfter });
  }
}

function sentenceOf(body, status) {
  const said = body?.error?.message ?? body?.message ?? body?.error ?? body?.detail;
  if (typeof said === "string") return said;
  if (Array.isArray(said) && said.length && said[0].msg) return said.map(one => one.msg).join("; ");
  return `The service answered with status ${status}.`;
}

async function call(path, options = {}) {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}),
    ...(key.value ? { Authorization: `Bearer ${key.value}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The service does not answer. Is it still running?");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refusal(response.status, sentenceOf(body, response.status),
    response.headers.get("Retry-After"));
  return body;
}

export const described = () => call("explore");
export const live = signal => call("live", { signal });
export const explore = (asked, signal) => call("explore", { method: "POST", body: JSON.stringify(asked), signal });
