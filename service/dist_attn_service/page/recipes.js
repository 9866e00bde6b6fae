/** The same with curl and Python: what was just done on the page, as programs would do it. */

import { byId, h } from "./view/dom.js";

const MOST = 8;

/** @param {string} text as one word of a shell */
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
/** @param {any} value as Python writes it; texts stay as they are @returns {string} */
const python = (value) => {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
};

/**
 * Each gives a title, the parts of a curl command after `curl`, a line each, and lines of Python that use `client`.
 * @type {Record<string, (url: string, about: any) => {title: string, curl: string[], python: string}>}
 */
const RECIPES = {
  estimate: (url, { bytes, window }) => ({
    title: "What it would take",
    curl: [shell(`${url}/v1/estimate`), `--json ${shell(JSON.stringify({ bytes, window }))}`],
    python: `plan = client.post("/v1/estimate", json=${python({ bytes, window })}).json()\nprint(plan["tokens"]["value"], plan["total_seconds"]["value"])`,
  }),
  encode: (url, { file, window }) => ({
    title: "Encode the document",
    curl: [`-N ${shell(`${url}/v1/encodings?window=${window}`)}`, "-H 'content-type: text/plain'", `--data-binary ${shell(`@${file}`)}`],
    python: `with open(${python(file)}, "rb") as text, client.stream(\n    "POST", "/v1/encodings", params={"window": ${window}}, content=text, headers={"content-type": "text/plain"}, timeout=None\n) as rows:\n    for line in rows.iter_lines():\n        row = json.loads(line)\n        print(row.get("index", row))`,
  }),
  rows: (url, { job }) => ({
    title: "Save the vectors",
    curl: [shell(`${url}/v1/jobs/${job}/result?format=npy`), "-o rows.npy"],
    python: `rows = np.load(io.BytesIO(client.get("/v1/jobs/${job}/result", params={"format": "npy"}).content))\nnp.save("rows.npy", rows)\nprint(rows.shape)`,
  }),
  search: (url, { job, ...asked }) => ({
    title: "Find passages",
    curl: [shell(`${url}/v1/search`), `--json ${shell(JSON.stringify({ ...asked, documents: [{ job_id: job }] }))}`],
    python: `found = client.post("/v1/search", json=${python({ ...asked, documents: [{ job_id: job }] })}).json()\nfor one in found["results"]:\n    print(f"passage {one['index'] + 1}:", " ".join(one["text"].split())[:70])`,
  }),
  append: (url, { session, file }) => ({
    title: "Read the text into a session",
    curl: [shell(`${url}/v1/sessions/${session}/append`), "-H 'idempotency-key: once'", `--json ${shell(JSON.stringify({ file_id: file }))}`],
    python: `read = client.post("/v1/sessions/${session}/append", json={"file_id": "${file}"}, timeout=None).text\nprint(read.splitlines()[-1])`,
  }),
  generate: (url, { session, options }) => ({
    title: "Continue",
    curl: [`-N ${shell(`${url}/v1/sessions/${session}/generate`)}`, `--json ${shell(JSON.stringify({ ...options, stream: true }))}`],
    python: `drawn = client.post("/v1/sessions/${session}/generate", json=${python(options)}, timeout=None).json()\nprint(drawn["choices"][0]["text"])`,
  }),
  fork: (url, { session, position }) => ({
    title: "Fork a session",
    curl: [shell(`${url}/v1/sessions/${session}/fork`), `--json ${shell(JSON.stringify({ position }))}`],
    python: `fork = client.post("/v1/sessions/${session}/fork", json=${python({ position })}).json()["id"]`,
  }),
  state: (url, { session, position }) => ({
    title: "Save a state",
    curl: [shell(`${url}/v1/sessions/${session}/state?position=${position}`), "-o text.state"],
    python: `state = client.get("/v1/sessions/${session}/state", params={"position": ${position}}).content`,
  }),
};

/** Remembers the last things and writes them down in the language that is chosen. */
export class Recipes {
  /** @param {string} url of the service @param {boolean} keyed whether a key is sent */
  constructor(url, keyed) {
    this.url = url;
    this.keyed = keyed;
    this.language = "curl";
    /** @type {{kind: string, about: any}[]} newest first, one of each kind */
    this.done = [];
    for (const language of ["curl", "python"]) {
      byId(`code-${language}`).addEventListener("click", () => {
        this.language = language;
        for (const one of ["curl", "python"]) byId(`code-${one}`).setAttribute("aria-pressed", String(one === language));
        this.draw();
      });
    }
    this.draw();
  }

  /** @param {string} kind @param {any} about */
  add(kind, about) {
    this.done = [{ kind, about }, ...this.done.filter((one) => one.kind !== kind)].slice(0, MOST);
    this.draw();
  }

  draw() {
    const done = this.done.length ? this.done : [{ kind: "encode", about: { file: "book.txt", window: 512 } }];
    byId("recipes").replaceChildren(...done.map(({ kind, about }) => this.block(RECIPES[kind](this.url, about))));
  }

  /** @param {{title: string, curl: string[], python: string}} recipe */
  block(recipe) {
    const text = this.language === "curl" ? this.command(recipe.curl) : this.program(recipe.python);
    const copy = h("button", { type: "button" }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard?.writeText(text).then(() => (copy.textContent = "Copied"), () => (copy.textContent = "Select and copy"));
      setTimeout(() => (copy.textContent = "Copy"), 1600);
    });
    return h("section", { class: "recipe" }, h("header", {}, h("h2", {}, recipe.title), copy), h("pre", { tabindex: 0 }, h("code", {}, text)));
  }

  /** @param {string[]} parts */
  command(parts) {
    const key = this.keyed ? ['-H "authorization: Bearer $DIST_ATTN_API_KEY"'] : [];
    return `curl ${[...parts, ...key].join(" \\\n  ")}`;
  }

  /** @param {string} body */
  program(body) {
    const needs = [body.includes("io.") && "import io", body.includes("json.loads") && "import json", this.keyed && "import os"].filter(Boolean);
    const third = ["import httpx", body.includes("np.") && "import numpy as np"].filter(Boolean);
    const headers = this.keyed ? `, headers={"authorization": f"Bearer {os.environ['DIST_ATTN_API_KEY']}"}` : "";
    return `${needs.length ? `${needs.join("\n")}\n\n` : ""}${third.join("\n")}\n\nclient = httpx.Client(base_url="${this.url}"${headers})\n${body}`;
  }
}
