/** The page that is written on: what was read, what the model drew, and how fast. */

import { byId, framed, h } from "../view/dom.js";
import { count } from "../view/figures.js";
import { Sheet } from "./sheet.js";

const MOST_SHEETS = 40; // of sessions that were open once
const NEAR_THE_END = 60; // pixels: somebody who reads here wants to see what comes

/** Texts of sessions, of each its end. */
export class Paper {
  constructor() {
    this.host = byId("paper");
    /** @type {Map<string, Sheet>} */
    this.sheets = new Map();
    /** @type {Text | null} */
    this.end = null;
    /** @type {Sheet | null} the one that is shown */
    this.sheet = null;
    this.waiting = "";
    this.shown = "";
    this.soon = framed(() => this.settle());
  }

  /** @param {any | null} session @param {string} [name] */
  open(session, name) {
    byId("paper-title").textContent = session ? session.name || "Session without a name" : name ?? "New session";
    byId("paper-speed").textContent = session?.position ? `${count(session.position)} word pieces read` : "";
    this.shown = session?.id ?? "";
    const sheet = this.sheets.get(this.shown);
    if (session && sheet?.parts.length) this.draw(sheet);
    else if (session?.position) this.hint(`The model knows ${count(session.position)} word pieces (tokens) that it has read before; press Continue to go on.`);
    else this.hint("Write a beginning above, or open a session. What the model writes appears here, word by word.");
  }

  /** A document is being read. @param {string} name */
  reads(name) {
    this.shown = "";
    byId("paper-title").textContent = name;
    this.hint("The model reads the text to itself, from its beginning. It can go on with it when that is done, and at once from then on.");
  }

  /** @param {string} words */
  hint(words) {
    this.end = this.sheet = null;
    this.waiting = "";
    this.host.replaceChildren(h("span", { class: "hint" }, words));
  }

  /** @param {Sheet} sheet */
  draw(sheet) {
    const spans = sheet.parts.map(({ kind, text }) => h("span", { class: kind }, text));
    this.end = spans.at(-1).firstChild;
    this.waiting = "";
    const before = sheet.cut && h("span", { class: "hint" }, "What came before is not shown any more; the session has read all of it. ");
    this.following(() => this.host.replaceChildren(...(before ? [before] : []), ...spans), sheet);
  }

  /** @param {string} id @param {string} kind read or drawn @param {string} text */
  add(id, kind, text) {
    const sheet = this.sheets.get(id) ?? new Sheet();
    const goesOn = sheet.parts.at(-1)?.kind === kind;
    const isCut = sheet.add(kind, text);
    this.sheets.delete(id); // the one that was written to last is the last one
    this.sheets.set(id, sheet);
    if (this.sheets.size > MOST_SHEETS) this.sheets.delete(this.sheets.keys().next().value ?? "");
    if (id !== this.shown) return;
    if (goesOn && !isCut && this.end) {
      this.waiting += text; // many tokens may come between two frames
      this.soon();
    } else this.draw(sheet);
  }

  /** Show what has come. */
  settle() {
    const { waiting } = this;
    this.waiting = "";
    if (waiting) this.following(() => this.end?.appendData(waiting));
  }

  /** Keep the end in sight over a change, unless somebody went back to read; another sheet is shown from its end. @param {() => void} change @param {Sheet} [sheet] */
  following(change, sheet = this.sheet) {
    const { host } = this;
    const isThere = sheet !== this.sheet || host.scrollHeight - host.scrollTop - host.clientHeight < NEAR_THE_END;
    this.sheet = sheet;
    change();
    if (isThere) host.scrollTop = host.scrollHeight;
  }

  /** What a fork begins with. @param {string} from @param {string} to */
  copy(from, to) {
    const sheet = this.sheets.get(from);
    if (sheet) this.sheets.set(to, sheet.copy());
  }

  /** @param {string} id */
  forget(id) {
    this.sheets.delete(id);
  }

  /** @param {string} words */
  tell(words) {
    this.settle();
    byId("paper-speed").textContent = words;
  }
}
