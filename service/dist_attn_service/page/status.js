/** Looks at what service and engine are doing: often while something is under way, seldom else, never when unseen. */

import { ApiError } from "./api/http.js";

const BUSY_MS = 700;
const IDLE_MS = 5000;

/** Tells `seen` of each look: the status, or the error. */
export class StatusWatch {
  /** @param {() => import("./api/http.js").Api} api @param {(status: any | null, error: unknown) => void} seen */
  constructor(api, seen) {
    this.api = api;
    this.seen = seen;
    this.busy = false;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => !document.hidden && this.look());
  }

  /** @param {boolean} busy */
  hurry(busy) {
    if (busy === this.busy) return;
    this.busy = busy;
    this.look();
  }

  async look() {
    clearTimeout(this.timer);
    const turn = (this.timer = Number(setTimeout(() => this.look(), this.busy ? BUSY_MS : IDLE_MS)));
    if (document.hidden) return;
    try {
      const status = await this.api().json("/v1/status");
      if (turn === this.timer || this.busy) this.seen(status, null);
    } catch (error) {
      // A key of no administrator may not see it; then the model's card says at least that somebody answers.
      if (error instanceof ApiError && error.code === "admin_key_needed") this.seen(null, null);
      else this.seen(null, error);
    }
  }
}
