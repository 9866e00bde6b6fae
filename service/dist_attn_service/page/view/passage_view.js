/** One passage to read, with its neighbours and those that are like it. */

import { announce, byId, show } from "./dom.js";
import { count, percent } from "./figures.js";
import { paragraphs } from "./set_text.js";

/** @typedef {{row: number, start: number, stop: number, begin: number, end: number, section: string | null}} Range */

/** Opens, turns and closes the passage. */
export class PassageView {
  /**
   * @param {{range: (row: number) => Promise<Range>, text: (range: Range) => Promise<string>, rows: () => number, size: () => number,
   *   place: (at: number, range: Range) => Promise<string>, like: (row: number) => void, goOn: (range: Range) => void, opened: (row: number | null) => void}} asks
   */
  constructor(asks) {
    this.asks = asks;
    this.element = byId("passage");
    /** @type {Range | null} */
    this.range = null;
    /** @type {HTMLElement | null} where the focus was before, and goes back to */
    this.opener = null;
    /** @type {HTMLElement | null} the card of what was found under which the passage lies */
    this.card = null;
    this.home = /** @type {HTMLElement} */ (this.element.parentElement);
    byId("passage-before").addEventListener("click", () => this.range && this.open(this.range.row - 1));
    byId("passage-after").addEventListener("click", () => this.range && this.open(this.range.row + 1));
    byId("passage-like").addEventListener("click", () => this.range && asks.like(this.range.row));
    byId("passage-continue").addEventListener("click", () => this.range && asks.goOn(this.range));
    byId("passage-close").addEventListener("click", () => this.close());
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.close());
  }

  /** Under the card of what was found, or at its place above everything that was. @param {HTMLElement | null} card */
  lie(card) {
    this.card?.setAttribute("aria-expanded", "false");
    card?.setAttribute("aria-expanded", "true");
    this.card = card;
    if (card) card.after(this.element);
    else if (this.element.parentElement !== this.home) this.home.insertBefore(this.element, byId("found"));
  }

  /**
   * @param {number} row @param {boolean} [focus] @param {HTMLElement | null} [card] @param {Promise<import("./search_view.js").Read>} [found]
   *   its text, with the words that matched, where it was looked for
   */
  async open(row, focus = false, card = this.card, found) {
    if (row < 0 || row >= this.asks.rows()) return;
    const held = /** @type {HTMLElement | null} */ (document.activeElement);
    const range = await this.asks.range(row);
    this.range = range;
    const at = await found?.then((read) => read.at, () => undefined);
    const [place, share] = [await this.asks.place(at ?? (range.begin + range.end) / 2, range), percent(range.begin / Math.max(1, this.asks.size()))];
    if (this.range !== range) return;
    const title = [`Passage ${count(row + 1)} of ${count(this.asks.rows())}`, place, `at ${share}`].filter(Boolean).join(" · ");
    byId("passage-title").textContent = title;
    byId("passage-title").title = `Tokens ${count(range.start)} to ${count(range.stop)}, bytes ${count(range.begin)} to ${count(range.end)}`;
    byId("passage-before").disabled = row === 0;
    byId("passage-after").disabled = row === this.asks.rows() - 1;
    const text = byId("passage-text");
    this.lie(card);
    show(this.element, true);
    this.asks.opened(row);
    try {
      const read = found ? await found : { text: await this.asks.text(range), ranges: [] };
      if (this.range === range) text.replaceChildren(...paragraphs(read.text, read.ranges));
    } catch (error) {
      text.textContent = `This passage cannot be read. ${error instanceof Error ? error.message : ""}`;
    }
    announce(title);
    if (focus) {
      if (!this.element.contains(held)) this.opener = held;
      this.element.focus({ preventScroll: true });
      this.element.scrollIntoView({ behavior: "smooth", block: "nearest" });
    }
  }

  close() {
    this.range = null;
    const held = this.element.contains(document.activeElement);
    show(this.element, false);
    this.lie(null);
    if (held && this.opener?.isConnected) this.opener.focus({ preventScroll: true });
    this.asks.opened(null);
  }
}
