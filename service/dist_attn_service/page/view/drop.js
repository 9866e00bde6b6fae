/** The ways in: a file dropped anywhere, a file chosen, a text pasted, and the sample that the page brings along. */

import { byId, h, show } from "./dom.js";

const SAMPLE = "/page/sample.txt";
/** What the sample is called, and what it can be asked. */
export const SAMPLE_NAME = "A Tale of Two Cities, first book.txt";
export const QUESTIONS = ["What is the answer to the message: recalled to life?", "A cask of wine breaks in the street", "Who makes shoes in the garret?"];

/** @param {(file: File) => void} taken @param {(sample: File, question: string) => void} tried with "" for no question */
export function startDrop(taken, tried) {
  const [input, form, area] = [byId("file"), byId("paste-form"), byId("pasted")];
  byId("pick").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    const file = input.files[0];
    input.value = "";
    if (file) taken(file);
  });

  const sampled = async (/** @type {string} */ question) => {
    const text = await fetch(SAMPLE, { credentials: "omit" }).then((answer) => answer.blob());
    tried(new File([text], SAMPLE_NAME, { type: "text/plain" }), question);
  };
  byId("sample").addEventListener("click", () => sampled(""));
  byId("sample-questions").replaceChildren(...QUESTIONS.map((words) => h("button", { type: "button", onclick: () => sampled(words) }, words)));

  const pasting = (/** @type {boolean} */ on) => {
    show(form, on);
    show(byId("paste"), !on);
    (on ? area : byId("paste")).focus();
  };
  byId("paste").addEventListener("click", () => pasting(true));
  byId("paste-cancel").addEventListener("click", () => pasting(false));
  form.addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!area.value) return area.focus();
    taken(asFile(area.value));
    area.value = "";
    pasting(false);
  });
  addEventListener("paste", (event) => {
    const target = /** @type {Element | null} */ (event.target);
    if (target?.closest("input, textarea") || byId("start-view").hidden) return;
    const file = event.clipboardData?.files[0];
    const text = event.clipboardData?.getData("text");
    if (file) taken(file);
    else if (text) taken(asFile(text));
  });

  let depth = 0;
  const holdsFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
  const dragging = (/** @type {boolean} */ on) => document.body.classList.toggle("drag", on);
  addEventListener("dragenter", (event) => holdsFiles(event) && dragging(++depth > 0));
  addEventListener("dragleave", (event) => holdsFiles(event) && dragging(--depth > 0));
  addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    depth = 0;
    dragging(false);
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    event.preventDefault();
    taken(file);
  });
}

/** @param {string} text */
const asFile = (text) => new File([text], "Pasted text.txt", { type: "text/plain" });
