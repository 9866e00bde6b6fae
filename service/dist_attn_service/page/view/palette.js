/** The colours of the plots, which the style sheet has, as numbers for canvases. */

/** @typedef {[number, number, number]} Colour */

/** @param {string} text as in `#aabbcc` @returns {Colour} */
const parsed = (text) => {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
};

/** The stops of a scale, `--scale-0` to `--scale-4`. @returns {Colour[]} */
export function scaleStops() {
  const style = getComputedStyle(document.documentElement);
  return [0, 1, 2, 3, 4].map((i) => parsed(style.getPropertyValue(`--scale-${i}`)));
}

/** A place on the scale. @param {Colour[]} stops @param {number} at from 0 to 1 @returns {Colour} */
export function onScale(stops, at) {
  const place = Math.min(1, Math.max(0, at)) * (stops.length - 1);
  const below = Math.min(stops.length - 2, Math.floor(place));
  const part = place - below;
  const [a, b] = [stops[below], stops[below + 1]];
  return [0, 1, 2].map((i) => Math.round(a[i] + part * (b[i] - a[i])));
}

/** A colour of the style sheet. @param {string} name */
export const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
