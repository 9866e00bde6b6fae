/** The headings of a document, found while its text comes: which part, chapter and section a place lies in. */

const MOST = 20_000; // headings that are kept
const LONGEST = 100; // bytes of a heading's line
const NEWLINE = 10;
const BLANK = 32; // this and lower bytes
const NUMBER = "(?:\\d{1,4}|[IVXLCDM]{1,9}|(?:the |THE )?[A-Z][\\w-]*)\\b";
const PART = "(?:BOOK|Book|PART|Part|VOLUME|Volume|ACT|Act)";
const CHAPTER = "(?:CHAPTER|Chapter|STAVE|Stave|CANTO|Canto|LETTER|Letter|SCENE|Scene|SECTION|Section|ADVENTURE|Adventure|EPISODE|Episode)";
const ALONE = "(?:PROLOGUE|Prologue|EPILOGUE|Epilogue|PREFACE|Preface|INTRODUCTION|Introduction|CONCLUSION|Conclusion)\\.?$";
const IS_PART = new RegExp(`^${PART} `);
const IS_ALONE = new RegExp(`^${ALONE}`);
const IS_NUMERAL = /^[IVXLCDM]{1,9}\.?$/; // a chapter of a book that has no others, else a section of one
// "CHAPTER IV", "Chapter 12. The Carpet-Bag", "IV. The Preparation", "Book the First", "## A title"; not "Chapter of accidents".
const IS_HEADING = new RegExp(`^(?:(?:${PART}|${CHAPTER}) ${NUMBER}|${ALONE}|[IVXLCDM]{1,9}(?:\\.|$|\\. +["“A-Z].*)$|#{1,4} +\\S)`);

/** Headings in their order. They stand on lines of their own, with an empty line before and behind them. */
export class Headings {
  constructor() {
    /** @type {{at: number, text: string, isPart: boolean, isNumeral: boolean}[]} `at` in bytes */
    this.all = [];
    this.seen = 0;
    /** The beginning of a line that is not there as a whole. @type {Uint8Array} */
    this.rest = new Uint8Array(0);
    this.skips = false; // that line is too long for a heading
    this.isAfterBlank = true;
    /** @type {Headings["all"][0] | null} what is a heading if an empty line follows */
    this.maybe = null;
  }

  /** The next bytes of the text. @param {Uint8Array} bytes */
  push(bytes) {
    const data = new Uint8Array(this.rest.length + bytes.length);
    data.set(this.rest);
    data.set(bytes, this.rest.length);
    const base = this.seen - this.rest.length;
    this.seen += bytes.length;
    let from = 0;
    for (let end = data.indexOf(NEWLINE); end >= 0; end = data.indexOf(NEWLINE, from)) {
      if (!this.skips) this.line(data.subarray(from, end), base + from);
      this.skips = false;
      from = end + 1;
    }
    this.skips ||= data.length - from > LONGEST;
    if (this.skips) [this.isAfterBlank, this.maybe] = [false, null];
    this.rest = this.skips ? new Uint8Array(0) : data.slice(from);
  }

  /** @param {Uint8Array} line @param {number} at */
  line(line, at) {
    if (line.every((byte) => byte <= BLANK)) {
      if (this.maybe && this.all.length < MOST) this.all.push(this.maybe);
      [this.isAfterBlank, this.maybe] = [true, null];
      return;
    }
    const text = this.isAfterBlank && line.length <= LONGEST ? new TextDecoder().decode(line).trim().replace(/\s+/g, " ") : "";
    this.maybe = IS_HEADING.test(text) ? { at, text: text.replace(/^#+ /, "").replace(/ ?--+ ?/g, " – "), isPart: IS_PART.test(text), isNumeral: IS_NUMERAL.test(text) } : null;
    this.isAfterBlank = false;
  }

  /** What a place stands under. @param {number} at in bytes @returns {{part: string, chapter: string}} "" where there is none */
  under(at) {
    const before = this.all.filter((heading) => heading.at <= at);
    const last = before.at(-1);
    const part = before.findLast(({ isPart }) => isPart);
    const above = last?.isNumeral ? before.findLast(({ isNumeral }) => !isNumeral) : undefined;
    const inside = above && !above.isPart && !IS_ALONE.test(above.text) ? `${above.text.replace(/\.$/, "")}, ` : "";
    return { part: part?.text ?? "", chapter: last && !last.isPart ? inside + last.text : "" };
  }
}
