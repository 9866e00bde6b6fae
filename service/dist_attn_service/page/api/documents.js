/** A document's way through the service: an estimate, a job that encodes it, its events, searches, and its text by ranges of bytes. */

import { again, ApiError, pause, sentence } from "./http.js";
import { serverEvents } from "./streams.js";

const SAMPLE_BYTES = 192 << 10;
const LONGEST_WORD = 48; // bytes of a word that are looked for beyond an edge
const HEAD_BYTES = 1024;
/** How documents begin whose text the service takes out: PDF, EPUB and DOCX files, and web pages. */
const DOCUMENT = /^%PDF-|^PK\x03\x04[^]*(?:application\/epub|word\/|Content_Types)|^(?:\xef\xbb\xbf)?\s*<(?:[^]*<)?(?:!doctype\s+html|html)[\s>]/i;
/** What files are that hold no text either, by how they begin, and what to do about it. @type {[RegExp, string, string][]} */
const OTHERS = [
  [/^PK\x03\x04[^]*opendocument|^\xd0\xcf\x11\xe0|^\{\\rtf/, "a word processor's document", "Open it there and save it as plain text (File, Save as, Plain text in UTF-8)"],
  [/^PK\x03\x04|^\x1f\x8b|^\xfd7zXZ|^\x28\xb5\x2f\xfd|^7z\xbc\xaf|^Rar!/, "an archive", "Unpack it first, and choose a text file in it"],
  [/^(?:\xff\xfe|\xfe\xff)/, "text in UTF-16 or UTF-32", "Open it in an editor and save it with the encoding UTF-8"],
  [/^(?:\x89PNG|\xff\xd8\xff|GIF8|RIFF)/, "a picture", "Read its text with a program for scanned pages (OCR)"],
];
const SPACES = new Set([...new TextEncoder().encode(" \n\r\t")]);

/**
 * What it would take; the service looks at the beginning, and refuses what is no plain text. @param {import("./http.js").Api} api @param {File} file @param {number} window
 * @returns {Promise<any>} the service's estimate
 */
export async function estimate(api, file, window) {
  const headers = { "content-type": "text/plain" };
  const body = file.slice(0, SAMPLE_BYTES);
  if (await isDocument(file)) return again(() => api.json("/v1/estimate", { method: "POST", json: { bytes: file.size, window } }));
  return again(() => api.json(`/v1/estimate?bytes=${file.size}&window=${window}`, { method: "POST", body, headers }));
}

/** @param {Blob} file @returns {Promise<string>} its first bytes, a character each */
const headOf = async (file) => String.fromCharCode(...new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer()));

/** Whether a file is a document whose text the service takes out. @param {Blob} file */
export const isDocument = async (file) => DOCUMENT.test(await headOf(file));

/**
 * Why a file cannot be read, by its beginning, with what to do about it; null where nothing speaks against it. Looks here,
 * so that nothing of a file that is refused is sent. @param {File} file @returns {Promise<string | null>}
 */
export async function whyNotText(file) {
  if (await isDocument(file)) return null;
  const bytes = new Uint8Array(await file.slice(0, SAMPLE_BYTES).arrayBuffer());
  const head = await headOf(file);
  const other = OTHERS.find(([magic]) => magic.test(head));
  if (other) return `${file.name} is ${other[1]}; this page reads plain text. ${other[2]}, and drop that here.`;
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: bytes.length < file.size });
  } catch {
    return notUtf8(file.name, head.includes("\0"));
  }
  return null;
}

/** @param {string} name @param {boolean} isBinary */
export const notUtf8 = (name, isBinary = false) =>
  isBinary
    ? `${name} holds no text; this page reads plain text: .txt, .md, .csv, .json, .xml, logs or source code.`
    : `${name} is not in UTF-8, the usual encoding of plain text. Open it in an editor, save it with the encoding UTF-8, and drop that here.`;

/**
 * Begin to encode a file; the job needs nobody from then on.
 * @param {import("./http.js").Api} api @param {string} file @param {number} window
 * @returns {Promise<string>} the job's id
 */
