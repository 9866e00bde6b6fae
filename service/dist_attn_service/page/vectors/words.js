/** Which passages have the words that are asked for: an inverted index that grows with the document, and BM25 over it. */

// A script that writes without spaces is searched by its characters.
const WORD = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}]|[[\p{L}\p{M}\p{N}]--[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}]]+/gv;
// Robertson & Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), equation 3.15.
const SATURATION = 1.5;
const LENGTH = 0.75;
const MOST = 1023; // of one word in one passage; a passage's row and its count share a small integer

/** @param {string} text */
const folded = (text) => text.normalize("NFC").toLowerCase();

/** The words of a text, in its order. @param {string} text @returns {string[]} */
export const wordsIn = (text) => folded(text).match(WORD) ?? [];

/**
 * A text in pieces, every second of which is one of these words. @param {string} text @param {Set<string>} words
 * @returns {string[]}
 */
export function split(text, words) {
  const pieces = [""];
  let from = 0;
  for (const { 0: word, index } of text.matchAll(WORD)) {
    if (!words.has(folded(word))) continue;
    pieces[pieces.length - 1] += text.slice(from, index);
    pieces.push(word, "");
    from = index + word.length;
  }
  pieces[pieces.length - 1] += text.slice(from);
  return pieces;
}

/** The words of passages in their order. Memory: 4 bytes for each different word of each passage. */
export class Words {
  constructor() {
    /** @type {Map<string, number[]>} the passages of a word, each as row * (MOST + 1) + how often it is there */
    this.places = new Map();
    /** @type {number[]} words of each passage */
    this.lengths = [];
    this.total = 0;
  }

  /** The next passage. @param {string} text */
  push(text) {
    /** @type {Map<string, number>} */
    const counts = new Map();
    const words = wordsIn(text);
    for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
    for (const [word, count] of counts) {
      const entry = this.lengths.length * (MOST + 1) + Math.min(count, MOST);
      const places = this.places.get(word);
      if (places) places.push(entry);
      else this.places.set(word, [entry]);
    }
    this.lengths.push(words.length);
    this.total += words.length;
  }

  /** Those words of a question that tell passages apart: most passages do not have them. @param {string} asked */
  telling(asked) {
    return wordsIn(asked).filter((word) => 2 * (this.places.get(word)?.length ?? 0) < this.lengths.length);
  }

  /** BM25 of every passage; 0 where it has none of the words. @param {string} asked @returns {Float64Array} */
  scores(asked) {
    const rows = this.lengths.length;
    const scores = new Float64Array(rows);
    const mean = this.total / Math.max(1, rows) || 1;
    for (const word of new Set(wordsIn(asked))) {
      const places = this.places.get(word) ?? [];
      const rarity = Math.log(1 + (rows - places.length + 0.5) / (places.length + 0.5));
      for (const entry of places) {
        const [row, count] = [Math.floor(entry / (MOST + 1)), entry % (MOST + 1)];
        const norm = SATURATION * (1 - LENGTH + (LENGTH * this.lengths[row]) / mean);
        scores[row] += (rarity * count * (SATURATION + 1)) / (count + norm);
      }
    }
    return scores;
  }
}

/**
 * The best passages by words and vectors together: BM25 as a share of the best one's, and so much of the cosine.
 * @param {Float64Array} scores @param {{row: number, cosine: number}[]} cosines @param {number} weight of the cosine
 * @param {number} most @returns {{row: number, score: number}[]} the best first; `score` is that by words, or where no
 *   passage has any of them the cosine
 */
export function fused(scores, cosines, weight, most) {
  const best = scores.reduce((a, b) => Math.max(a, b), 0);
  const ranked = cosines.map(({ row, cosine }) => {
    const score = best ? (scores[row] ?? 0) / best : cosine;
    return { row, score, rank: best ? score + weight * cosine : cosine };
  });
  ranked.sort((a, b) => b.rank - a.rank);
  return ranked.slice(0, most).map(({ row, score }) => ({ row, score }));
}
