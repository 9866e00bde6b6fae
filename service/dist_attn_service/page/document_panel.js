/** A document from the drop to the map: planned, sent, encoded, looked at; and found again after a reload. */

import { beginEncoding, DocumentText, estimate, followJob, isDocument, notUtf8, whyNotText } from "./api/documents.js";
import { ApiError, isFinal, wasStopped, wordsOf } from "./api/http.js";
import { Sending } from "./sending.js";
import { announce, byId, saveBlob, show } from "./view/dom.js";
import { bytes, duration, percent } from "./view/figures.js";
import { Notice } from "./view/notice.js";
import { PlanView, proposedWindow } from "./view/plan_view.js";
import { RunView } from "./view/run_view.js";

const FRESH = { size: 0, sent: 0, read: 0, tokens: 0, expected: 0, rows: 0, speed: null, eta: null, seconds: 0, waiting: false };
const UNFINISHED = new Set(["queued", "running"]);

/** Owns the one document that the page is about. Tells `rows` when there is more to draw, `changed` when the phase is another. */
export class DocumentPanel extends EventTarget {
  /**
   * @param {import("./api/http.js").Api} api @param {import("./view/memory.js").Memory} memory
   * @param {import("./vectors/worker_client.js").WorkerClient} worker @param {import("./recipes.js").Recipes} recipes
   */
  constructor(api, memory, worker, recipes) {
    super();
    this.api = api;
    this.memory = memory;
    this.worker = worker;
    this.recipes = recipes;
    this.sending = new Sending(api, memory);
    this.plan = new PlanView({ start: () => this.start(), cancel: () => this.reset(), window: (window) => this.estimate(window) });
    this.run = new RunView();
    this.notice = new Notice(byId("document-notice"));
    /** @type {File | null} */
    this.file = null;
    /** @type {DocumentText | null} */
    this.text = null;
    this.window = 512;
    /** Tokens that the model reads at once. */
    this.longest = Infinity;
    /** @type {import("./view/run_view.js").Phase | "empty" | "planned"} */
    this.phase = "empty";
    this.at = { ...FRESH };
    this.stop = new AbortController();
    worker.addEventListener("rows", (event) => this.cameRows(/** @type {CustomEvent} */ (event).detail));
    worker.addEventListener("waiting", (event) => {
      const { words } = /** @type {CustomEvent} */ (event).detail;
      this.waits(words ? new ApiError(words) : null, 0);
    });
    byId("cancel").addEventListener("click", () => this.cancel());
    byId("another").addEventListener("click", () => (this.sending.forget(), this.reset()));
    byId("save-rows").addEventListener("click", () => this.save());
  }

  /** @returns {string | undefined} */
  get job() {
    return this.memory.read().job;
  }

  get name() {
    return byId("run-title").textContent ?? "";
  }

  // ---- before ----------------------------------------------------------------------------------

  /** Plan a file, unless it is none that can be read. @param {File} file */
  async open(file) {
    const why = file.size ? await whyNotText(file).catch(wordsOf) : `${file.name} is empty; choose a file with a text.`;
    if (why) return this.notice.say("error", why);
    this.notice.clear();
    this.file = file;
    show(byId("start-view"), false);
    this.run.close();
    this.become("planned");
    this.plan.open(file, (this.window = proposedWindow(file.size, this.longest)), this.longest);
    const come = this.sending.come(file);
    if (come) this.notice.say("note", `${percent(come)} of it is there already; the rest will be sent.`);
    this.estimate(this.window);
  }

  /** Read a file without a plan. @param {File} file */
  read(file) {
    [this.file, this.window] = [file, proposedWindow(file.size, this.longest)];
    show(byId("start-view"), false);
    return this.start();
  }

  /** @param {number} window */
  async estimate(window) {
    this.window = window;
    const file = this.file;
    if (!file) return;
    this.plan.pending();
    try {
      const plan = await estimate(this.api, file, window);
      if (this.file !== file || this.window !== window) return;
      this.plan.show(plan);
      this.at.expected = plan.tokens.value;
      announce(`The estimate is ${duration(plan.total_seconds.value)}.`);
      this.recipes.add("estimate", { bytes: file.size, window });
    } catch (error) {
      if (wasStopped(error) || this.file !== file) return;
      if (isFinal(error)) this.reset(); // before anything is sent
      this.notice.say("error", wordsOf(error), isFinal(error) ? [] : [{ label: "Try again", act: () => this.estimate(window) }]);
    }
  }

