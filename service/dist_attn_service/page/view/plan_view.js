/** What encoding a document would take, before anything is started. */

import { sentence } from "../api/http.js";
import { about, bytes, count, duration } from "./figures.js";
import { byId, h, prose, show } from "./dom.js";

const WINDOWS = [128, 256, 512, 1024, 2048];
/** More passages than this are drawn no finer, and take memory of the page: longer windows are proposed. */
const MANY_ROWS = 24_000;
const BYTES_PER_TOKEN = 3.5; // before the service has said
const BYTES_PER_WORD = 5.6; // of English prose, with the blank behind it

/** About how many words so many tokens are. @param {number} window */
const wordsOf = (window) => count(10 * Math.round((window * BYTES_PER_TOKEN) / BYTES_PER_WORD / 10));

/** What is offered: a model that reads no text of any length reads a passage at once. @param {number} longest in tokens */
const offered = (longest) => WINDOWS.filter((window, i) => i === 0 || window < longest);

/** @param {number} size in bytes @param {number} longest that the model reads at once @returns {number} tokens of a passage */
export function proposedWindow(size, longest) {
  const expected = size / BYTES_PER_TOKEN;
  const least = expected < 30_000 ? 128 : expected < 120_000 ? 256 : 512;
  const all = offered(longest);
  return all.find((window) => window >= least && expected / window <= MANY_ROWS) ?? all[all.length - 1];
}

/** @param {number} value @param {any} range */
const between = (value, range, /** @type {(x: number) => string} */ say) =>
  say(range.low) === say(range.high) ? say(value) : `${say(range.low)} to ${say(range.high)}`;

const SOURCES = /** @type {Record<string, string>} */ ({
  given: "as given", counted: "counted", sample: "judged by its beginning", measured: "judged by earlier texts", planned: "by rule of thumb",
});

/** Shows the plan of one document and asks how to go on. */
export class PlanView {
  /** @param {{start: () => void, cancel: () => void, window: (window: number) => void}} asks */
  constructor(asks) {
    this.asks = asks;
    this.element = byId("plan");
    byId("start").addEventListener("click", asks.start);
    byId("plan-cancel").addEventListener("click", asks.cancel);
  }

  /** @param {File} file @param {number} window @param {number} longest */
  open(file, window, longest) {
    byId("plan-title").textContent = file.name;
    byId("plan-size").textContent = bytes(file.size);
    byId("windows").replaceChildren(
      ...offered(longest).map((size) =>
        h("label", { title: `${count(size)} tokens` }, wordsOf(size), h("input", {
          type: "radio", name: "window", value: size, checked: size === window, onchange: () => this.asks.window(size),
        })),
      ),
    );
    this.pending();
    show(this.element, true);
    byId("start").focus({ preventScroll: true });
  }

  pending() {
    byId("plan-figures").replaceChildren(...["Time", "Passages"].map((name) => h("div", { class: "pending" }, h("dt", {}, name), h("dd", {}, "000 000"))));
    byId("plan-details").replaceChildren();
    byId("plan-notes").textContent = "";
    byId("plan-figures").setAttribute("aria-busy", "true");
  }

  /** @param {any} plan the service's estimate */
  show(plan) {
    const { tokens, total_seconds: time, memory_bytes_per_rank: memory } = plan;
    const wait = plan.queue_seconds > 1 ? `, ${duration(plan.queue_seconds)} of it waiting` : "";
    const ranks = plan.ranks === null ? "" : plan.ranks === 1 ? "1 process reads" : `${plan.ranks} processes share the text`;
    const figures = (/** @type {string[][]} */ all) => all.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, more))));
    byId("plan-figures").replaceChildren(...figures([["Time", duration(time.value), between(time.value, time, duration) + wait], ["Passages", count(plan.rows), ""]]));
    byId("plan-details").replaceChildren(
      ...figures([
        ["Tokens", about(tokens.value), SOURCES[tokens.source]],
        ["Memory of each process", memory ? bytes(memory.peak) : "unknown", ranks],
        ["Vectors", bytes(plan.output_bytes.npy), "as NumPy has them"],
      ]),
    );
    byId("plan-figures").removeAttribute("aria-busy");
    byId("plan-notes").replaceChildren(...plan.notes.map((/** @type {string} */ note) => h("span", {}, ...prose(sentence(note)))));
  }

  close() {
    show(this.element, false);
  }
}
