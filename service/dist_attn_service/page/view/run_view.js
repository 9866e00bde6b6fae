/** A document under way or done: what it is called, how far it is, the figures, the actions that there are. */

import { about, bytes, count, duration, percent } from "./figures.js";
import { byId, h, show } from "./dom.js";

/** @typedef {"sending" | "queued" | "reading" | "done" | "failed" | "stopped"} Phase */

const WORDS = /** @type {Record<Phase, string>} */ ({
  sending: "Sending", queued: "Waiting for its turn", reading: "Reading", done: "Read", failed: "Failed", stopped: "Stopped",
});

/** Shows the state of one run. */
export class RunView {
  constructor() {
    this.bar = byId("bar");
    this.said = "";
  }

  /** @param {string} name */
  open(name) {
    byId("run-title").textContent = name;
    document.title = `${name} · dist-attn`;
    show(byId("run"), true);
  }

  close() {
    document.title = "dist-attn";
    show(byId("run"), false);
  }

  /**
   * @param {Phase} phase
   * @param {{size: number, sent: number, read: number, tokens: number, expected: number, rows: number, speed: number | null, eta: number | null, seconds: number, waiting: boolean}} at
   */
  show(phase, at) {
    const running = phase === "sending" || phase === "queued" || phase === "reading";
    const fraction = phase === "sending" ? at.sent / at.size : phase === "done" ? 1 : at.size ? at.read / at.size : 0;
    this.bar.dataset.phase = phase;
    this.bar.firstElementChild.style.transform = `scaleX(${Math.min(1, fraction)})`;
    this.bar.setAttribute("aria-valuenow", String(Math.floor(100 * Math.min(1, fraction))));
    this.bar.setAttribute("aria-valuetext", `${WORDS[phase]}, ${percent(fraction)}`);
    const words = at.waiting ? `Interrupted · ${percent(fraction)}` : running && phase !== "queued" ? `${WORDS[phase]} · ${percent(fraction)}` : WORDS[phase];
    byId("run-phase").textContent = words;
    this.fill("run-figures", this.figures(phase, at));
    this.fill("run-details", this.details(phase, at));
    show(byId("vectors-view"), running || at.rows > 0);
    show(byId("cancel"), running);
    show(byId("save-rows"), phase === "done");
    show(byId("another"), !running);
  }

  /** @param {string} id @param {string[][]} figures */
  fill(id, figures) {
    byId(id).replaceChildren(...figures.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more)))));
  }

  /** @param {Phase} phase @param {any} at @returns {string[][]} */
  figures(phase, at) {
    if (phase === "sending") return [["Sent", bytes(at.sent), `of ${bytes(at.size)}`]];
    if (phase === "done") return [["Text", bytes(at.size)], ["Passages", count(at.rows)], ["Took", duration(at.seconds)]];
    return [["Read", bytes(at.read), `of ${bytes(at.size)}`], ["Passages", count(at.rows)], ["To go", at.eta === null ? "–" : duration(at.eta)]];
  }

  /** For who runs the service. @param {Phase} phase @param {any} at @returns {string[][]} */
  details(phase, at) {
    if (phase === "sending") return [];
    const expected = phase !== "done" && at.expected ? `of about ${about(at.expected)}` : "";
    return [["Tokens", count(at.tokens), expected], ["Speed", at.speed ? about(at.speed) : "–", "tokens/s"]];
  }
}