  /** Back to the empty page; the service forgets the document too. */
  async reset() {
    const { job, file } = this.memory.read();
    this.stop.abort();
    this.worker.ask("clear");
    this.memory.write({ job: undefined, file: undefined });
    this.file = this.text = null;
    this.at = { ...FRESH };
    this.plan.close();
    this.run.close();
    this.notice.clear();
    show(byId("start-view"), true);
    byId("pick").focus();
    this.become("empty");
    for (const path of [job && `/v1/jobs/${job}`, file && `/v1/files/${file.replace(/-text$/, "")}`]) {
      if (path) await this.api.send(path, { method: "DELETE" }).catch(() => undefined);
    }
  }

  // ---- under way -------------------------------------------------------------------------------

  /** Send what the service lacks of the file, then have it encoded. */
  async start() {
    const file = this.file;
    if (!file) return;
    this.begin(file.name, { ...FRESH, size: file.size, sent: this.sending.begun?.come ?? 0, expected: this.at.expected });
    this.become("sending");
    const { signal } = this.stop;
    await this.guarded(async () => {
      const stored = await this.sending.send(file, {
        signal,
        sent: (bytes) => this.moved({ sent: bytes, waiting: false }),
        onRetry: (error, seconds) => this.waits(error, seconds),
      });
      const job = await beginEncoding(this.api, stored, this.window);
      // Rows tell bytes of the text, which for a document is a file beside it.
      const text = (await isDocument(file)) ? `${stored}-text` : stored;
      this.text = new DocumentText(this.api, text, text === stored ? file : null);
      this.memory.write({ job, file: text });
      this.recipes.add("encode", { file: file.name, window: this.window });
      await this.follow(job);
    });
  }

