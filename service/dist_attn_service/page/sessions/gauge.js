/** The gauge: the state's size, which most models' texts do not make larger, beside the cache of keys and values of a softmax model. */

import { byId, h, show } from "../view/dom.js";
import { bytes, count } from "../view/figures.js";

const KEYS_AND_VALUES = 2;
const FLOAT_BYTES = 4;
const SEEN = 0.006; // of a bar, however small its value

/**
 * Keys and values of every token in every layer, in float32 as this service computes.
 * @param {{num_layers: number | null, embedding_size: number}} model @param {number} tokens
 */
export const cacheBytes = (model, tokens) => KEYS_AND_VALUES * FLOAT_BYTES * (model.num_layers ?? 0) * model.embedding_size * tokens;

/** @param {any} model its card @param {number} tokens @param {number} state bytes; 0 while unknown */
export function showGauge(model, tokens, state) {
  const known = Boolean(model?.num_layers && state && tokens);
  show(byId("gauge"), known);
  if (!known) return;
  const cache = cacheBytes(model, tokens);
  const most = Math.max(cache, state);
  byId("gauge-bars").replaceChildren(bar("This model", state, most, "state"), bar("A model that keeps every word", cache, most, "cache"));
  const ratio = cache / state;
  const times = ratio >= 1 ? `${ratio < 10 ? ratio.toFixed(1) : count(ratio)} times as much` : `still less; it would be more from ${count(state / cacheBytes(model, 1))} on`;
  byId("gauge-words").textContent = `To go on with ${count(tokens)} word pieces, this model keeps ${bytes(state)}; a usual one as large (${model.num_layers} layers, of the same width) would keep ${bytes(cache)}: ${times}. ${model.state_token_bytes ? `Each piece adds up to ${bytes(model.state_token_bytes)} here.` : "It does not grow with the text."}`;
  byId("gauge").title = "The state of this session beside the keys and values (KV cache) of a softmax model in float32";
}

/** @param {string} name @param {number} value @param {number} most @param {string} kind */
function bar(name, value, most, kind) {
  const fill = h("b", { class: kind });
  fill.style.transform = `scaleX(${Math.max(SEEN, value / most)})`;
  return h("div", { class: "gauge-bar" }, h("span", {}, name), h("strong", {}, bytes(value)), h("i", { "aria-hidden": "true" }, fill));
}