export async function beginEncoding(api, file, window) {
  const json = { file_id: file, window };
  const headers = { prefer: "respond-async" };
  return (await again(() => api.json("/v1/encodings", { method: "POST", json, headers }))).id;
}

/**
 * Follow a job to its end. @param {import("./http.js").Api} api @param {string} id
 * @param {(job: any) => void} seen each time that it has moved on
 * @param {AbortSignal} signal
 * @returns {Promise<any>} the job as it ended
 */
export async function followJob(api, id, seen, signal) {
  let count = 0;
  return again(
    async () => {
      const response = await api.send(`/v1/jobs/${id}/events`, { signal });
      for await (const { event, data } of serverEvents(response)) {
        count += 1;
        if (event === "error") throw new ApiError(sentence(data.error.message), { retry: true });
        const job = await api.json(`/v1/jobs/${id}`, { signal });
        seen(job);
        if (job.ended_at !== null) return job;
      }
      await pause(0.2, signal);
      throw new ApiError("The connection broke off.", { retry: true });
    },
    { signal, come: () => count },
  );
}

/**
 * Passages that answer a question. @param {import("./http.js").Api} api @param {string} job that has encoded the document, or does
 * @param {{query: string, mode: string, top_k: number}} asked @returns {Promise<any>} the service's answer
 */
export const search = (api, job, asked) => api.json("/v1/search", { method: "POST", json: { ...asked, documents: [{ job_id: job }] } });

/** Reads passages: from the file itself while the page has it, else from the service. */
export class DocumentText {
  /** @param {import("./http.js").Api} api @param {string} id of the stored file @param {Blob | null} file */
  constructor(api, id, file) {
    this.api = api;
    this.id = id;
    this.file = file;
    /** @type {Map<string, Promise<string>>} */
    this.known = new Map();
  }

  /** The text of bytes [begin, end), and the words that these cut, whole. @param {number} begin @param {number} end @returns {Promise<string>} */
  read(begin, end) {
    const name = `${begin}-${end}`;
    const known = this.known.get(name) ?? this.fetched(begin, end);
    this.known.delete(name);
    this.known.set(name, known);
    known.catch(() => this.known.delete(name));
    if (this.known.size > 300) this.known.delete(this.known.keys().next().value ?? "");
    return known;
  }

  /** @param {number} begin @param {number} end */
  async fetched(begin, end) {
    if (end <= begin) return "";
    const from = Math.max(0, begin - LONGEST_WORD);
    const bytes = new Uint8Array(await (await this.blob(from, end + LONGEST_WORD)).arrayBuffer());
    // Where a script has no spaces a passage may still begin or end inside a character.
    return new TextDecoder().decode(wholeWords(bytes, begin - from, end - from)).replace(/^\uFFFD+|\uFFFD+$/g, "");
  }

  /** Bytes [begin, end). A file that was moved or changed since is left for what the service has. @param {number} begin @param {number} end */
  async blob(begin, end) {
    if (this.file) {
      try {
        await this.file.slice(begin, begin + 1).arrayBuffer();
        return this.file.slice(begin, end);
      } catch {
        this.file = null;
      }
    }
    const range = { range: `bytes=${begin}-${end - 1}` };
    return (await this.api.send(`/v1/files/${this.id}/content`, { headers: range })).blob();
  }
}

/**
 * Bytes [begin, end), longer by what is missing of a word at either edge; as they are where no space is near.
 * @param {Uint8Array} bytes @param {number} begin @param {number} end
 */
function wholeWords(bytes, begin, end) {
  const inside = (/** @type {number} */ at) => at >= 0 && at < bytes.length && !SPACES.has(bytes[at]);
  let [first, last] = [begin, Math.min(end, bytes.length)];
  if (inside(first)) while (inside(first - 1)) first -= 1;
  if (inside(last - 1)) while (inside(last)) last += 1;
  return bytes.subarray(begin - first < LONGEST_WORD ? first : begin, last - end < LONGEST_WORD ? last : end);
}
