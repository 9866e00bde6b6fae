/** The worker: takes a document's rows from the service and keeps them, and computes what is drawn of them. */

import { Api, again, ApiError, sentence, wasStopped, wordsOf } from "../api/http.js";
import { jsonLines } from "../api/streams.js";
import { nearest, principalPlane, selfSimilarity } from "./geometry.js";
import { Rows } from "./rows.js";

const TELL_MS = 120;
/** What a job waits out, or another process goes on with. */
const PASSING = new Set(["stopping", "engine_not_ready", "engine_unreachable", "overloaded"]);

let rows = new Rows();
/** @type {Float32Array[]} */
let components = [];
let following = new AbortController();

/**
 * Take the rows of a job, from the first that is not here yet, until all are.
 * @param {{key: string, job: string}} wanted @returns {Promise<any>} the summary
 */
async function follow({ key, job }) {
  following.abort();
  following = new AbortController();
  const { signal } = following;
  const api = new Api(key);
  const kept = new Rows();
  rows = kept;
  components = [];
  let told = 0;
  const tell = () => {
    const last = kept.count ? kept.range(kept.count - 1) : { stop: 0, end: 0 };
    postMessage({ event: "rows", job, rows: kept.count, tokens: last.stop, bytes: last.end });
    told = performance.now();
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
        if (performance.now() - told > TELL_MS) tell();
      }
      throw new ApiError("The connection broke off.", { retry: true });
    },
    {
      signal,
      come: () => kept.count,
      told: (error, seconds) => postMessage({ event: "waiting", job, words: error && error.message, seconds }),
    },
  );
  tell();
  return summary;
}

/** What the page may ask for. @type {Record<string, (wanted: any) => any>} */
const answers = {
  follow,
  stop: () => following.abort(),
  clear: () => {
    following.abort();
    rows = new Rows();
    components = [];
  },
  map: ({ cells, expected }) => selfSimilarity(rows, cells, expected),
  plane: ({ points }) => {
    const plane = principalPlane(rows, points, components);
    components = plane.components;
    return { every: plane.every, places: plane.places };
  },
  nearest: ({ vector, most }) => nearest(rows, vector, most),
  like: ({ row, most }) => nearest(rows, rows.vector(row), most, row),
  ranges: ({ wanted }) => wanted.map((/** @type {number} */ row) => rows.range(row)),
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
