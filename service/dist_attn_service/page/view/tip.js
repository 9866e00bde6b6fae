/** A note beside the pointer with the beginnings of one or two passages. */

import { h, show } from "./dom.js";

const DELAY_MS = 60;
const SHOWN = 190; // characters

/** Shows passages as they are read; an older one never comes over a newer one. */
export class Tip {
  /** @param {(row: number) => Promise<{title: string, text: string}>} passage */
  constructor(passage) {
    this.passage = passage;
    this.turn = 0;
    this.element = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    document.body.append(this.element);
  }

  /** @param {number[]} rows @param {number} x @param {number} y */
  point(rows, x, y) {
    const turn = ++this.turn;
    this.place(x, y);
    setTimeout(async () => {
      if (turn !== this.turn) return;
      const passages = await Promise.all(rows.map((row) => this.passage(row))).catch(() => []);
      if (turn !== this.turn || !passages.length) return;
      this.element.replaceChildren(
        ...passages.map(({ title, text }) => h("div", {}, h("b", {}, title), h("p", {}, shortened(text)))),
      );
      show(this.element, true);
      this.place(x, y);
    }, DELAY_MS);
  }

  leave() {
    this.turn += 1;
    show(this.element, false);
  }

  /** @param {number} x @param {number} y */
  place(x, y) {
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = x + 18 + width > innerWidth ? Math.max(8, x - width - 18) : x + 18;
    const top = Math.max(8, Math.min(y + 14, innerHeight - height - 8));
    this.element.style.transform = `translate(${left}px, ${top}px)`;
  }
}

/** @param {string} text */
export function shortened(text, most = SHOWN) {
  const plain = text.replace(/\s+/g, " ").trim();
  return plain.length > most ? `${plain.slice(0, most).replace(/\s\S*$/, "")} …` : plain;
}
