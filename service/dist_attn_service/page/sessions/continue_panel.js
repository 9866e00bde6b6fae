/** The continue panel: sessions that have read a beginning or a whole document, and let the model go on with it. */

import { wasStopped, wordsOf } from "../api/http.js";
import { appendText, createSession, endSession, forkSession, generate, listSessions } from "../api/sessions.js";
import { announce, byId, saveBlob, show } from "../view/dom.js";
import { count } from "../view/figures.js";
import { Notice } from "../view/notice.js";
import { showGauge } from "./gauge.js";
import { Paper } from "./paper.js";
import { SessionList } from "./session_list.js";

const NAME_LENGTH = 48;
const TELL_MS = 120;
const SHOWN_BYTES = 900; // of the end of a document that was read

/** Owns the open session. */
export class ContinuePanel {
  /**
   * @param {import("../api/http.js").Api} api @param {import("../view/memory.js").Memory} memory
   * @param {import("../recipes.js").Recipes} recipes @param {() => any} model the model's card
   */
  constructor(api, memory, recipes, model) {
    this.api = api;
    this.memory = memory;
    this.recipes = recipes;
    this.model = model;
    this.paper = new Paper();
    this.notice = new Notice(byId("write-notice"));
    /** @type {any} */
    this.session = null;
    this.stateBytes = 0;
    /** @type {AbortController | null} */
    this.work = null;
    this.list = new SessionList({
      open: (session) => this.guarded(() => this.open(session)),
      fork: (session, position) => this.guarded(() => this.fork(session, position)),
      save: (session, position) => this.guarded(() => this.save(session, position)),
      end: (session) => this.guarded(() => this.end(session)),
    });
    byId("writer").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.guarded((signal) => this.write(signal));
    });
    byId("write-stop").addEventListener("click", () => this.work?.abort());
    byId("session-new").addEventListener("click", () => this.open(null));
    byId("state-upload").addEventListener("click", () => byId("state-file").click());
    byId("state-file").addEventListener("change", () => {
      const file = byId("state-file").files[0];
      byId("state-file").value = "";
      if (file) this.guarded(() => this.put(file));
    });
    this.paper.open(null);
  }

  // ---- the open session ------------------------------------------------------------------------

  /** The one that was open before a reload, and the list. */
  async resume() {
    await this.guarded(async () => {
      const id = this.memory.read().session;
      const sessions = await listSessions(this.api);
      const session = sessions.find((session) => session.id === id);
      if (session) await this.open(session);
      this.list.show(sessions, session?.id ?? "");
    });
  }

  /** @param {any | null} session */
  async open(session) {
    this.session = session;
    this.memory.write({ session: session?.id });
    this.paper.open(session);
    byId("prompt-label").textContent = session?.position ? "Text to add before it goes on (may be empty)" : "A beginning";
    this.list.show(this.list.sessions, session?.id ?? "");
    await this.weigh();
  }

  /** The size of the newest state. */
  async weigh() {
    const { session } = this;
    if (session?.position && !this.stateBytes) {
      const checkpoints = await this.api.json(`/v1/sessions/${session.id}/checkpoints`);
      this.stateBytes = checkpoints.data.at(-1)?.bytes ?? 0;
    }
    showGauge(this.model(), session?.position ?? 0, this.stateBytes);
  }

  async refresh() {
    const sessions = await listSessions(this.api);
    this.session = sessions.find((session) => session.id === this.session?.id) ?? this.session;
    this.list.show(sessions, this.session?.id ?? "");
    await this.weigh();
  }

  /** @param {number} position */
  stands(position) {
    if (this.session) this.session.position = position;
    showGauge(this.model(), position, this.stateBytes);
  }

  // ---- reading and writing ---------------------------------------------------------------------

  /** Add what stands in the field, then draw. @param {AbortSignal} signal */
  async write(signal) {
    const text = byId("prompt").value;
    if (!this.session?.position && !text.trim()) {
      byId("prompt").focus();
      return this.notice.say("note", "Write a beginning first: the model goes on with what it has read.");
    }
    if (!this.session) await this.open(await createSession(this.api, text.replace(/\s+/g, " ").trim().slice(0, NAME_LENGTH)));
    const { session } = this;
    if (text) {
      await appendText(this.api, session, new Blob([text]), { signal, seen: (position) => this.stands(position) });
      this.paper.add(session.id, "read", text);
      byId("prompt").value = "";
      byId("prompt-label").textContent = "Text to add before it goes on (may be empty)";
    }
    const options = { max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value) };
    this.recipes.add("generate", { session: session.id, options });
    await this.draw(session, options, signal);
  }

  /** @param {any} session @param {{max_tokens: number, temperature: number}} options @param {AbortSignal} signal */
  async draw(session, options, signal) {
    const begin = session.position;
    let [events, first, shownAt] = [0, 0, 0];
    for await (const piece of generate(this.api, session.id, options, signal)) {
      const now = performance.now();
      if (piece.text) this.paper.add(session.id, "drawn", piece.text);
      if (!piece.session) {
        events += 1;
        first ||= now;
        if (events > 1 && now - shownAt > TELL_MS) {
          shownAt = now;
          this.paper.tell(`${((1000 * (events - 1)) / (now - first)).toFixed(0)} word pieces a second`);
          this.stands(begin + events);
        }
      } else {
        const drawn = piece.usage.completion_tokens;
        const speed = now > first ? ((1000 * Math.max(1, drawn - 1)) / (now - first)).toFixed(0) : "–";
        this.paper.tell(`${count(drawn)} word pieces, ${speed} a second; ${count(piece.session.position)} in all`);
        this.stands(piece.session.position);
        announce(`${drawn} word pieces were written.`);
      }
    }
    await this.refresh();
  }

  /**
   * The session of a document, as soon as all of it is read. @param {string} name
   * @param {(signal: AbortSignal, tell: (words: string) => void) => Promise<any>} whole gives the session @param {() => Promise<Blob>} text
   */
  read(name, whole, text) {
    return this.guarded(async (signal) => {
      this.session = null;
      this.paper.reads(name);
      const session = await whole(signal, (words) => this.paper.tell(words));
      if (!this.paper.sheets.has(session.id)) {
        const blob = await text();
        const end = (await blob.slice(-SHOWN_BYTES).text()).replace(/^\uFFFD*\S*\s/, "");
        this.paper.add(session.id, "read", blob.size > SHOWN_BYTES ? `… ${end}` : end);
      }
      await this.open(session);
      await this.refresh();
      byId("write").focus();
    });
  }

  // ---- states ----------------------------------------------------------------------------------

  /** @param {any} session @param {number} position */
  async fork(session, position) {
    const fork = await forkSession(this.api, session.id, position, `${session.name || "Session"}, fork`.slice(0, 256));
    if (position === session.position) this.paper.copy(session.id, fork.id);
    this.recipes.add("fork", { session: session.id, position });
    await this.open(fork);
    await this.refresh();
    announce("The session is forked; the fork is open.");
  }

  /** @param {any} session @param {number} position */
  async save(session, position) {
    const response = await this.api.send(`/v1/sessions/${session.id}/state?position=${position}`);
    saveBlob(await response.blob(), `${(session.name || "session").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}-${position}.state`);
    this.recipes.add("state", { session: session.id, position });
  }

  /** @param {File} file */
  async put(file) {
    const made = await createSession(this.api, file.name.replace(/\.state$/, "").slice(0, 256));
    try {
      const headers = { "content-type": "application/octet-stream" };
      await this.open(await this.api.json(`/v1/sessions/${made.id}/state`, { method: "PUT", body: file, headers }));
    } catch (error) {
      await endSession(this.api, made.id).catch(() => undefined);
      throw error;
    }
    await this.refresh();
  }

  /** @param {any} session */
  async end(session) {
    await endSession(this.api, session.id);
    this.paper.forget(session.id);
    if (session.id === this.session?.id) await this.open(null);
    await this.refresh();
  }

  /** One piece of work at a time, and its failure in words. @param {(signal: AbortSignal) => Promise<unknown>} work */
  async guarded(work) {
    if (this.work) return this.notice.say("note", "Stop what is under way first.");
    this.work = new AbortController();
    this.notice.clear();
    show(byId("write-stop"), true);
    byId("write").disabled = true;
    try {
      await work(this.work.signal);
    } catch (error) {
      if (wasStopped(error)) {
        this.paper.tell("stopped");
        if (!this.session) this.paper.open(null);
        await this.refresh().catch(() => undefined);
      } else this.notice.say("error", wordsOf(error));
    } finally {
      this.work = null;
      show(byId("write-stop"), false);
      byId("write").disabled = false;
    }
  }
}
