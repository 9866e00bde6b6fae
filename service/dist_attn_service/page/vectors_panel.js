/** What is to be seen of a document's vectors: both plots, the passage, and the search, kept in step with each other. */

import { search } from "./api/documents.js";
import { byId } from "./view/dom.js";
import { count } from "./view/figures.js";
import { MapView } from "./view/map_view.js";
import { PassageView } from "./view/passage_view.js";
import { PlaneView } from "./view/plane_view.js";
import { SearchView } from "./view/search_view.js";
import { inUnits } from "./view/set_text.js";
import { Tip } from "./view/tip.js";

const CELLS = 360; // of the map in each direction; more rows are put together for display
const POINTS = 4000; // of the projection; of more rows every second, third, … is drawn
const HITS = 8;
const REDRAW_MS = 900;

/** Draws what the worker knows, again whenever there is more of it. */
export class VectorsPanel {
  /**
   * @param {import("./api/http.js").Api} api @param {import("./document_panel.js").DocumentPanel} documentPanel
   * @param {import("./vectors/worker_client.js").WorkerClient} worker @param {import("./recipes.js").Recipes} recipes
   * @param {{goOn: (text: string) => void, isEncoder: () => boolean, examples: () => string[]}} asks `isEncoder`: whether the
   *   model was trained to be asked; `examples`: what this document can be asked
   */
  constructor(api, documentPanel, worker, recipes, { goOn, isEncoder, examples }) {
    this.api = api;
    this.documentPanel = documentPanel;
    this.worker = worker;
    this.recipes = recipes;
    this.isEncoder = isEncoder;
    this.drawing = false;
    this.stale = false;
    /** @type {number[]} the rows of the last search */
    this.marked = [];
    const tip = new Tip(async (row) => ({ title: this.titleOf(row), text: await this.textOf(row) }));
    const open = (/** @type {number} */ row) => this.passage.open(row, true);
    const tells = {
      point: (/** @type {number[]} */ rows, /** @type {number} */ x, /** @type {number} */ y) => tip.point(rows, x, y),
      leave: () => tip.leave(),
      open,
      name: (/** @type {number} */ row) => this.titleOf(row),
    };
    this.map = new MapView(byId("map"), tells);
    this.plane = new PlaneView(byId("plane"), tells);
    this.search = new SearchView({
      open: (row, card, read) => this.passage.open(row, true, card, read),
      left: () => this.passage.close(),
      examples,
      // Hidden states of a language model find far less than words do (docs/page.md): only an encoder's count.
      find: (words) => this.find(words, isEncoder() ? "hybrid" : "lexical"),
    });
    this.passage = new PassageView({
      range: async (row) => (await worker.ask("ranges", { rows: [row] }))[0],
      text: (range) => this.read(range),
      place: async (at, range) => namesOf(placeOf((await worker.ask("under", { places: [at] }))[0], range)),
      rows: () => documentPanel.at.rows,
      size: () => documentPanel.at.size,
      like: (row) => void this.search.run(() => this.like(row)),
      goOn: async (range) => goOn(await this.read(range)),
      opened: (row) => this.mark(row === null ? this.marked : [row, ...this.marked]),
    });
    this.search.invite();
    documentPanel.addEventListener("rows", () => this.refresh());
    documentPanel.addEventListener("changed", () => {
      if (["empty", "planned", "sending", "queued"].includes(documentPanel.phase)) return this.clear();
      this.refresh();
      if (documentPanel.phase === "done") this.search.renew(this.passage.range !== null);
    });
  }

  /** @param {number} row */
  titleOf(row) {
    return `Passage ${count(row + 1)}`;
  }

  /** @param {number} row */
  async textOf(row) {
    return this.read((await this.worker.ask("ranges", { rows: [row] }))[0]);
  }

  /** @param {{begin: number, end: number}} range */
  async read(range) {
    if (!this.documentPanel.text) throw new Error("The text is not here.");
    return this.documentPanel.text.read(range.begin, range.end);
  }

