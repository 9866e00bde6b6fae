/** Elements in one call. Text is always text: nothing here reads markup. */

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * @template {Element} E @param {E} element @param {Record<string, any>} attributes @param {Child[]} children @returns {E}
 */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/**
 * An HTML element; attributes that begin with `on` are listeners.
 * @param {string} tag @param {Record<string, any>} [attributes] @param {...Child} children @returns {any}
 */
export const h = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

/** A sentence of the service, in which `this` is code. @param {string} words @returns {Child[]} */
export const prose = (words) => words.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** An SVG element. @param {string} tag @param {Record<string, any>} [attributes] @param {...Child} children @returns {any} */
export const s = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** The element of an id, which index.html has. @param {string} id @returns {any} */
export const byId = (id) => {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no #${id}`);
  return element;
};

/** @param {Element} element @param {boolean} shown */
export const show = (element, shown) => element.toggleAttribute("hidden", !shown);

/** Say something to who listens to the page, politely. @param {string} words */
export function announce(words) {
  byId("announcer").textContent = words;
}

/** At most once per frame. @param {() => void} draw @returns {() => void} */
export function framed(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** Give a file to who uses the page. @param {Blob} blob @param {string} name */
export function saveBlob(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
