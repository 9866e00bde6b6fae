/** Requests to the service: the key goes along, refusals become errors in words, what may pass by is tried again. */

/** A request that did not succeed; `message` is for people. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string, retry?: boolean, wait?: number, facts?: Record<string, any>}} [about]
   *   `retry`: the same request may succeed later; `wait`: seconds until then
   */
  constructor(message, about = {}) {
    super(message);
    this.status = about.status ?? 0;
    this.code = about.code ?? "network";
    this.retry = about.retry ?? false;
    this.wait = about.wait ?? 0;
    this.facts = about.facts ?? {};
  }
}

const PASSING = new Set([408, 429, 500, 502, 503, 504]);
const LONGEST_WAIT = 8;
const TRIES = 12;

/** Whether somebody ended this on purpose. @param {unknown} error */
export const wasStopped = (error) => error instanceof DOMException && error.name === "AbortError";

const FINAL = new Set(["unsupported_media_type", "invalid_utf8", "empty_input", "body_too_large", "context_length_exceeded"]);

/** Whether the document itself is refused, however often it is sent. @param {unknown} error */
export const isFinal = (error) => error instanceof ApiError && FINAL.has(error.code);

/** The words for any error. @param {unknown} error @returns {string} */
export const wordsOf = (error) => (error instanceof Error ? error.message : String(error));

/** The public API of the service that this page came from. */
export class Api {
  /** @param {string} [key] */
  constructor(key = "") {
    this.key = key;
  }

  /**
   * One request. @param {string} path @param {RequestInit & {json?: unknown}} [options]
   * @returns {Promise<Response>} an answer that is ok
   */
  async send(path, options = {}) {
    const { json, ...init } = options;
    const headers = new Headers(init.headers);
    if (this.key) headers.set("authorization", `Bearer ${this.key}`);
    if (json !== undefined) {
      headers.set("content-type", "application/json");
      init.body = JSON.stringify(json);
    }
    /** @type {Response} */
    let response;
    try {
      response = await fetch(path, { cache: "no-store", credentials: "omit", ...init, headers });
    } catch (error) {
      if (wasStopped(error)) throw error;
      throw new ApiError("The service cannot be reached. It may be restarting.", { retry: true });
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  /** The JSON of an answer. @param {string} path @param {RequestInit & {json?: unknown}} [options] @returns {Promise<any>} */
  async json(path, options = {}) {
    const response = await this.send(path, options);
    try {
      return await response.json();
    } catch (error) {
      if (wasStopped(error)) throw error;
      throw new ApiError("The answer broke off before its end.", { retry: true });
    }
  }
}

/** @param {Response} response @returns {Promise<ApiError>} */
async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.detail ?? body.error?.message ?? `The service answered ${response.status} ${response.statusText}.`;
  const again = response.headers.get("x-should-retry");
  const retry = again === "true" || (again !== "false" && PASSING.has(response.status));
  return new ApiError(sentence(said), {
    status: response.status,
    code: body.error?.code ?? String(response.status),
    retry,
    wait: Number(response.headers.get("retry-after") ?? 0),
    facts: body,
  });
}

/** The service's words as a sentence. @param {string} words */
export function sentence(words) {
  const begun = words.charAt(0).toUpperCase() + words.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

/** @param {number} seconds @param {AbortSignal} [signal] @returns {Promise<void>} */
export function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, 1000 * seconds);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}

/**
 * Do something until it succeeds or fails for good. Tries are counted anew whenever `come` has grown since the last.
 * @template T
 * @param {() => Promise<T>} work
 * @param {{signal?: AbortSignal, come?: () => number, onRetry?: (error: ApiError | null, seconds: number) => void}} [options]
 *   `onRetry` hears of each failure that is waited out, and null when it is over
 * @returns {Promise<T>}
 */
export async function again(work, options = {}) {
  let tries = 0;
  let before = options.come?.() ?? 0;
  for (;;) {
    try {
      const value = await work();
      options.onRetry?.(null, 0);
      return value;
    } catch (error) {
      if (!(error instanceof ApiError) || !error.retry) throw error;
      const now = options.come?.() ?? 0;
      tries = now > before ? 1 : tries + 1;
      before = now;
      if (tries > TRIES) throw error;
      const seconds = Math.min(Math.max(error.wait, 0.25 * 2 ** (tries - 1)), LONGEST_WAIT);
      options.onRetry?.(error, seconds);
      await pause(seconds, options.signal);
    }
  }
}
