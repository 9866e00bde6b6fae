/** How a document comes to the service: an upload that is begun once and gone on with, over failures and reloads. */

import { ApiError } from "./api/http.js";
import { beginUpload, sendUpload } from "./api/uploads.js";

const GONE = new Set([404, 410]);

/** Whether the service has nothing under a name any more. @param {unknown} error */
const isGone = (error) => error instanceof ApiError && GONE.has(error.status);

/** Remembers what has come of one file, so that no byte of it is sent two times. */
export class Sending {
  /** @param {import("./api/http.js").Api} api @param {import("./view/memory.js").Memory} memory */
  constructor(api, memory) {
    this.api = api;
    this.memory = memory;
    /** @type {{id: string, filename: string, bytes: number, come: number} | null} an upload in its middle */
    this.begun = null;
    /** @type {{id: string, file: File} | null} what is there as a whole */
    this.stored = null;
  }

  /** Take up an upload that was begun before a reload. @param {string} id @returns {Promise<boolean>} whether bytes are missing */
  async find(id) {
    const { status, filename, bytes, received_bytes: come } = await this.api.json(`/v1/uploads/${id}`);
    if (status === "pending") this.begun = { id, filename, bytes, come };
    else this.memory.write({ upload: undefined });
    return status === "pending";
  }

  /** How much of a file is there, 0 to 1; an upload of another one is given up. @param {File} file */
  come(file) {
    if (this.begun && (this.begun.bytes !== file.size || this.begun.filename !== file.name)) this.forget();
    return this.begun ? this.begun.come / Math.max(1, file.size) : 0;
  }

  /** The service forgets what has come of an upload in its middle. */
  forget() {
    if (this.begun) this.api.send(`/v1/uploads/${this.begun.id}`, { method: "DELETE" }).catch(() => undefined);
    this.dropped();
  }

  dropped() {
    this.begun = null;
    this.memory.write({ upload: undefined });
  }

  /**
   * Send what is missing of a file, which may be nothing; from its beginning only if the service has lost the rest.
   * @param {File} file
   * @param {{signal: AbortSignal, sent: (bytes: number) => void, onRetry: (error: ApiError | null, seconds: number) => void}} options
   * @returns {Promise<string>} the id of the stored file
   */
  async send(file, options) {
    if (this.stored?.file === file) {
      const { id } = this.stored;
      if (await this.isThere(id)) return id;
      this.stored = null;
      this.memory.write({ file: undefined, job: undefined });
    }
    if (this.begun) {
      try {
        return await this.goOn(this.begun, file, options);
      } catch (error) {
        if (!isGone(error)) throw error;
        this.dropped();
        options.onRetry(new ApiError("The service no longer has what was sent; it is sent anew."), 0);
      }
    }
    const begun = { id: await beginUpload(this.api, file), filename: file.name, bytes: file.size, come: 0 };
    this.begun = begun;
    this.memory.write({ upload: begun.id });
    return this.goOn(begun, file, options);
  }

  /** @param {NonNullable<Sending["begun"]>} begun @param {File} file @param {Parameters<Sending["send"]>[1]} options */
  async goOn(begun, file, options) {
    const sent = (/** @type {number} */ bytes) => options.sent((begun.come = bytes));
    const id = await sendUpload(this.api, begun.id, file, { ...options, sent });
    this.stored = { id, file };
    this.begun = null;
    this.memory.write({ upload: undefined, file: id });
    return id;
  }

  /** @param {string} id */
  async isThere(id) {
    try {
      await this.api.json(`/v1/files/${id}`);
      return true;
    } catch (error) {
      if (isGone(error)) return false;
      throw error;
    }
  }
}
