/** The session of the document: the model that writes reads the stored text into it once, beside the page, and can then go on. */

import { ApiError, pause, wasStopped, wordsOf } from "../api/http.js";
import { appendFile, createSession, endSession } from "../api/sessions.js";
import { byId, h, show } from "../view/dom.js";
import { percent } from "../view/figures.js";

const LOOK_SECONDS = 0.1;

/** @typedef {{file: string, name: string, tokens: number}} Document `tokens` about as many as the model will read */

/** Reads in the background, from the first moment with how far it is, until it is done or stopped. */
export class DocumentSession {
  /** @param {import("../api/http.js").Api} api @param {import("../view/memory.js").Memory} memory @param {import("../recipes.js").Recipes} recipes */
  constructor(api, memory, recipes) {
    this.api = api;
    this.memory = memory;
    this.recipes = recipes;
    /** @type {"none" | "reading" | "ready" | "stopped" | "failed"} */
    this.state = "none";
    this.id = "";
    this.position = 0;
    /** Where the document ended. */
    this.end = 0;
    /** @type {Document | null} */
    this.document = null;
    /** @type {unknown} */
    this.error = null;
    this.work = new AbortController();
  }

  /** Read a document; what a reload has left is taken up. @param {Document} document */
  async begin(document) {
    this.work.abort();
    this.work = new AbortController();
    const { signal } = this.work;
    [this.document, this.position, this.error] = [document, 0, null];
    this.become("reading");
    try {
      const id = (await this.left()) ?? (await createSession(this.api, document.name.slice(0, 256))).id;
      if (signal.aborted) return void (await endSession(this.api, id));
      this.id = id;
      this.memory.write({ reading: id });
      this.recipes.add("append", { session: id, file: document.file });
      const seen = (/** @type {number} */ position) => {
        if (signal.aborted) return;
        this.position = position;
        this.show();
      };
      this.end = await appendFile(this.api, id, document.file, { signal, seen });
      if (!signal.aborted) this.become("ready");
    } catch (error) {
      if (wasStopped(error) || signal.aborted) return;
      this.error = error;
      this.become("failed");
    }
  }

  /** The session that was begun before a reload, if it is still there. @returns {Promise<string | null>} */
  async left() {
    const { reading } = this.memory.read();
    return reading && (await this.found(reading)) ? reading : null;
  }

  /** @param {string} id @returns {Promise<any | null>} */
  async found(id) {
    try {
      return await this.api.json(`/v1/sessions/${id}`);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return null;
      throw error;
    }
  }

  /**
   * The session once all is read, which is begun where it is not. @param {Document} document @param {AbortSignal} signal that stops the reading
   * @param {(words: string) => void} tell @returns {Promise<any>}
   */
  async whole(document, signal, tell) {
    if (this.state === "ready" && !(await this.found(this.id))) this.state = "none"; // somebody has ended it
    if (this.state !== "reading" && this.state !== "ready") void this.begin(document);
    try {
      while (this.state === "reading") {
        tell(this.words);
        await pause(LOOK_SECONDS, signal);
      }
    } catch (error) {
      this.stop();
      throw error;
    }
    if (this.state === "failed") throw this.error;
    if (this.state !== "ready") throw new DOMException("stopped", "AbortError");
    return this.found(this.id);
  }

  /** How far it is. */
  get words() {
    return `Reading · ${percent(this.position / Math.max(1, this.document?.tokens ?? 0))}`;
  }

  stop() {
    if (this.state !== "reading") return;
    this.drop();
    this.become("stopped");
  }

  /** Another document: a session that nobody has written to goes with this one. */
  async forget() {
    const { state, id, end } = this;
    this.work.abort();
    this.memory.write({ reading: undefined });
    if (state === "reading") this.drop();
    else if (state === "ready" && (await this.found(id).catch(() => null))?.position === end) this.drop();
    this.become("none");
  }

  /** Without its session the service stops reading. */
  drop() {
    this.work.abort();
    if (this.id) endSession(this.api, this.id).catch(() => undefined);
    this.memory.write({ reading: undefined });
    this.id = "";
  }

  /** @param {DocumentSession["state"]} state */
  become(state) {
    this.state = state;
    this.show();
  }

  show() {
    const line = byId("carry");
    const act = (/** @type {string} */ label, /** @type {() => void} */ run) => h("button", { type: "button", class: "quiet", onclick: run }, label);
    const again = () => this.document && this.begin(this.document);
    show(line, this.state === "reading" || this.state === "failed");
    if (this.state === "failed") line.replaceChildren(`The text cannot be continued yet. ${wordsOf(this.error)}`, act("Try again", again));
    else if (this.state !== "reading") line.replaceChildren();
    else if (line.firstChild?.nodeName === "SPAN") line.firstChild.textContent = this.background;
    else line.replaceChildren(h("span", {}, this.background), act("Leave it", () => this.stop()));
  }

  get background() {
    return `You can search. So that it can be continued at once, the model reads the text to itself as well: ${this.words.replace("Reading · ", "")}`;
  }
}
