/** The end of a session's text, as far as this page has seen it: no longer than what is shown, however much is drawn. */

export const KEPT = 20_000; // characters; the session itself has all
const SLACK = 10_000; // so that the beginning is not cut off again at every token

/** Pieces of text in their order, the earliest of which are dropped. */
export class Sheet {
  constructor() {
    /** @type {{kind: string, text: string}[]} */
    this.parts = [];
    this.length = 0;
    /** Whether something was dropped. */
    this.cut = false;
  }

  /** @param {string} kind read or drawn @param {string} text @returns {boolean} whether the beginning was dropped for it */
  add(kind, text) {
    const last = this.parts.at(-1);
    if (last?.kind === kind) last.text += text;
    else this.parts.push({ kind, text });
    this.length += text.length;
    if (this.length <= KEPT + SLACK) return false;
    while (this.length > KEPT) this.drop(this.length - KEPT);
    this.cut = true;
    return true;
  }

  /** @param {number} over characters that are too many */
  drop(over) {
    const [first] = this.parts;
    if (first.text.length <= over) this.parts.shift();
    // Never between the halves of a character.
    else first.text = first.text.slice(/[\uDC00-\uDFFF]/.test(first.text[over]) ? over + 1 : over);
    this.length = this.parts.reduce((sum, part) => sum + part.text.length, 0);
  }

  /** @returns {Sheet} */
  copy() {
    const made = new Sheet();
    made.parts = this.parts.map((part) => ({ ...part }));
    [made.length, made.cut] = [this.length, this.cut];
    return made;
  }
}