  /** @param {string} query @param {"hybrid" | "lexical" | "dense"} mode @returns {Promise<import("./view/search_view.js").Found>} */
  async find(query, mode) {
    const { job } = this.documentPanel;
    if (!job || !this.documentPanel.at.rows) return { hits: [], rows: 0, size: 0, note: "Nothing is read yet; it is asked again when all is.", isPart: true };
    const asked = { query, mode, top_k: HITS };
    const answer = await search(this.api, job, asked);
    this.recipes.add("search", { ...asked, job });
    const [{ rows, complete }] = answer.documents;
    const isPart = !complete;
    const part = isPart ? `Of the ${count(rows)} passages that were read by then. ` : "";
    if (!answer.results.length) {
      const instead = { label: "Look by meaning", act: () => void this.search.run(() => this.find(query, "dense")) };
      return { hits: [], rows, size: 0, note: `${part}No passage has any of these words.`, isPart, instead };
    }
    const found = answer.results.map((/** @type {any} */ one) => {
      const at = judgedAt(one);
      const read = this.read({ begin: one.byte_start, end: one.byte_stop }).then((text) => ({ text, ranges: matched(one, text), at }));
      const { lexical, dense: meaning } = one.parts;
      const words = mode === "dense" ? undefined : lexical; // null: none of the words is there
      return { row: one.index, begin: one.byte_start, at, parts: { words, meaning }, read };
    });
    const doubt = mode === "dense" && !this.isEncoder() ? "By manner and subject; this model knows no facts." : "";
    return { ...(await this.placed(found, rows, part + doubt)), isPart };
  }

  /** Passages whose vectors are nearest to a passage's. @param {number} row @returns {Promise<import("./view/search_view.js").Found>} */
  async like(row) {
    const near = await this.worker.ask("like", { row, most: HITS });
    const ranges = await this.worker.ask("ranges", { rows: near.map((/** @type {{row: number}} */ one) => one.row) });
    const found = ranges.map((/** @type {any} */ range, /** @type {number} */ i) => {
      const at = (range.begin + range.end) / 2;
      const read = this.read(range).then((text) => ({ text, ranges: [], at }));
      return { ...range, at, parts: { meaning: { rank: i + 1, score: near[i].cosine } }, read };
    });
    return this.placed(found, this.documentPanel.at.rows, found.length ? `Like passage ${count(row + 1)}:` : "There is no other passage.");
  }

  /** @param {any[]} found @param {number} rows @param {string} note @returns {Promise<import("./view/search_view.js").Found>} */
  async placed(found, rows, note) {
    this.marked = found.map(({ row }) => row);
    const places = await this.worker.ask("under", { places: found.map(({ at }) => at) });
    const ranges = await this.worker.ask("ranges", { rows: this.marked });
    this.mark(this.marked);
    const hits = found.map((one, i) => ({ ...one, place: placeOf(places[i], ranges[i]) }));
    return { hits, rows, size: this.documentPanel.at.size, note };
  }

  /** @param {number[]} rows */
  mark(rows) {
    this.map.mark(rows);
    this.plane.mark(rows);
  }

  /** Draw what there is now; at most once in a while as long as more comes. */
  async refresh() {
    this.stale = true;
    if (this.drawing) return;
    this.drawing = true;
    try {
      while (this.stale) {
        this.stale = false;
        if (this.documentPanel.at.rows) {
          const { rows, tokens, expected } = this.documentPanel.at;
          const total = this.documentPanel.phase === "reading" && tokens ? Math.round((rows * Math.max(expected, tokens)) / tokens) : rows;
          this.map.show(await this.worker.ask("map", { cells: CELLS, expected: total }));
          this.plane.show(await this.worker.ask("plane", { points: POINTS }));
        }
        if (this.documentPanel.phase === "reading") await new Promise((resolve) => setTimeout(resolve, REDRAW_MS));
      }
    } finally {
      this.drawing = false; // also when the worker could not, so that the next rows are drawn
    }
  }

  clear() {
    this.map.show(null);
    this.plane.show(null);
    this.marked = [];
    this.mark([]);
    this.search.clear();
    this.passage.close();
  }
}

/** With the page on which a passage begins, or its heading where none is found in the text. @param {{part: string, chapter: string}} place @param {{section: string | null}} range */
const placeOf = ({ part, chapter }, { section }) =>
  section && (!chapter || /^page \d+$/.test(section)) ? { part: [part, section].filter(Boolean).join(", "), chapter } : { part, chapter };

/** @param {{part: string, chapter: string}} place */
const namesOf = ({ part, chapter }) => [chapter, part].filter(Boolean).join(", ");

/** The byte whose chapter is told: that of the first word that matched, else the middle. @param {any} result */
function judgedAt({ byte_start: begin, byte_stop: end, text, words: [first] }) {
  if (!first) return (begin + end) / 2;
  const [[before]] = inUnits(text, [first]);
  return Math.min(end, begin + new TextEncoder().encode(text.slice(0, before)).length);
}

/** Where the words that matched stand in the passage as the page shows it: with the words whole that its edges cut. @param {any} result @param {string} text */
function matched(result, text) {
  const before = /^\uFFFD*/.exec(result.text)?.[0].length ?? 0;
  const shift = text.indexOf(result.text.replace(/^\uFFFD+|\uFFFD+$/g, "")) - before;
  if (shift + before < 0) return [];
  return inUnits(result.text, result.words).map(([start, stop]) => /** @type {[number, number]} */ ([start + shift, stop + shift]));
}