  /** What a reload has left: the job that goes on without the page, or an upload in its middle. */
  async resume() {
    const { upload, job, file } = this.memory.read();
    try {
      if (job && file) return await this.resumeJob(job, file);
      if (upload) await this.resumeUpload(upload);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) this.memory.write({ upload: undefined, job: undefined, file: undefined });
      else if (!wasStopped(error)) this.notice.say("error", wordsOf(error), [{ label: "Try again", act: () => location.reload() }]);
    }
  }

  /** @param {string} job @param {string} file */
  async resumeJob(job, file) {
    const [standing, stored] = await Promise.all([this.api.json(`/v1/jobs/${job}`), this.api.json(`/v1/files/${file}`)]);
    this.text = new DocumentText(this.api, file, null);
    this.begin(stored.filename, { ...FRESH, size: stored.bytes, sent: stored.bytes, expected: standing.progress.expected_tokens ?? 0 });
    show(byId("start-view"), false);
    await this.guarded(() => this.follow(job));
  }

  /** @param {string} id */
  async resumeUpload(id) {
    if (!(await this.sending.find(id))) return;
    const { filename, bytes, come } = /** @type {NonNullable<Sending["begun"]>} */ (this.sending.begun);
    this.notice.say("note", `${percent(come / Math.max(1, bytes))} of ${filename} was sent before the page was closed. Choose the same file, and the rest is sent.`, [
      { label: "Forget it", act: () => (this.sending.forget(), this.notice.clear()) },
    ]);
  }

  /** @param {string} job */
  async follow(job) {
    this.become("queued");
    const { signal } = this.stop;
    const rows = this.worker.ask("follow", { key: this.api.key, job, stored: this.text?.id, file: this.text?.file });
    const ended = followJob(this.api, job, (seen) => this.seen(seen), signal);
    rows.catch(() => undefined);
    const standing = await ended;
    if (standing.status === "succeeded") {
      const summary = await rows;
      this.moved({ read: this.at.size, tokens: summary.tokens, rows: summary.rows });
      this.become("done");
      announce(`${this.name} is read: ${summary.rows} passages.`);
    } else if (standing.status === "cancelled") this.become("stopped");
    else throw new ApiError(standing.error?.message ?? "The service gave the work up.", { code: standing.error?.code });
  }

  /** How the job stands. @param {any} job */
  seen(job) {
    const { progress } = job;
    const now = job.ended_at ?? Date.now() / 1000;
    const seconds = job.started_at ? now - job.started_at : 0;
    const done = job.status === "succeeded";
    this.moved({
      tokens: Math.max(this.at.tokens, progress.tokens),
      expected: progress.expected_tokens ?? this.at.expected,
      speed: done && seconds ? progress.tokens / seconds : progress.tokens_per_second ?? this.at.speed,
      eta: progress.eta_seconds,
      seconds,
    });
    if (UNFINISHED.has(job.status)) this.become(job.status === "queued" ? "queued" : "reading");
  }

  /** @param {{job: string, rows: number, tokens: number, bytes: number}} come */
  cameRows(come) {
    if (come.job !== this.job) return;
    if (this.at.waiting) this.waits(null, 0);
    this.moved({ rows: come.rows, tokens: Math.max(this.at.tokens, come.tokens), read: come.bytes });
    this.dispatchEvent(new Event("rows"));
  }

  async cancel() {
    const job = this.job;
    this.stop.abort();
    this.worker.ask("stop");
    this.notice.clear();
    if (job) await this.api.send(`/v1/jobs/${job}/cancel`, { method: "POST" }).catch(() => undefined);
    this.become("stopped");
  }

  // ---- what is seen of it ----------------------------------------------------------------------

  /** @param {string} name @param {typeof this.at} at */
  begin(name, at) {
    this.stop.abort();
    this.stop = new AbortController();
    this.at = at;
    this.plan.close();
    this.notice.clear();
    this.run.open(name);
  }

  /** @param {() => Promise<void>} work */
  async guarded(work) {
    try {
      await work();
      this.notice.clear();
    } catch (error) {
      if (wasStopped(error)) return;
      this.stop.abort();
      this.at.waiting = false;
      this.become("failed");
      if (isFinal(error)) return this.notice.say("error", /** @type {ApiError} */ (error).code === "invalid_utf8" ? notUtf8(this.name) : wordsOf(error));
      const kept = this.sending.begun?.come ? ` At least ${this.there} is kept; trying again goes on from what is there.` : "";
      const again = this.file ? [{ label: "Try again", act: () => this.start() }] : [{ label: "Look again", act: () => location.reload() }];
      this.notice.say("error", wordsOf(error) + kept, again);
    }
  }

  /** What is known to have come of an upload; the piece that broke may have added to it. */
  get there() {
    return `${percent(this.at.sent / this.at.size)} (${bytes(this.at.sent)})`;
  }

  /** @param {ApiError | null} error what is being waited out @param {number} seconds until it is tried again */
  waits(error, seconds) {
    this.moved({ waiting: Boolean(error) });
    if (!error) return this.notice.clear();
    const from = this.phase === "sending" && this.at.sent ? ` from ${this.there}` : "";
    const when = seconds < 1 ? "as soon as it can" : `in ${duration(seconds)}`;
    this.notice.say("wait", `${error.message} Going on by itself${from} ${when}.`);
  }

  /** @param {Partial<typeof this.at>} news */
  moved(news) {
    Object.assign(this.at, news);
    if (this.phase !== "empty" && this.phase !== "planned") this.run.show(this.phase, this.at);
  }

  /** @param {typeof this.phase} phase */
  become(phase) {
    const same = this.phase === phase;
    this.phase = phase;
    this.moved({});
    if (!same) this.dispatchEvent(new Event("changed"));
  }

  get busy() {
    return ["sending", "queued", "reading"].includes(this.phase);
  }

  /** The vectors as a file of NumPy. */
  async save() {
    try {
      const response = await this.api.send(`/v1/jobs/${this.job}/result?format=npy`);
      saveBlob(await response.blob(), `${this.name.replace(/\.\w+$/, "")}.npy`);
      this.recipes.add("rows", { job: this.job });
    } catch (error) {
      this.notice.say("error", wordsOf(error));
    }
  }
}
