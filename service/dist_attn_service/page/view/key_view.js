/** The dialog that asks for a key. */

import { byId } from "./dom.js";

const PLAIN = "It stays in this tab and goes with it.";

/** Opens on its button, and when the service refuses what it was given. */
export class KeyView {
  /** @param {(key: string) => void} chosen */
  constructor(chosen) {
    this.dialog = byId("key-dialog");
    byId("key-open").addEventListener("click", () => this.open(PLAIN));
    byId("key-cancel").addEventListener("click", () => this.dialog.close());
    byId("key-form").addEventListener("submit", () => {
      const key = byId("key").value.trim();
      byId("key").value = "";
      chosen(key);
    });
  }

  /** @param {string} words */
  open(words) {
    byId("key-words").textContent = words;
    if (!this.dialog.open) this.dialog.showModal();
    byId("key").focus();
  }
}
