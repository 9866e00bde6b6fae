/** The self-similarity map: each pixel says how alike two places of the document are. */

import { announce, framed, h, s } from "./dom.js";
import { onScale, scaleStops } from "./palette.js";

const STEPS = 256;
const [LOW, HIGH] = [0.08, 0.985]; // quantiles that the scale spans

/** @typedef {{cells: number, filled: number, perCell: number, values: Float32Array}} Similarities */

/** Draws the map, points at two passages, opens one. */
export class MapView {
  /**
   * @param {HTMLElement} host
   * @param {{point: (rows: number[], x: number, y: number) => void, leave: () => void, open: (row: number) => void, name: (row: number) => string}} tells
   */
  constructor(host, tells) {
    this.host = host;
    this.tells = tells;
    /** @type {Similarities | null} */
    this.map = null;
    /** @type {number[]} */
    this.marks = [];
    this.cursor = [0, 0];
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      "aria-label": "Map of what resembles what. Arrow keys move over it, Enter opens the passage.",
      onpointermove: (/** @type {PointerEvent} */ event) => this.pointed(event),
      onpointerleave: () => this.left(),
      onblur: () => this.left(),
      onclick: (/** @type {MouseEvent} */ event) => this.opened(event),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.keyed(event),
    });
    this.overlay = s("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
    host.append(this.canvas, this.overlay);
    this.redraw = framed(() => this.draw());
    new MutationObserver(this.redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
  }

  /** @param {Similarities | null} map */
  show(map) {
    this.host.toggleAttribute("data-empty-now", !map?.filled);
    this.map = map;
    this.redraw();
  }

  /** Rows to mark along the diagonal. @param {number[]} rows */
  mark(rows) {
    this.marks = rows;
    this.drawMarks();
  }

  draw() {
    const { map, canvas } = this;
    if (!map || !map.filled) {
      canvas.width = canvas.height = 1;
      this.overlay.replaceChildren();
      return;
    }
    canvas.width = canvas.height = map.cells;
    canvas.classList.toggle("coarse", map.cells < 220);
    this.overlay.setAttribute("viewBox", `0 0 ${map.cells} ${map.cells}`);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const image = context.createImageData(map.filled, map.filled);
    const stops = scaleStops();
    const colours = Array.from({ length: STEPS }, (_, i) => onScale(stops, i / (STEPS - 1)));
    const [low, high] = bounds(map);
    for (let i = 0; i < map.values.length; i += 1) {
      const at = Math.round(((map.values[i] - low) / (high - low || 1)) * (STEPS - 1));
      const [red, green, blue] = colours[Math.min(STEPS - 1, Math.max(0, at))];
      image.data.set([red, green, blue, 255], 4 * i);
    }
    context.putImageData(image, 0, 0);
    this.drawMarks();
  }

  /** @param {number[] | null} [cross] a column and a row of cells */
  drawMarks(cross = null) {
    const { map } = this;
    if (!map) return;
    const line = { class: "cross", "vector-effect": "non-scaling-stroke" };
    const lines = cross
      ? [
          s("line", { ...line, x1: cross[0] + 0.5, x2: cross[0] + 0.5, y1: 0, y2: map.filled }),
          s("line", { ...line, x1: 0, x2: map.filled, y1: cross[1] + 0.5, y2: cross[1] + 0.5 }),
        ]
      : [];
    const size = map.cells / 55;
    const marks = this.marks.map((row) => {
      const at = Math.floor(row / map.perCell) + 0.5;
      return s("rect", { class: "mark", x: at - size / 2, y: at - size / 2, width: size, height: size, "vector-effect": "non-scaling-stroke" });
    });
    this.overlay.replaceChildren(...lines, ...marks);
  }

  /** The cells under a pointer, or null where nothing is yet. @param {MouseEvent} event */
  under(event) {
    if (!this.map) return null;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * this.map.cells);
    const y = Math.floor(((event.clientY - box.top) / box.height) * this.map.cells);
    return x >= 0 && y >= 0 && x < this.map.filled && y < this.map.filled ? [x, y] : null;
  }

  /** @param {PointerEvent} event */
  pointed(event) {
    const cells = this.under(event);
    if (!cells || !this.map) return this.left();
    this.drawMarks(cells);
    const { perCell } = this.map;
    const rows = cells[0] === cells[1] ? [cells[1] * perCell] : [cells[1] * perCell, cells[0] * perCell];
    this.tells.point(rows, event.clientX, event.clientY);
  }

  left() {
    this.drawMarks();
    this.tells.leave();
  }

  /** @param {MouseEvent} event */
  opened(event) {
    const cells = this.under(event);
    if (cells && this.map) this.tells.open(cells[1] * this.map.perCell);
  }

  /** @param {KeyboardEvent} event */
  keyed(event) {
    const moves = /** @type {Record<string, number[]>} */ ({
      ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
    });
    const move = moves[event.key];
    if (!this.map || !(move || event.key === "Enter")) return;
    event.preventDefault();
    const { perCell, filled, values } = this.map;
    if (!move) return this.tells.open(this.cursor[1] * perCell);
    const step = event.shiftKey ? 10 : 1;
    this.cursor = this.cursor.map((at, i) => Math.min(filled - 1, Math.max(0, at + step * move[i])));
    this.drawMarks(this.cursor);
    const [x, y] = this.cursor;
    const alike = values[y * filled + x].toFixed(2);
    announce(`${this.tells.name(y * perCell)} against ${this.tells.name(x * perCell)}: ${alike}`);
  }
}

/** The values that the scale spans: a few pairs are much alike, and shall not leave all others one colour. */
function bounds(/** @type {Similarities} */ map) {
  const sample = [];
  const every = Math.max(1, Math.floor(map.values.length / 20_000));
  for (let i = 1; i < map.values.length; i += every) {
    if (Math.floor(i / map.filled) !== i % map.filled) sample.push(map.values[i]);
  }
  sample.sort((a, b) => a - b);
  if (!sample.length) return [0, 1];
  return [sample[Math.floor(LOW * (sample.length - 1))], sample[Math.floor(HIGH * (sample.length - 1))]];
}
