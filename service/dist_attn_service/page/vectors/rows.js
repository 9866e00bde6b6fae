/** The rows of a document: every vector in float32 as the service sent it, and the ranges of text that they stand for. */

const FIRST_ROWS = 512;

/** Grows by doubling; 4 bytes per number and 32 bytes per row. Nothing is thinned here. */
export class Rows {
  constructor() {
    this.count = 0;
    this.width = 0;
    this.vectors = new Float32Array(0);
    /** Start and stop in tokens, then in bytes. */
    this.ranges = new Float64Array(0);
    /** Where another page or heading begins. @type {{row: number, name: string | null}[]} */
    this.sections = [];
  }

  /** @param {{index: number, start: number, stop: number, byte_start: number, byte_stop: number, embedding: number[], section?: string | null}} row */
  push(row) {
    if (row.index !== this.count) throw new Error(`row ${row.index} came where row ${this.count} was due`);
    if (!this.width) this.width = row.embedding.length;
    if (row.embedding.length !== this.width) throw new Error(`row ${row.index} has ${row.embedding.length} numbers, not ${this.width}`);
    if (this.count * this.width === this.vectors.length) this.grow();
    this.vectors.set(row.embedding, this.count * this.width);
    this.ranges.set([row.start, row.stop, row.byte_start, row.byte_stop], 4 * this.count);
    const { section: name = null } = row;
    if (name !== (this.sections.at(-1)?.name ?? null)) this.sections.push({ row: this.count, name });
    this.count += 1;
  }

  grow() {
    const rows = Math.max(FIRST_ROWS, 2 * this.count);
    const vectors = new Float32Array(rows * this.width);
    const ranges = new Float64Array(4 * rows);
    vectors.set(this.vectors);
    ranges.set(this.ranges);
    this.vectors = vectors;
    this.ranges = ranges;
  }

  /** @param {number} row @returns {Float32Array} a view, not a copy */
  vector(row) {
    return this.vectors.subarray(row * this.width, (row + 1) * this.width);
  }

  /** @param {number} row @returns {{row: number, start: number, stop: number, begin: number, end: number, section: string | null}} */
  range(row) {
    const [start, stop, begin, end] = this.ranges.subarray(4 * row, 4 * row + 4);
    const section = this.sections.findLast((one) => one.row <= row)?.name ?? null;
    return { row, start, stop, begin, end, section };
  }

  /** Bytes that the arrays take. */
  get bytes() {
    return this.vectors.byteLength + this.ranges.byteLength;
  }
}
