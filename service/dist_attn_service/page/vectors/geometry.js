/**
 * What is drawn of the vectors: similarities and two principal components, always about their own mean.
 *
 * Hidden states of a language model share one large direction, so that any two of them have a cosine near 1; about
 * their mean the cosine tells passages apart (Mu & Viswanath, All-but-the-Top, 2018).
 */

/** @typedef {import("./rows.js").Rows} Rows */

const ITERATIONS = 40;

/** @param {ArrayLike<number>} a @param {ArrayLike<number>} b @param {number} [at] where in `a` to begin */
function dot(a, b, at = 0) {
  let sum = 0;
  for (let i = 0; i < b.length; i += 1) sum += a[at + i] * b[i];
  return sum;
}

/** @template {Float32Array | Float64Array} T @param {T} vector @returns {T} the same, of length 1 (or 0) */
function unit(vector) {
  const size = Math.sqrt(dot(vector, vector)) || 1;
  for (let i = 0; i < vector.length; i += 1) vector[i] /= size;
  return vector;
}

/** @param {Rows} rows @returns {Float64Array} */
export function meanOf(rows) {
  const mean = new Float64Array(rows.width);
  for (let row = 0, at = 0; row < rows.count; row += 1) {
    for (let i = 0; i < rows.width; i += 1, at += 1) mean[i] += rows.vectors[at];
  }
  for (let i = 0; i < mean.length; i += 1) mean[i] /= Math.max(1, rows.count);
  return mean;
}

/** A vector about the mean, of length 1. @param {ArrayLike<number>} vector @param {Float64Array} mean */
export function directionOf(vector, mean) {
  const direction = new Float32Array(mean.length);
  for (let i = 0; i < mean.length; i += 1) direction[i] = vector[i] - mean[i];
  return unit(direction);
}

/**
 * The rows in at most `cells` groups of neighbours. A group's direction is the mean of its rows' directions.
 * @param {Rows} rows @param {number} cells @param {number} expected rows that there will be in the end
 * @returns {{cells: number, filled: number, perCell: number, values: Float32Array}} cosines of groups, cells x filled
 *   of which the first `filled` squared are there; cost: rows x width + filled^2 x width / 2
 */
export function selfSimilarity(rows, cells, expected) {
  const total = Math.max(rows.count, expected, 1);
  const perCell = Math.ceil(total / cells);
  const used = Math.ceil(total / perCell);
  const filled = Math.ceil(rows.count / perCell);
  const mean = meanOf(rows);
  /** @type {Float32Array[]} */
  const groups = [];
  for (let cell = 0; cell < filled; cell += 1) {
    const sum = new Float32Array(rows.width);
    for (let row = cell * perCell; row < Math.min((cell + 1) * perCell, rows.count); row += 1) {
      const direction = directionOf(rows.vector(row), mean);
      for (let i = 0; i < sum.length; i += 1) sum[i] += direction[i];
    }
    groups.push(unit(sum));
  }
  const values = new Float32Array(filled * filled);
  for (let a = 0; a < filled; a += 1) {
    values[a * filled + a] = 1;
    for (let b = 0; b < a; b += 1) values[a * filled + b] = values[b * filled + a] = dot(groups[a], groups[b]);
  }
  return { cells: used, filled, perCell, values };
}

/**
 * The places of at most `points` rows in the plane of the two strongest principal components of their directions, by
 * power iteration (the second one in what the first leaves).
 * @param {Rows} rows @param {number} points @param {Float32Array[]} before components of the last time, to begin with
 * @returns {{components: Float32Array[], every: number, places: Float32Array}} x and y of each `every`-th row
 */
export function principalPlane(rows, points, before) {
  const mean = meanOf(rows);
  const every = Math.max(1, Math.ceil(rows.count / points));
  /** @type {Float32Array[]} */
  const sample = [];
  for (let row = 0; row < rows.count; row += every) sample.push(directionOf(rows.vector(row), mean));
  /** @type {Float32Array[]} */
  const components = [];
  for (let k = 0; k < 2; k += 1) {
    // Of one row, or of equal ones, there was no component: from nothing none would ever come.
    const known = before[k]?.length === rows.width && dot(before[k], before[k]) > 0;
    let component = known ? before[k].slice() : seeded(rows.width, k);
    for (let step = 0; step < ITERATIONS; step += 1) {
      const next = new Float32Array(rows.width);
      for (const direction of sample) {
        const weight = dot(direction, component);
        for (let i = 0; i < next.length; i += 1) next[i] += weight * direction[i];
      }
      for (const component of components) {
        const along = dot(next, component);
        for (let i = 0; i < next.length; i += 1) next[i] -= along * component[i];
      }
      component = unit(next);
    }
    components.push(component);
  }
  const places = new Float32Array(2 * sample.length);
  sample.forEach((direction, i) => {
    places[2 * i] = dot(direction, components[0]);
    places[2 * i + 1] = dot(direction, components[1]);
  });
  return { components, every, places };
}

/** A direction to begin with, the same each time. @param {number} width @param {number} k */
function seeded(width, k) {
  const start = new Float32Array(width);
  for (let i = 0; i < width; i += 1) start[i] = Math.sin(1 + i * (12.9898 + 5.1 * k));
  return unit(start);
}

/**
 * The rows whose directions are nearest to a vector's. @param {Rows} rows @param {ArrayLike<number>} vector
 * @param {number} most @param {number} [except] a row that is left out
 * @returns {{row: number, cosine: number}[]} the best first
 */
export function nearest(rows, vector, most, except = -1) {
  const mean = meanOf(rows);
  const direction = directionOf(vector, mean);
  /** @type {{row: number, cosine: number}[]} */
  const hits = [];
  for (let row = 0; row < rows.count; row += 1) {
    if (row !== except) hits.push({ row, cosine: dot(directionOf(rows.vector(row), mean), direction) });
  }
  return hits.sort((a, b) => b.cosine - a.cosine).slice(0, most);
}
