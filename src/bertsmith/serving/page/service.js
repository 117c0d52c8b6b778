// Requests to the service, with the API key if one is set; errors carry the service's message.

const KEY = "bertsmith-key";

export const key = {
  get value() { return sessionStorage.getItem(KEY) || ""; },
  set value(text) {
    if (text) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
  },
};

export class ServiceError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

function errorMessage(body, status) {
  const message = body?.error?.message ?? body?.message ?? body?.error ?? body?.detail;
  if (typeof message === "string") return message;
  if (Array.isArray(message) && message.length && message[0].msg) return message.map(one => one.msg).join("; ");
  return `The service returned status ${status}.`;
}

async function call(path, options = {}) {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}),
    ...(key.value ? { Authorization: `Bearer ${key.value}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(0, "The service is not reachable. Is it still running?");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new ServiceError(response.status, errorMessage(body, response.status),
    response.headers.get("Retry-After"));
  return body;
}

export const fetchModels = () => call("explore");
export const fetchLive = signal => call("live", { signal });
export const explore = (request, signal) => call("explore", { method: "POST", body: JSON.stringify(request), signal });
