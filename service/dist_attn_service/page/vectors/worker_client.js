/** The page's side of the worker: questions with promises, and news of rows that have come. */

import { ApiError } from "../api/http.js";

const SCRIPT = "/page/vectors/worker.js";

/** The worker's address, as browsers with trusted types want it: this one and no other. */
function script() {
  const types = /** @type {any} */ (globalThis).trustedTypes;
  if (!types) return SCRIPT;
  return types.createPolicy("page-worker", { createScriptURL: () => SCRIPT }).createScriptURL("");
}

/** The vectors of one document, kept beside the page so that it never stands still. */
export class WorkerClient extends EventTarget {
  constructor() {
    super();
    this.worker = new Worker(script(), { type: "module" });
    /** @type {Map<number, {resolve: (value: any) => void, reject: (error: unknown) => void}>} */
    this.open = new Map();
    this.next = 1;
    this.worker.addEventListener("message", ({ data }) => this.heard(data));
    this.worker.addEventListener("error", (event) => {
      for (const { reject } of this.open.values()) reject(new Error(event.message || "the worker of the page failed"));
      this.open.clear();
    });
  }

  /** @param {any} data */
  heard(data) {
    if (data.event) {
      this.dispatchEvent(new CustomEvent(data.event, { detail: data }));
      return;
    }
    const waiting = this.open.get(data.id);
    this.open.delete(data.id);
    if (!data.failure) waiting?.resolve(data.value);
    else if (data.failure.stopped) waiting?.reject(new DOMException("stopped", "AbortError"));
    else waiting?.reject(new ApiError(data.failure.words, data.failure));
  }

  /** @param {string} ask @param {Record<string, unknown>} [what] @returns {Promise<any>} */
  ask(ask, what = {}) {
    const id = this.next++;
    return new Promise((resolve, reject) => {
      this.open.set(id, { resolve, reject });
      this.worker.postMessage({ id, ask, ...what });
    });
  }
}
