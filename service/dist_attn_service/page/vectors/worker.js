/** The worker: takes a document's rows from the service, keeps them, indexes their words, and computes what is drawn. */

import { DocumentText } from "../api/documents.js";
import { Api, again, ApiError, sentence, wasStopped, wordsOf } from "../api/http.js";
import { jsonLines } from "../api/streams.js";
import { nearest, principalPlane, selfSimilarity } from "./geometry.js";
import { Rows } from "./rows.js";
import { fused, Words } from "./words.js";

const TELL_MS = 120;
const INDEXED_BYTES = 128 << 10; // of the text at a time, so that nothing waits for long
/** What a job waits out, or another process goes on with. */
const PASSING = new Set(["stopping", "engine_not_ready", "engine_unreachable", "overloaded"]);

let rows = new Rows();
let words = new Words();
/** @type {DocumentText | null} */
let text = null;
/** @type {Promise<void> | null} */
let indexing = null;
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
  words = new Words();
  text = new DocumentText(api, stored, file);
  indexing = null;
  components = [];
  let toldAt = 0;
  const tell = () => {
    const last = kept.count ? kept.range(kept.count - 1) : { stop: 0, end: 0 };
    postMessage({ event: "rows", job, rows: kept.count, tokens: last.stop, bytes: last.end });
    toldAt = performance.now();
    index().catch(() => undefined); // whoever asks for words tries again, and hears why not
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

/** Index the words of the rows that are here. @returns {Promise<void>} */
function index() {
  const mine = (indexing ??= indexed(rows, words, text).finally(() => {
    if (indexing === mine) indexing = null;
  }));
  return mine;
}

/** @param {Rows} rows @param {Words} words @param {DocumentText | null} text */
async function indexed(rows, words, text) {
  while (text && words.lengths.length < rows.count && !following.signal.aborted) {
    const ranges = [rows.range(words.lengths.length)];
    for (let next = ranges[0].row + 1; next < rows.count && rows.range(next).end - ranges[0].begin <= INDEXED_BYTES; next += 1) {
      ranges.push(rows.range(next));
    }
    for (const passage of await text.passages(ranges)) words.push(passage);
  }
}

/** @param {{asked: string, vector: number[], weight: number, most: number}} query */
async function find({ asked, vector, weight, most }) {
  await index();
  return { hits: fused(words.scores(asked), nearest(rows, vector, rows.count), weight, most), words: words.telling(asked) };
}

/** What the page may ask for. @type {Record<string, (question: any) => any>} */
const answers = {
  follow,
  stop: () => following.abort(),
  clear: () => {
    following.abort();
    rows = new Rows();
    words = new Words();
    text = null;
    components = [];
  },
  map: ({ cells, expected }) => selfSimilarity(rows, cells, expected),
  plane: ({ points }) => {
    const plane = principalPlane(rows, points, components);
    components = plane.components;
    return { every: plane.every, places: plane.places };
  },
  find,
  like: ({ row, most }) => nearest(rows, rows.vector(row), most, row).map(({ row, cosine }) => ({ row, score: cosine })),
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
