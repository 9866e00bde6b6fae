/** The text of a passage as it is set: a book's hard line breaks joined, and the words that matched marked. */

import { h } from "./dom.js";

const NARROWEST = 55; // characters of the longest line: verse and lists are narrower, and keep their lines
const WIDEST = 100; // where each line is a paragraph they are wider
const SLACK = 3; // a line may end a little before the next word would not fit
const BLOCK = /(?:[^\n]*\S[^\n]*(?:\n|$))+/g; // lines without an empty one between them
const GAP = /\n[^\S\n]*\n\s*/g;

/** @typedef {[number, number]} Range of UTF-16 code units, the stop exclusive */

/** The same text with blanks for line breaks that only fit it into a width; every character keeps its place. @param {string} text */
export const joined = (text) => text.replace(BLOCK, joinedBlock);

/** @param {string} block */
function joinedBlock(block) {
  const lines = block.split("\n");
  const widths = lines.map((line) => line.trimEnd().length);
  const width = Math.max(...widths);
  if (width < NARROWEST || width > WIDEST) return block;
  return lines
    .map((line, i) => {
      if (i === lines.length - 1) return line;
      const next = /^\S*/.exec(lines[i + 1].trimStart())?.[0].length ?? 0;
      // A passage may begin in the middle of its first line.
      const isFull = i === 0 || widths[i] + 1 + next > width - SLACK;
      return line + (next && isFull ? " " : "\n");
    })
    .join("");
}

/** Ranges of code points as ranges of code units. @param {string} text @param {number[][]} ranges in order @returns {Range[]} */
export function inUnits(text, ranges) {
  let [points, units] = [0, 0];
  const unit = (/** @type {number} */ point) => {
    for (; points < point && units < text.length; points += 1) units += (text.codePointAt(units) ?? 0) > 0xffff ? 2 : 1;
    return units;
  };
  return ranges.map(([start, stop]) => [unit(start), unit(stop)]);
}

/** A stretch of a text as nodes, its ranges marked. @param {string} text @param {Range[]} ranges @param {number} [from] @param {number} [to] */
export function marked(text, ranges, from = 0, to = text.length) {
  /** @type {(string | Node)[]} */
  const nodes = [];
  let at = from;
  for (const [start, stop] of ranges) {
    if (start < at || stop > to) continue;
    nodes.push(text.slice(at, start), h("mark", {}, text.slice(start, stop)));
    at = stop;
  }
  return [...nodes, text.slice(at, to)];
}

/** The paragraphs of a passage as elements. @param {string} text @param {Range[]} ranges that are marked */
export function paragraphs(text, ranges) {
  const whole = joined(text);
  const edges = [...whole.matchAll(GAP)].map(({ 0: gap, index }) => [index, index + gap.length]);
  const begins = [0, ...edges.map(([, end]) => end)];
  const ends = [...edges.map(([begin]) => begin), whole.length];
  return begins.filter((begin, i) => whole.slice(begin, ends[i]).trim()).map((begin) => h("p", {}, ...marked(whole, ranges, begin, ends[begins.indexOf(begin)])));
}

/**
 * The stretch of a passage with most of the words that matched, shortened to what fits a card.
 * @param {string} text @param {Range[]} ranges @param {number} most characters @returns {(string | Node)[]}
 */
export function excerpt(text, ranges, most) {
  const plain = joined(text).replace(/\s/g, " ");
  const near = ranges.map(([start]) => new Set(ranges.filter((other) => other[0] >= start && other[1] < start + most / 2).map(([a, b]) => plain.slice(a, b).toLowerCase())).size);
  const first = ranges[near.indexOf(Math.max(...near))]?.[0] ?? 0;
  let from = 0;
  if (first > most / 4) {
    // From the beginning of a sentence where one is near, else of a word.
    const before = plain.slice(0, first);
    const sentence = Math.max(...[...before.matchAll(/[.!?…]["”’')]*\s+/g)].map(({ 0: end, index }) => index + end.length), 0);
    from = sentence > first - most / 2 ? sentence : plain.indexOf(" ", first - most / 4) + 1;
  }
  let to = Math.min(plain.length, from + most);
  if (to < plain.length) to = Math.max(plain.lastIndexOf(" ", to), from);
  return [from || /^\s*\p{Ll}/u.test(plain) ? "… " : "", ...marked(plain, ranges, from, to), to < plain.length ? " …" : ""];
}
