/** The worker: takes a document's rows from the service, keeps them, finds headings in its text, and computes what is drawn. */

import { DocumentText } from "../api/documents.js";
import { Api, again, ApiError, sentence, wasStopped, wordsOf } from "../api/http.js";
import { jsonLines } from "../api/streams.js";
import { nearest, principalPlane, selfSimilarity } from "./geometry.js";
import { Headings } from "./headings.js";
import { Rows } from "./rows.js";

const TELL_MS = 120;
const PIECE_BYTES = 128 << 10; // of the text at a time, so that nothing waits for long
/** What a job waits out, or another process goes on with. */
const PASSING = new Set(["stopping", "engine_not_ready", "engine_unreachable", "overloaded"]);

let rows = new Rows();
let headings = new Headings();
/** @type {DocumentText | null} */
let text = null;
/** @type {Promise<void> | null} */
let looking = null;
/** @type {Float32Array[]} */
let components = [];
let following = new AbortController();

/**
 * Take the rows of a job, from the first that is not here yet, until all are.
 * @param {{key: string, job: string, stored: string, file: Blob | null}} source @returns {Promise<any>} the summary
 */
async function follow({ key, job, stored, file }) {
  following.abort();
  following = new AbortController();
  const { signal } = following;
  const api = new Api(key);
  const kept = new Rows();
  rows = kept;
  headings = new Headings();
  text = new DocumentText(api, stored, file);
  looking = null;
  components = [];
  let toldAt = 0;
  const tell = () => {
    const last = kept.count ? kept.range(kept.count - 1) : { stop: 0, end: 0 };
    postMessage({ event: "rows", job, rows: kept.count, tokens: last.stop, bytes: last.end });
    toldAt = performance.now();
    look().catch(() => undefined); // whoever asks for a place tries again, and hears why not
  };
  const summary = await again(
    async () => {
      const response = await api.send(`/v1/jobs/${job}/result?format=ndjson&from_row=${kept.count}`, { signal });
      for await (const line of jsonLines(response)) {
        if (line.object === "encoding.summary") return line;
        if (line.object === "error") {
          throw new ApiError(sentence(line.error.message), { code: line.error.code, retry: PASSING.has(line.error.code) });
        }
        kept.push(line);
        if (performance.now() - toldAt > TELL_MS) tell();
      }
      throw new ApiError("The connection broke off.", { retry: true });
    },
    {
      signal,
      come: () => kept.count,
      onRetry: (error, seconds) => postMessage({ event: "waiting", job, words: error && error.message, seconds }),
    },
  );
  tell();
  return summary;
}

/** Look for headings in the text that has been read. @returns {Promise<void>} */
function look() {
  const mine = (looking ??= looked(rows, headings, text).finally(() => {
    if (looking === mine) looking = null;
  }));
  return mine;
}

/** @param {Rows} rows @param {Headings} headings @param {DocumentText | null} text */
async function looked(rows, headings, text) {
  for (;;) {
    const end = rows.count ? rows.range(rows.count - 1).end : 0;
    if (!text || headings.seen >= end || following.signal.aborted) return;
    const piece = await text.blob(headings.seen, Math.min(end, headings.seen + PIECE_BYTES));
    headings.push(new Uint8Array(await piece.arrayBuffer()));
  }
}

/** The part and the chapter of each place in bytes. @param {{places: number[]}} question */
async function under({ places }) {
  await look();
  return places.map((at) => headings.under(at));
}

/** What the page may ask for. @type {Record<string, (question: any) => any>} */
const answers = {
  follow,
  stop: () => following.abort(),
  clear: () => {
    following.abort();
    rows = new Rows();
    headings = new Headings();
    text = null;
    components = [];
  },
  map: ({ cells, expected }) => selfSimilarity(rows, cells, expected),
  plane: ({ points }) => {
    const plane = principalPlane(rows, points, components);
    components = plane.components;
    return { every: plane.every, places: plane.places };
  },
  under,
  like: ({ row, most }) => nearest(rows, rows.vector(row), most, row),
  ranges: ({ rows: places }) => places.map((/** @type {number} */ row) => rows.range(row)),
  held: () => ({ rows: rows.count, bytes: rows.bytes }),
};

addEventListener("message", async ({ data }) => {
  try {
    postMessage({ id: data.id, value: await answers[data.ask](data) });
  } catch (error) {
    const failure = error instanceof ApiError ? { code: error.code, status: error.status } : {};
    postMessage({ id: data.id, failure: { words: wordsOf(error), stopped: wasStopped(error), ...failure } });
  }
});
