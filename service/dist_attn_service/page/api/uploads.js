/** Uploads that go on where they broke off (tus 1.0.0): pieces of a file at the byte that the service names. */

import { again, ApiError } from "./http.js";

const SMALLEST = 256 << 10;
const LARGEST = 8 << 20;
const PIECE_SECONDS = 0.4; // so often something is seen of it
const SILENT_SECONDS = 30; // a connection may be lost without a word; what has come of the piece is kept

/** @param {string} text */
const base64 = (text) => btoa(String.fromCharCode(...new TextEncoder().encode(text)));

/**
 * Announce a file. @param {import("./http.js").Api} api @param {File} file @returns {Promise<string>} the upload's id
 */
export async function beginUpload(api, file) {
  const metadata = `filename ${base64(file.name.slice(-200))},filetype ${base64("text/plain")}`;
  const headers = { "tus-resumable": "1.0.0", "upload-length": String(file.size), "upload-metadata": metadata };
  return (await api.json("/v1/uploads", { method: "POST", headers })).id;
}

/**
 * A piece is read by the browser while it is sent, never by the page; a file that cannot be read looks like a connection
 * that breaks. @param {File} file @param {number} at
 */
async function checkReadable(file, at) {
  try {
    await file.slice(at, at + 1).arrayBuffer();
  } catch {
    throw new ApiError(`${file.name} can no longer be read: it was changed, moved or removed. Choose it again.`);
  }
}

/** @param {number} at */
const pieceHeaders = (at) => ({
  "upload-offset": String(at),
  "tus-resumable": "1.0.0",
  "content-type": "application/offset+octet-stream",
});

/**
 * A browser sends a request again by itself when its connection breaks; by then a part of the first one's bytes is there,
 * and the service says that the upload stands elsewhere: look where, and go on. @param {unknown} error @returns {never}
 */
function elsewhere(error) {
  if (error instanceof ApiError && error.status === 409) error.retry = true;
  throw error;
}

/**
 * Give up what nobody answers, as if the connection had broken. @template T
 * @param {(signal: AbortSignal) => Promise<T>} work @param {AbortSignal} [signal] @returns {Promise<T>}
 */
async function answered(work, signal) {
  const silent = new AbortController();
  const timer = setTimeout(() => silent.abort(new DOMException("no answer", "TimeoutError")), 1000 * SILENT_SECONDS);
  try {
    return await work(signal ? AbortSignal.any([signal, silent.signal]) : silent.signal);
  } finally {
    clearTimeout(timer);
  }
}

/**
 * Send what is missing. @param {import("./http.js").Api} api @param {string} id @param {File} file
 * @param {{signal?: AbortSignal, sent?: (bytes: number) => void, onRetry?: (error: ApiError | null, seconds: number) => void}} [options]
 * @returns {Promise<string>} the id of the file that has become of it
 */
export async function sendUpload(api, id, file, options = {}) {
  const { signal, sent = () => undefined, onRetry } = options;
  let at = -1;
  let size = SMALLEST;
  return again(
    async () => {
      const standing = await answered((either) => api.json(`/v1/uploads/${id}`, { signal: either }), signal);
      if (standing.file) return standing.file.id;
      if (standing.status !== "pending") throw new ApiError("The upload was given up.", { status: 410 });
      if (standing.bytes !== file.size) throw new ApiError("This is not the file that the upload was begun with.");
      at = standing.received_bytes;
      sent(at);
      for (;;) {
        const began = performance.now();
        const [headers, body] = [pieceHeaders(at), file.slice(at, at + size)];
        const send = (/** @type {AbortSignal} */ either) => api.send(`/v1/uploads/${id}`, { method: "PATCH", body, headers, signal: either });
        const response = await answered(send, signal).catch(async (error) => {
          await checkReadable(file, at);
          return elsewhere(error);
        });
        at = Number(response.headers.get("upload-offset"));
        sent(at);
        const made = response.headers.get("upload-file-id");
        if (made) return made;
        const seconds = (performance.now() - began) / 1000;
        size = Math.round(Math.min(Math.max((size * PIECE_SECONDS) / Math.max(seconds, 0.01), SMALLEST), LARGEST));
      }
    },
    { signal, onRetry, come: () => at },
  );
}
