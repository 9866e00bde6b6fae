/** What outlives a reload: ids alone, apart for each key; and the key itself, for as long as the tab is open. */

const KEY = "dist-attn key";

/** @returns {string} the key of this tab */
export const savedKey = () => sessionStorage.getItem(KEY) ?? "";

/** @param {string} key */
export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Ids that belong to one key. */
export class Memory {
  /** @param {Storage} storage @param {string} name */
  constructor(storage, name) {
    this.storage = storage;
    this.name = name;
  }

  /**
   * The ids of a key. Its digest names them; where the browser gives none (no https, not this machine), they last as
   * long as the tab, so that nothing of the key is ever written down.
   * @param {string} key @returns {Promise<Memory>}
   */
  static async of(key) {
    if (!key) return new Memory(localStorage, "dist-attn ids");
    if (!globalThis.crypto?.subtle) return new Memory(sessionStorage, "dist-attn ids of the key");
    const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(`dist-attn page ${key}`));
    const name = [...new Uint8Array(digest).subarray(0, 8)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    return new Memory(localStorage, `dist-attn ids ${name}`);
  }

  /** @returns {{upload?: string, file?: string, job?: string, reading?: string, session?: string}} */
  read() {
    try {
      return JSON.parse(this.storage.getItem(this.name) ?? "{}");
    } catch {
      return {};
    }
  }

  /** @param {{upload?: string, file?: string, job?: string, reading?: string, session?: string}} ids undefined forgets */
  write(ids) {
    const all = Object.fromEntries(Object.entries({ ...this.read(), ...ids }).filter(([, id]) => id));
    this.storage.setItem(this.name, JSON.stringify(all));
  }
}
