/** A document under way or done: what it is called, how far it is, the figures, the actions that there are. */

import { about, bytes, count, duration, percent } from "./figures.js";
import { byId, h, show } from "./dom.js";

/** @typedef {"sending" | "queued" | "reading" | "done" | "failed" | "stopped"} Phase */

const WORDS = /** @type {Record<Phase, string>} */ ({
  sending: "Sending", queued: "Waiting for its turn", reading: "Reading", done: "Encoded", failed: "Failed", stopped: "Stopped",
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
    byId("run-figures").replaceChildren(
      ...this.figures(phase, at).map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more)))),
    );
    show(byId("vectors-view"), phase !== "failed" || at.rows > 0);
    show(byId("cancel"), running);
    for (const id of ["to-session", "save-rows"]) show(byId(id), phase === "done");
    show(byId("another"), !running);
  }

  /** @param {Phase} phase @param {any} at @returns {string[][]} */
  figures(phase, at) {
    if (phase === "sending") return [["Sent", bytes(at.sent), `of ${bytes(at.size)}`]];
    if (phase === "done") {
      return [
        ["Text", bytes(at.size)],
        ["Tokens", count(at.tokens)],
        ["Passages", count(at.rows)],
        ["Time", duration(at.seconds), at.speed ? `${about(at.speed)} tokens/s` : ""],
      ];
    }
    return [
      ["Read", bytes(at.read), `of ${bytes(at.size)}`],
      ["Tokens", count(at.tokens), at.expected ? `of about ${about(at.expected)}` : ""],
      ["Speed", at.speed ? about(at.speed) : "–", "tokens/s"],
      ["To go", at.eta === null ? "–" : duration(at.eta)],
      ["Passages", count(at.rows)],
    ];
  }
}
