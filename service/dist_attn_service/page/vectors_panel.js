/** What is to be seen of a document's vectors: both plots, the passage, and the search, kept in step with each other. */

import { byId } from "./view/dom.js";
import { count } from "./view/figures.js";
import { MapView } from "./view/map_view.js";
import { PassageView } from "./view/passage_view.js";
import { PlaneView } from "./view/plane_view.js";
import { SearchView } from "./view/search_view.js";
import { Tip } from "./view/tip.js";

const CELLS = 360; // of the map in each direction; more rows are put together for display
const POINTS = 4000; // of the projection; of more rows every second, third, … is drawn
const HITS = 6;
// Vectors of the shipped language models find less than words do (docs/page.md): they decide between passages that have
// the words equally, and where none has any. Those of a text encoder were trained to be asked, and count as much.
const WEIGHTS = { writes: 0.02, encodes: 1 };
const REDRAW_MS = 900;

/** Draws what the worker knows, again whenever there is more of it. */
export class VectorsPanel {
  /**
   * @param {import("./api/http.js").Api} api @param {import("./document_panel.js").DocumentPanel} documentPanel
   * @param {import("./vectors/worker_client.js").WorkerClient} worker @param {import("./recipes.js").Recipes} recipes
   * @param {(text: string) => void} goOn @param {() => boolean} writes whether the model is one of language
   */
  constructor(api, documentPanel, worker, recipes, goOn, writes) {
    this.api = api;
    this.documentPanel = documentPanel;
    this.worker = worker;
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
      open,
      find: async (words) => {
        if (!this.documentPanel.at.rows) return { hits: [], words: [] };
        const answer = await api.json("/v1/embeddings", { method: "POST", json: { input: words } });
        recipes.add("search", { input: words, job: this.documentPanel.job });
        const weight = writes() ? WEIGHTS.writes : WEIGHTS.encodes;
        const query = { asked: words, vector: answer.data[0].embedding, weight, most: HITS };
        const { hits, words: telling } = await worker.ask("find", query);
        return { hits: this.hits(hits), words: telling };
      },
    });
    this.passage = new PassageView({
      range: async (row) => (await worker.ask("ranges", { rows: [row] }))[0],
      text: (range) => this.read(range),
      rows: () => documentPanel.at.rows,
      size: () => documentPanel.at.size,
      like: (row) =>
        void this.search.run(async () => ({ hits: this.hits(await worker.ask("like", { row, most: HITS })), words: [] }), "There is no other passage."),
      goOn: async (range) => goOn(await this.read(range)),
      opened: (row) => this.mark(row === null ? this.marked : [row, ...this.marked]),
    });
    documentPanel.addEventListener("rows", () => this.refresh());
    documentPanel.addEventListener("changed", () => (documentPanel.phase === "empty" || documentPanel.phase === "planned" || documentPanel.phase === "sending" ? this.clear() : this.refresh()));
  }

  /** @param {number} row */
  titleOf(row) {
    return `Passage ${count(row + 1)}`;
  }

  /** @param {number} row */
  async textOf(row) {
    return this.read((await this.worker.ask("ranges", { rows: [row] }))[0]);
  }

  /** @param {import("./view/passage_view.js").Range} range */
  read(range) {
    if (!this.documentPanel.text) throw new Error("The text is not here.");
    return this.documentPanel.text.read(range.begin, range.end);
  }

  /** @param {{row: number, score: number}[]} hits */
  hits(hits) {
    this.marked = hits.map(({ row }) => row);
    this.mark(this.marked);
    return hits.map((hit) => ({ ...hit, text: this.textOf(hit.row) }));
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
