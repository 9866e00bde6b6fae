/** Answers that come bit by bit: lines of JSON, and server-sent events. */

import { ApiError, wasStopped } from "./http.js";

/** The lines of a body. @param {Response} response @returns {AsyncGenerator<string>} */
async function* textLines(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (held + value).split("\n");
      held = parts.pop() ?? "";
      yield* parts;
    }
  } catch (error) {
    if (wasStopped(error)) throw error;
    throw new ApiError("The connection broke off.", { retry: true });
  } finally {
    reader.cancel().catch(() => undefined);
  }
  if (held) yield held;
}

/** Each line as JSON. @param {Response} response @returns {AsyncGenerator<any>} */
export async function* jsonLines(response) {
  for await (const line of textLines(response)) {
    if (line.trim()) yield parsed(line);
  }
}

/**
 * Server-sent events: name and data. @param {Response} response
 * @returns {AsyncGenerator<{event: string, data: any}>}
 */
export async function* serverEvents(response) {
  let event = "message";
  for await (const line of textLines(response)) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield { event, data: parsed(data) };
    } else if (!line.trim()) event = "message";
  }
}

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError("The answer broke off in the middle of a line.", { retry: true });
  }
}
