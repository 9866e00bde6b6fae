/** A bar for each rank: how many steps it made lately, what it does now, and whether it is heard. */

import { bytes } from "./figures.js";
import { byId, h, s, show } from "./dom.js";

const PAST = 40; // looks
const SILENT_SECONDS = 3;
const SMOOTHED = 4; // looks that a bar is the mean of: a step may take longer than the time between two
const PHASES = /** @type {Record<string, string>} */ ({ idle: "waiting", prefill: "reading", decode: "writing" });

/** Keeps the last looks at every rank. */
export class RanksView {
  constructor() {
    this.host = byId("ranks");
    /** @type {Map<number, {step: number, epoch: number, steps: number[]}>} */
    this.past = new Map();
  }

  /** @param {any | null} status what /v1/status says; null where this key may not see it */
  show(status) {
    const ranks = status?.ranks ?? [];
    show(this.host, ranks.length > 0);
    if (!ranks.length) return;
    for (const rank of ranks) this.remember(rank, status.epoch);
    const most = Math.max(0.5, ...[...this.past.values()].flatMap(({ steps }) => smoothed(steps)));
    const words = h("p", { class: "fine" }, "Each process (rank) has a part of the text; its bars are the steps it made lately.");
    this.host.replaceChildren(...ranks.map((/** @type {any} */ rank) => this.drawn(rank, most)), words);
  }

  /** @param {any} rank @param {number} epoch */
  remember(rank, epoch) {
    const before = this.past.get(rank.rank);
    const same = before && before.epoch === epoch && rank.step >= before.step;
    const steps = [...(before?.steps ?? []), same ? rank.step - before.step : 0].slice(-PAST);
    this.past.set(rank.rank, { step: rank.step, epoch, steps });
  }

  /** @param {any} rank @param {number} most steps between two looks */
  drawn(rank, most) {
    const silent = rank.heartbeat_age_seconds > SILENT_SECONDS;
    const doing = silent ? `silent for ${Math.round(rank.heartbeat_age_seconds)} s` : PHASES[rank.phase] ?? rank.phase;
    const steps = smoothed(this.past.get(rank.rank)?.steps ?? []);
    const bars = steps.map((made, i) => {
      const height = made ? Math.max(2, (20 * made) / most) : 1;
      return s("rect", { class: made ? "" : "ground", x: 3 * (PAST - steps.length + i), y: 22 - height, width: 2, height });
    });
    return h(
      "div",
      { class: silent ? "rank silent" : "rank" },
      h("b", {}, `Process ${rank.rank}`),
      h("span", { class: "phase-word" }, doing),
      h("span", {}, rank.peak_rss_bytes ? bytes(rank.peak_rss_bytes) : ""),
      s("svg", { class: "beat", viewBox: `0 0 ${3 * PAST} 22`, preserveAspectRatio: "none", role: "img", "aria-label": `Steps of process ${rank.rank} lately; ${doing}` }, ...bars),
    );
  }
}

/** Means over the last looks. @param {number[]} steps */
const smoothed = (steps) =>
  steps.map((_, i) => {
    const some = steps.slice(Math.max(0, i + 1 - SMOOTHED), i + 1);
    return some.reduce((sum, made) => sum + made, 0) / some.length;
  });
