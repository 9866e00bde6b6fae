/** The views of the page as tabs: arrow keys, Home and End move between them, the address remembers which. */

import { show } from "./dom.js";

/** @returns {(name: string) => void} opens a view by the name of its tab */
export function startTabs() {
  const tabs = /** @type {HTMLElement[]} */ ([...document.querySelectorAll('[role="tab"]')]);
  const nameOf = (/** @type {HTMLElement} */ tab) => tab.id.replace("tab-", "");
  const select = (/** @type {HTMLElement} */ chosen, focus = false) => {
    for (const tab of tabs) {
      const on = tab === chosen;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      show(/** @type {Element} */ (document.getElementById(tab.getAttribute("aria-controls") ?? "")), on);
    }
    if (focus) chosen.focus();
    history.replaceState(null, "", `#${nameOf(chosen)}`);
    dispatchEvent(new CustomEvent("view", { detail: nameOf(chosen) }));
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      select(tabs[(to + tabs.length) % tabs.length], true);
    });
  });
  const open = (/** @type {string} */ name) => {
    const tab = tabs.find((one) => nameOf(one) === name);
    if (tab) select(tab);
  };
  select(tabs.find((tab) => `#${nameOf(tab)}` === location.hash) ?? tabs[0]);
  return open;
}
