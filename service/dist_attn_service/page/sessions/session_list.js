/** The sessions of this key: where each stands, its checkpoints on a line, and what can be done at each of them. */

import { byId, h } from "../view/dom.js";
import { about, count, moment } from "../view/figures.js";

const MOST_DOTS = 24;

/** @typedef {{open: (session: any) => void, fork: (session: any, position: number) => void, save: (session: any, position: number) => void, end: (session: any) => void}} Asks */

/** Draws the list and remembers which checkpoint is chosen. */
export class SessionList {
  /** @param {Asks} asks */
  constructor(asks) {
    this.asks = asks;
    this.host = byId("session-list");
    /** @type {Map<string, number>} */
    this.chosen = new Map();
    /** @type {any[]} */
    this.sessions = [];
    this.current = "";
  }

  /** @param {any[]} sessions @param {string} current the id of the open one */
  show(sessions, current) {
    this.sessions = sessions;
    this.current = current;
    const held = document.activeElement?.closest("[data-focus]")?.getAttribute("data-focus");
    if (!sessions.length) {
      const words = "None yet. A session keeps what the model knows of a text, so that it is read once and gone on with often.";
      this.host.replaceChildren(h("p", { class: "fine" }, words));
      return;
    }
    const newest = [...sessions].sort((a, b) => b.created_at - a.created_at);
    this.host.replaceChildren(...newest.map((session) => this.item(session)));
    if (held) /** @type {HTMLElement | null} */ (this.host.querySelector(`[data-focus="${CSS.escape(held)}"]`))?.focus();
  }

  /** @param {any} session */
  item(session) {
    const { asks } = this;
    const last = session.position;
    const chosen = session.checkpoints.includes(this.chosen.get(session.id)) ? this.chosen.get(session.id) : session.checkpoints.at(-1);
    const name = session.name || "Session without a name";
    const act = (/** @type {string} */ label, /** @type {() => void} */ run) =>
      h("button", { type: "button", class: "quiet", "data-focus": `${session.id} ${label}`, "aria-label": `${label}: ${name}`, onclick: run }, label);
    const standing = last ? `${about(last)} pieces` : "empty";
    return h(
      "article",
      { class: session.id === this.current ? "session current" : "session", "aria-label": name },
      h("header", {},
        h("button", { type: "button", class: "session-name", "data-focus": `${session.id} open`, "aria-current": session.id === this.current ? "true" : null, onclick: () => asks.open(session) }, name),
        h("span", { class: "fine", title: `${count(last)} tokens: words, or pieces of longer words` }, session.busy ? "being written to" : standing)),
      session.checkpoints.length > 0 && this.timeline(session, chosen ?? 0),
      h("div", { class: "session-acts" },
        session.checkpoints.length > 0 && h("span", { class: "fine" }, chosen === last ? "Newest" : `At ${count(chosen ?? 0)}`),
        session.checkpoints.length > 0 && act("Fork", () => asks.fork(session, chosen ?? last)),
        session.checkpoints.length > 0 && act("Save state", () => asks.save(session, chosen ?? last)),
        act("End", () => asks.end(session))),
      session.parent_position ? h("p", { class: "fine" }, `Forked at ${count(session.parent_position)}`) : h("p", { class: "fine" }, `Until ${moment(session.expires_at)}`),
    );
  }

  /** @param {any} session @param {number} chosen */
  timeline(session, chosen) {
    const all = session.checkpoints;
    const every = Math.ceil(all.length / MOST_DOTS);
    const shown = all.filter((/** @type {number} */ at, /** @type {number} */ i) => i % every === 0 || i === all.length - 1 || at === chosen);
    const dots = shown.map((/** @type {number} */ at) => {
      const dot = h("button", {
        type: "button", class: "dot", role: "radio", "aria-checked": String(at === chosen), tabindex: at === chosen ? 0 : -1, title: `${count(at)} tokens`,
        "aria-label": `Checkpoint at ${count(at)} tokens`, "data-focus": `${session.id} at ${at}`,
        onclick: () => this.choose(session, at),
        onkeydown: (/** @type {KeyboardEvent} */ event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          const next = step && shown[shown.indexOf(at) + step];
          if (!next) return;
          event.preventDefault();
          this.choose(session, next);
        },
      });
      dot.style.left = `${(100 * at) / Math.max(1, session.position)}%`;
      return dot;
    });
    return h("div", { class: "timeline", role: "radiogroup", "aria-label": "Checkpoints" }, ...dots, h("span", { class: "end" }, about(session.position)));
  }

  /** @param {any} session @param {number} at */
  choose(session, at) {
    this.chosen.set(session.id, at);
    this.show(this.sessions, this.current);
    /** @type {HTMLElement | null} */ (this.host.querySelector(`[data-focus="${CSS.escape(`${session.id} at ${at}`)}"]`))?.focus();
  }
}
