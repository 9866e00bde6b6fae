/** Words about what went wrong or is being waited for, where it happens. */

import { h, prose, show } from "./dom.js";

/** A strip that is either away or says something. */
export class Notice {
  /** @param {HTMLElement} element with role status or alert */
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    show(this.element, false);
  }

  /** @param {"wait" | "error" | "note"} kind @param {string} words @param {{label: string, act: () => void}[]} [actions] */
  say(kind, words, actions = []) {
    this.element.className = `notice ${kind}`;
    this.element.replaceChildren(
      h("span", {}, ...prose(words)),
      ...actions.map(({ label, act }) => h("button", { type: "button", class: "quiet", onclick: act }, label)),
    );
    show(this.element, true);
  }
}
