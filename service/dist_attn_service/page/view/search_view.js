/** The search box: passages of the document, the best for what was asked first, with its words marked. */

import { wordsOf } from "../api/http.js";
import { split } from "../vectors/words.js";
import { byId, h } from "./dom.js";
import { count } from "./figures.js";
import { shortened } from "./tip.js";

const SHOWN = 240;
const BEFORE = 30; // characters before the first word that is marked
const SEEN = 100; // characters behind it that fit into the card

/** @typedef {{row: number, score: number, text: Promise<string>}} Hit */
/** @typedef {{hits: Hit[], words: string[]}} Found with the words that are marked */

/** Asks and shows what was found. */
export class SearchView {
  /** @param {{find: (words: string) => Promise<Found>, open: (row: number) => void}} asks */
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

  /** @param {() => Promise<Found>} find @param {string} nothing */
  async run(find, nothing) {
    const turn = ++this.turn;
    this.host.replaceChildren(h("p", { class: "fine" }, "Looking …"));
    try {
      const { hits, words } = await find();
      if (turn === this.turn) this.show(hits, nothing, new Set(words));
    } catch (error) {
      if (turn === this.turn) this.host.replaceChildren(h("p", { class: "notice error" }, wordsOf(error)));
    }
  }

  /** @param {Hit[]} hits @param {string} nothing @param {Set<string>} asked */
  show(hits, nothing, asked) {
    if (!hits.length) return this.host.replaceChildren(h("p", { class: "fine" }, nothing));
    this.host.replaceChildren(
      ...hits.map(({ row, score, text }) => {
        const strength = h("b", {});
        strength.style.transform = `scaleX(${Math.max(0, Math.min(1, score))})`;
        const words = h("span", { class: "text" }, "…");
        text.then((/** @type {string} */ read) => words.replaceChildren(...marked(read, asked)), () => (words.textContent = "–"));
        return h(
          "button",
          { type: "button", class: "hit", onclick: () => this.asks.open(row) },
          h("span", { class: "head" }, `Passage ${count(row + 1)}`, h("i", { "aria-hidden": "true" }, strength), asked.size ? null : score.toFixed(2)),
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

/** The stretch of a passage with the most of these words, which are marked. @param {string} text @param {Set<string>} asked */
function marked(text, asked) {
  const plain = text.replace(/\s+/g, " ").trim();
  let at = 0;
  const places = split(plain, asked).flatMap((piece, i) => {
    at += piece.length;
    return i % 2 ? [{ at: at - piece.length, word: piece.toLowerCase() }] : [];
  });
  const near = places.map((first) => new Set(places.filter((other) => other.at >= first.at && other.at < first.at + SEEN).map(({ word }) => word)).size);
  const best = places[near.indexOf(Math.max(...near))]?.at ?? 0;
  const from = best > BEFORE ? plain.indexOf(" ", best - BEFORE) + 1 : 0;
  const shown = (from ? "… " : "") + shortened(plain.slice(from), SHOWN);
  return split(shown, asked).map((piece, i) => (i % 2 ? h("mark", {}, piece) : piece));
}
