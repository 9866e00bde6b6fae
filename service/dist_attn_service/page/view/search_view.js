/** The search box and what was found: where each passage stands, its text with the words that matched, and why it came. */

import { wordsOf } from "../api/http.js";
import { byId, h } from "./dom.js";
import { count, ordinal, percent } from "./figures.js";
import { excerpt } from "./set_text.js";

const SHOWN = 420; // characters of a passage in its card

/** @typedef {import("./set_text.js").Range} Range */
/** @typedef {{text: string, ranges: Range[], at: number}} Read a passage, the words that matched, and the byte whose chapter is told */
/** @typedef {{rank: number, score: number} | null} Part how a passage stands by words or by meaning, where it was judged by that */
/**
 * @typedef {{row: number, begin: number, place: {part: string, chapter: string}, parts: {words?: Part, meaning?: Part}, read: Promise<Read>}} Hit
 * @typedef {{hits: Hit[], rows: number, size: number, note: string, isPart?: boolean, instead?: {label: string, act: () => void}}} Found
 *   `isPart`: not all of the document was read yet
 */

/** Asks and shows what was found. */
export class SearchView {
  /**
   * @param {{find: (words: string) => Promise<Found>, open: (row: number, card: HTMLElement, read: Promise<Read>) => void, left: () => void,
   *   examples: () => string[]}} asks `examples` are offered before anything is asked
   */
  constructor(asks) {
    this.asks = asks;
    this.host = byId("found");
    this.turn = 0;
    /** What was asked of a document that was not yet read to its end. @type {(() => Promise<Found>) | null} */
    this.ofPart = null;
    byId("search").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      const words = byId("query").value.trim();
      if (words) this.run(() => asks.find(words));
    });
  }

  /** @param {string} words */
  ask(words) {
    byId("query").value = words;
    return this.run(() => this.asks.find(words));
  }

  /** @param {() => Promise<Found>} find */
  async run(find) {
    const turn = ++this.turn;
    this.ofPart = find; // unless the answer says that it is of all
    this.say("Looking …");
    try {
      const found = await find();
      if (turn !== this.turn) return;
      this.show(found);
      if (!found.isPart) this.ofPart = null;
    } catch (error) {
      if (turn !== this.turn) return;
      this.ofPart = null;
      this.say("");
      this.host.replaceChildren(h("p", { class: "notice error" }, wordsOf(error)));
    }
  }

  /** All is read: what was asked of a part is asked again, or offered to who reads a passage just now. @param {boolean} isReading */
  renew(isReading) {
    const find = this.ofPart;
    if (!find) return;
    if (!isReading) return this.run(find);
    const again = h("button", { type: "button", onclick: () => this.run(find) }, "Look in all of it");
    this.host.prepend(h("div", { class: "row" }, again));
    this.ofPart = null;
  }

  /** @param {Found} found */
  show(found) {
    this.say(found.note, found.instead);
    this.host.append(...found.hits.map((hit) => this.card(hit, found)));
  }

  /** @param {string} words @param {Found["instead"]} [instead] */
  say(words, instead) {
    this.asks.left();
    const button = instead && h("button", { type: "button", onclick: instead.act }, instead.label);
    this.host.replaceChildren(...(words ? [h("p", { class: "fine" }, words)] : []), ...(button ? [h("div", { class: "row" }, button)] : []));
  }

  /** @param {Hit} hit @param {Found} found */
  card(hit, { rows, size }) {
    const text = h("span", { class: "text" }, "…");
    hit.read.then((read) => text.replaceChildren(...excerpt(read.text, read.ranges, SHOWN)), () => (text.textContent = "–"));
    const { part, chapter } = hit.place;
    const card = h(
      "button",
      { type: "button", class: "hit", "aria-expanded": "false", onclick: () => this.asks.open(hit.row, card, hit.read) },
      h("span", { class: "head" },
        h("span", { class: "chapter" }, h("b", {}, chapter || part || `Passage ${count(hit.row + 1)}`), chapter && part ? ` · ${part}` : ""),
        placed(hit.begin / Math.max(1, size))),
      text,
      why(hit.parts, rows),
    );
    return card;
  }

  /** What can be asked, before anything was. */
  invite() {
    const examples = this.asks.examples();
    const words = examples.length
      ? "For example:"
      : "Ask with words that stand in the text, or in your own. For example, what somebody does, where something is told, or a sentence of which you remember a few words.";
    const questions = examples.map((words) => h("button", { type: "button", onclick: () => this.ask(words) }, words));
    this.say("");
    this.host.replaceChildren(h("div", { class: "hint-questions" }, h("p", {}, words), questions.length > 0 && h("div", { class: "questions" }, ...questions)));
  }

  clear() {
    this.turn += 1;
    this.ofPart = null;
    byId("query").value = "";
    this.invite();
  }
}

/** A place in the document: a small mark, and per cent. @param {number} fraction */
function placed(fraction) {
  const mark = h("b", {});
  mark.style.left = `calc(${(100 * fraction).toFixed(1)}% - 1.5px)`;
  return h("span", { class: "place" }, h("i", { "aria-hidden": "true" }, mark), `at ${percent(fraction)}`);
}

/** Why a passage came. @param {Hit["parts"]} parts @param {number} rows */
function why({ words, meaning }, rows) {
  const of = `of ${count(rows)} passages`;
  const told = words ? [`${ordinal(words.rank)} ${of} by its words`] : words === null ? ["Has none of the words"] : [];
  if (meaning) told.push(`${ordinal(meaning.rank)}${words ? "" : ` ${of}`} by its meaning`);
  const exact = [words && `words: BM25 ${words.score.toFixed(2)}`, meaning && `meaning: cosine ${meaning.score.toFixed(2)}`].filter(Boolean).join("; ");
  return h("span", { class: "why", title: exact || null }, told.join(", "));
}
