/** One passage to read, with its neighbours and those that are like it. */

import { announce, byId, show } from "./dom.js";
import { count, percent } from "./figures.js";

/** @typedef {{row: number, start: number, stop: number, begin: number, end: number}} Range */

/** Opens, turns and closes the passage. */
export class PassageView {
  /**
   * @param {{range: (row: number) => Promise<Range>, text: (range: Range) => Promise<string>, rows: () => number, size: () => number,
   *   like: (row: number) => void, goOn: (range: Range) => void, opened: (row: number | null) => void}} asks
   */
  constructor(asks) {
    this.asks = asks;
    this.element = byId("passage");
    /** @type {Range | null} */
    this.range = null;
    /** @type {HTMLElement | null} where the focus was before, and goes back to */
    this.opener = null;
    byId("passage-before").addEventListener("click", () => this.range && this.open(this.range.row - 1));
    byId("passage-after").addEventListener("click", () => this.range && this.open(this.range.row + 1));
    byId("passage-like").addEventListener("click", () => this.range && asks.like(this.range.row));
    byId("passage-continue").addEventListener("click", () => this.range && asks.goOn(this.range));
    byId("passage-close").addEventListener("click", () => this.close());
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.close());
  }

  /** @param {number} row @param {boolean} [focus] */
  async open(row, focus = false) {
    if (row < 0 || row >= this.asks.rows()) return;
    const range = await this.asks.range(row);
    this.range = range;
    const title = `Passage ${count(row + 1)} of ${count(this.asks.rows())} · tokens ${count(range.start)} to ${count(range.stop)} · at ${percent(range.begin / Math.max(1, this.asks.size()))}`;
    byId("passage-title").textContent = title;
    byId("passage-before").disabled = row === 0;
    byId("passage-after").disabled = row === this.asks.rows() - 1;
    const text = byId("passage-text");
    show(this.element, true);
    this.asks.opened(row);
    try {
      const words = await this.asks.text(range);
      if (this.range === range) text.textContent = words.trim();
    } catch (error) {
      text.textContent = `This passage cannot be read. ${error instanceof Error ? error.message : ""}`;
    }
    announce(title);
    if (focus) {
      const held = /** @type {HTMLElement | null} */ (document.activeElement);
      if (!this.element.contains(held)) this.opener = held;
      this.element.focus({ preventScroll: true });
      this.element.scrollIntoView({ behavior: "smooth", block: "nearest" });
    }
  }

  close() {
    this.range = null;
    const held = this.element.contains(document.activeElement);
    show(this.element, false);
    if (held && this.opener?.isConnected) this.opener.focus({ preventScroll: true });
    this.asks.opened(null);
  }
}
