/** The projection: each passage as a point in the plane of two principal components, coloured by its place in the text. */

import { announce, framed, h } from "./dom.js";
import { onScale, scaleStops, styled } from "./palette.js";

const MARGIN = 14;
const REACH = 24; // pixels from a point at which a pointer means it

/** Draws points, points at one, opens it. */
export class PlaneView {
  /**
   * @param {HTMLElement} host
   * @param {{point: (rows: number[], x: number, y: number) => void, leave: () => void, open: (row: number) => void, name: (row: number) => string}} tells
   */
  constructor(host, tells) {
    this.host = host;
    this.tells = tells;
    /** @type {{every: number, places: Float32Array} | null} */
    this.plane = null;
    /** Where points are drawn, in pixels. */
    this.drawn = new Float32Array(0);
    /** @type {number[]} */
    this.marks = [];
    this.near = -1;
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      "aria-label": "Projection of the passages. Left and right arrow keys walk through the document, Enter opens the passage.",
      onpointermove: (/** @type {PointerEvent} */ event) => this.pointed(event),
      onpointerleave: () => this.left(),
      onblur: () => this.left(),
      onclick: () => this.near >= 0 && this.plane && tells.open(this.near * this.plane.every),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.keyed(event),
    });
    host.append(this.canvas);
    this.redraw = framed(() => this.draw());
    new ResizeObserver(this.redraw).observe(host);
    new MutationObserver(this.redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
  }

  /** @param {{every: number, places: Float32Array} | null} plane */
  show(plane) {
    this.host.toggleAttribute("data-empty-now", !plane?.places.length);
    this.plane = plane;
    this.near = -1;
    this.redraw();
  }

  /** @param {number[]} rows */
  mark(rows) {
    this.marks = rows;
    this.redraw();
  }

  draw() {
    const { canvas, host, plane } = this;
    const [width, height] = [host.clientWidth, host.clientHeight];
    const density = Math.min(2, devicePixelRatio || 1);
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.scale(density, density);
    const points = plane ? plane.places.length / 2 : 0;
    this.drawn = plane ? fitted(plane.places, width, height) : new Float32Array(0);
    if (!plane || !points) return;
    const stops = scaleStops();
    const radius = points > 1500 ? 1.6 : points > 400 ? 2.4 : 3.2;
    for (let i = 0; i < points; i += 1) {
      const [red, green, blue] = onScale(stops, 0.28 + (0.72 * i) / Math.max(1, points - 1));
      context.fillStyle = `rgb(${red} ${green} ${blue} / 85%)`;
      this.disc(context, i, radius);
    }
    context.lineWidth = 2;
    context.strokeStyle = styled("--mark");
    for (const row of this.marks) this.ring(context, Math.round(row / plane.every), 6);
    context.strokeStyle = styled("--ink");
    if (this.near >= 0) this.ring(context, this.near, 7);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} i @param {number} radius */
  disc(context, i, radius) {
    context.beginPath();
    context.arc(this.drawn[2 * i], this.drawn[2 * i + 1], radius, 0, 2 * Math.PI);
    context.fill();
  }

  /** @param {CanvasRenderingContext2D} context @param {number} i @param {number} radius */
  ring(context, i, radius) {
    if (2 * i >= this.drawn.length) return;
    context.beginPath();
    context.arc(this.drawn[2 * i], this.drawn[2 * i + 1], radius, 0, 2 * Math.PI);
    context.stroke();
  }

  /** @param {PointerEvent} event */
  pointed(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [near, least] = [-1, REACH ** 2];
    for (let i = 0; i < this.drawn.length / 2; i += 1) {
      const far = (this.drawn[2 * i] - x) ** 2 + (this.drawn[2 * i + 1] - y) ** 2;
      if (far < least) [near, least] = [i, far];
    }
    this.canvas.classList.toggle("pointing", near >= 0);
    if (near < 0 || !this.plane) return this.left();
    if (near !== this.near) {
      this.near = near;
      this.redraw();
    }
    this.tells.point([near * this.plane.every], event.clientX, event.clientY);
  }

  left() {
    if (this.near >= 0) this.redraw();
    this.near = -1;
    this.tells.leave();
  }

  /** @param {KeyboardEvent} event */
  keyed(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (!this.plane || !(step || event.key === "Enter")) return;
    event.preventDefault();
    if (!step) return void (this.near >= 0 && this.tells.open(this.near * this.plane.every));
    this.near = Math.min(this.drawn.length / 2 - 1, Math.max(0, this.near + step));
    this.redraw();
    announce(this.tells.name(this.near * this.plane.every));
  }
}

/** Places as pixels: the whole cloud, as large as it fits. @param {Float32Array} places @param {number} width @param {number} height */
function fitted(places, width, height) {
  const low = [Infinity, Infinity];
  const high = [-Infinity, -Infinity];
  for (let i = 0; i < places.length; i += 1) {
    low[i % 2] = Math.min(low[i % 2], places[i]);
    high[i % 2] = Math.max(high[i % 2], places[i]);
  }
  const size = [width, height];
  return places.map((value, i) => {
    const k = i % 2;
    const span = high[k] - low[k];
    return MARGIN + (span ? (value - low[k]) / span : 0.5) * (size[k] - 2 * MARGIN);
  });
}
