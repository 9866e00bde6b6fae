/** The page that is written on: what was read, what the model drew, and how fast. */

import { byId, h } from "../view/dom.js";
import { count } from "../view/figures.js";

const KEPT = 20_000; // characters shown of a session; the session itself has all

/** Texts of sessions, as far as this page has seen them. */
export class Paper {
  constructor() {
    this.host = byId("paper");
    /** @type {Map<string, {kind: string, text: string}[]>} */
    this.texts = new Map();
    /** @type {Text | null} */
    this.end = null;
    this.shown = "";
  }

  /** @param {any | null} session @param {string} [name] */
  open(session, name) {
    byId("paper-title").textContent = session ? session.name || "Session without a name" : name ?? "New session";
    byId("paper-speed").textContent = session?.position ? `stands at ${count(session.position)} tokens` : "";
    this.shown = session?.id ?? "";
    this.draw(session);
  }

  /** @param {any | null} session */
  draw(session) {
    const parts = this.texts.get(this.shown) ?? [];
    this.end = null;
    if (!session || (!parts.length && !session.position)) {
      const words = "Write a beginning above, or open a session. What the model draws appears here, token by token.";
      this.host.replaceChildren(h("span", { class: "hint" }, words));
      return;
    }
    const before = parts.length ? [] : [h("span", { class: "hint" }, `${count(session.position)} tokens were read before. The model knows them; press Continue to go on.`)];
    this.host.replaceChildren(...before, ...parts.map(({ kind, text }) => h("span", { class: kind }, text)));
  }

  /** @param {string} id @param {string} kind read or drawn @param {string} text */
  add(id, kind, text) {
    const parts = this.texts.get(id) ?? [];
    this.texts.set(id, parts);
    const last = parts.at(-1);
    const same = last?.kind === kind;
    if (last && same) last.text = (last.text + text).slice(-KEPT);
    else parts.push({ kind, text: text.slice(-KEPT) });
    if (id !== this.shown) return;
    if (same && this.end) this.end.data += text;
    else {
      if (parts.length === 1) this.host.querySelector(".hint")?.remove();
      this.end = document.createTextNode(text.slice(-KEPT));
      this.host.append(h("span", { class: kind }, this.end));
    }
  }

  /** What a fork begins with. @param {string} from @param {string} to */
  copy(from, to) {
    this.texts.set(to, (this.texts.get(from) ?? []).map((part) => ({ ...part })));
  }

  /** @param {string} words */
  tell(words) {
    byId("paper-speed").textContent = words;
  }
}
