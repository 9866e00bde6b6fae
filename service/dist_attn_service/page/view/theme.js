/** Light or dark: what the system says, until somebody turns it. */

import { byId } from "./dom.js";

const NAME = "dist-attn theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

/** The button in the head of the page. */
export function startTheme() {
  const button = byId("theme");
  const saved = localStorage.getItem(NAME);
  if (saved) document.documentElement.dataset.theme = saved;
  const now = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const label = () => {
    const other = now() === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `Switch to ${other} colours`);
    button.title = `Switch to ${other} colours`;
  };
  button.addEventListener("click", () => {
    const other = now() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = other;
    localStorage.setItem(NAME, other);
    label();
  });
  dark.addEventListener("change", label);
  label();
}
