/** Sessions: what the model knows of a text, kept by the service between requests. */

import { again, ApiError, pause, sentence } from "./http.js";
import { jsonLines, serverEvents } from "./streams.js";

const PIECE_BYTES = 96 << 10;
const BUSY_SECONDS = 0.5;
const BUSY_TRIES = 40;

/** All sessions of this key. @param {import("./http.js").Api} api @returns {Promise<any[]>} */
export async function listSessions(api) {
  const sessions = [];
  for (let after = ""; ; ) {
    const page = await api.json(`/v1/sessions?limit=100${after ? `&after=${encodeURIComponent(after)}` : ""}`);
    sessions.push(...page.data);
    if (!page.has_more || sessions.length >= 1000) return sessions;
    after = page.last_id;
  }
}

/** @param {import("./http.js").Api} api @param {string} name @returns {Promise<any>} */
export const createSession = (api, name) => api.json("/v1/sessions", { method: "POST", json: { name } });

/** @param {import("./http.js").Api} api @param {string} id @returns {Promise<any>} */
export const endSession = (api, id) => api.send(`/v1/sessions/${id}`, { method: "DELETE" });

/** @param {import("./http.js").Api} api @param {string} id @param {number} position @param {string} name @returns {Promise<any>} */
export const forkSession = (api, id, position, name) =>
  api.json(`/v1/sessions/${id}/fork`, { method: "POST", json: { position, name } });

/**
 * Append a text in pieces that end before a blank, each of them once however often it is sent.
 * @param {import("./http.js").Api} api @param {any} session @param {Blob} text
 * @param {{signal?: AbortSignal, seen?: (position: number) => void, onRetry?: (error: ApiError | null) => void}} [options]
 * @returns {Promise<number>} where the session stands then
 */
export async function appendText(api, session, text, options = {}) {
  let position = session.position;
  for (let at = 0; at < text.size; ) {
    const bytes = new Uint8Array(await text.slice(at, at + PIECE_BYTES).arrayBuffer());
    const count = at + bytes.length < text.size ? cut(bytes) : bytes.length;
    const name = `page-${position}-${at}-${count}-${text.size}`;
    position = await again(() => appendPiece(api, session.id, bytes.subarray(0, count), position, name, options), {
      signal: options.signal,
      onRetry: options.onRetry,
    });
    at += count;
    options.seen?.(position);
  }
  return position;
}

/**
 * Append a stored file. The service reads it to its end whoever leaves, and once however often it is asked: where that is
 * under way already it is waited for. @param {import("./http.js").Api} api @param {string} id @param {string} file
 * @param {{signal: AbortSignal, seen: (position: number) => void}} options @returns {Promise<number>} where the session stands then
 */
export async function appendFile(api, id, file, { signal, seen }) {
  const asked = { method: "POST", json: { file_id: file, priority: "low" }, headers: { "idempotency-key": `page-${file}` }, signal };
  const look = async () => {
    seen((await api.json(`/v1/sessions/${id}`, { signal })).position);
    await pause(BUSY_SECONDS, signal);
  };
  return again(async () => appended(await busyAgain(() => api.send(`/v1/sessions/${id}/append`, asked), look, Infinity), seen), { signal });
}

/** Where to cut: before the last blank, never inside a character. @param {Uint8Array} bytes */
function cut(bytes) {
  for (let at = bytes.length - 1; at > bytes.length / 2; at -= 1) if (bytes[at] === 32 || bytes[at] === 10) return at;
  let at = bytes.length;
  while (at > 1 && (bytes[at - 1] & 0xc0) === 0x80) at -= 1;
  return at > 1 ? at - 1 : bytes.length;
}

/**
 * @param {import("./http.js").Api} api @param {string} id @param {Uint8Array<ArrayBuffer>} bytes @param {number} position
 * @param {string} name @param {{signal?: AbortSignal, seen?: (position: number) => void}} options @returns {Promise<number>}
 */
async function appendPiece(api, id, bytes, position, name, { signal, seen }) {
  const headers = { "content-type": "application/octet-stream", "idempotency-key": name };
  const path = `/v1/sessions/${id}/append?expected_position=${position}`;
  const response = await busyAgain(() => api.send(path, { method: "POST", body: bytes, headers, signal }));
  return appended(response, seen);
}

/** The lines of an append to its end. @param {Response} response @param {(position: number) => void} [seen] @returns {Promise<number>} */
async function appended(response, seen) {
  for await (const line of jsonLines(response)) {
    if (line.object === "session.append") return line.position;
    if (line.object === "error") throw new ApiError(sentence(line.error.message), { retry: line.error.type === "server_error" });
    seen?.(line.position);
  }
  throw new ApiError("The connection broke off.", { retry: true });
}

/**
 * Let the model go on with a session. @param {import("./http.js").Api} api @param {string} id
 * @param {{max_tokens: number, temperature: number}} options @param {AbortSignal} signal
 * @returns {AsyncGenerator<{text: string, reason: string | null, usage: any, session: any}>}
 */
export async function* generate(api, id, options, signal) {
  const json = { ...options, stream: true };
  const response = await busyAgain(() => api.send(`/v1/sessions/${id}/generate`, { method: "POST", json, signal }));
  let ended = false;
  for await (const { data } of serverEvents(response)) {
    if (data.error) throw new ApiError(sentence(data.error.message), { code: data.error.code });
    const choice = data.choices?.[0];
    ended ||= Boolean(data.session);
    yield { text: choice?.text ?? "", reason: choice?.finish_reason ?? null, usage: data.usage, session: data.session };
  }
  if (!ended) throw new ApiError("The connection broke off; what was drawn is kept in the session.");
}

/**
 * Wait for a session that is being written to. @template T @param {() => Promise<T>} work @param {() => Promise<void>} [wait] between two tries
 * @param {number} [most] tries @returns {Promise<T>}
 */
async function busyAgain(work, wait = () => pause(BUSY_SECONDS), most = BUSY_TRIES) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof ApiError) || error.code !== "session_busy" || tries > most) throw error;
      await wait();
    }
  }
}
