/** Numbers as people read them. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number} value */
export const count = (value) => whole.format(Math.round(value));

/** @param {number} value three figures, then thousands and millions */
export function about(value) {
  if (value < 10_000) return count(value);
  const [size, unit] = value < 1e6 ? [value / 1e3, "k"] : value < 1e9 ? [value / 1e6, "M"] : [value / 1e9, "G"];
  return `${size.toFixed(size < 100 ? 1 : 0).replace(/\.0$/, "")} ${unit}`;
}

/** @param {number} bytes */
export function bytes(bytes) {
  if (bytes < 1000) return `${count(bytes)} B`;
  const units = ["kB", "MB", "GB", "TB", "PB"];
  let size = bytes;
  let unit = -1;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size.toFixed(size < 10 ? 1 : 0)} ${units[unit]}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 1) return "under 1 s";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 600) return `${Math.floor(Math.round(seconds) / 60)} min ${Math.round(seconds) % 60} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** @param {number} fraction */
export const percent = (fraction) => `${Math.floor(100 * Math.min(1, Math.max(0, fraction)))} %`;

/** @param {number} seconds since 1970 */
export const moment = (seconds) =>
  new Date(1000 * seconds).toLocaleString("en", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hour12: false });

/** @param {number} rank from 1 */
export function ordinal(rank) {
  const ends = /** @type {Record<string, string>} */ ({ one: "st", two: "nd", few: "rd", other: "th" });
  return `${count(rank)}${ends[new Intl.PluralRules("en", { type: "ordinal" }).select(rank)]}`;
}
