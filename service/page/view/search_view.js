/** The search box: passages of the document, ranked by how near they are to what was asked. */

import { wordsOf } from "../api/http.js";
import { byId, h } from "./dom.js";
import { count } from "./figures.js";
import { shortened } from "./tip.js";

const SHOWN = 240;

/** @typedef {{row: number, cosine: number, text: Promise<string>}} Hit */

/** Asks and shows what was found. */
export class SearchView {
  /** @param {{find: (words: string) => Promise<Hit[]>, open: (row: number) => void}} asks */
  constructor(asks) {
    this.asks = asks;
    this.host = byId("found");
    this.turn = 0;
    byId("search").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      const words = byId("query").value.trim();
      if (words) this.run(() => asks.find(words), "Nothing is encoded yet.");
    });
  }

  /** @param {() => Promise<Hit[]>} find @param {string} nothing */
  async run(find, nothing) {
    const turn = ++this.turn;
    this.host.replaceChildren(h("p", { class: "fine" }, "Looking …"));
    try {
      const hits = await find();
      if (turn === this.turn) this.show(hits, nothing);
    } catch (error) {
      if (turn === this.turn) this.host.replaceChildren(h("p", { class: "notice error" }, wordsOf(error)));
    }
  }

  /** @param {Hit[]} hits @param {string} nothing */
  show(hits, nothing) {
    if (!hits.length) return this.host.replaceChildren(h("p", { class: "fine" }, nothing));
    this.host.replaceChildren(
      ...hits.map(({ row, cosine, text }) => {
        const strength = h("b", {});
        strength.style.transform = `scaleX(${Math.max(0, Math.min(1, cosine))})`;
        const words = h("span", { class: "text" }, "…");
        text.then((/** @type {string} */ read) => (words.textContent = shortened(read, SHOWN)), () => (words.textContent = "–"));
        return h(
          "button",
          { type: "button", class: "hit", onclick: () => this.asks.open(row) },
          h("span", { class: "head" }, `Passage ${count(row + 1)}`, h("i", { "aria-hidden": "true" }, strength), cosine.toFixed(2)),
          words,
        );
      }),
    );
  }

  clear() {
    this.turn += 1;
    byId("query").value = "";
    this.host.replaceChildren();
  }
}
