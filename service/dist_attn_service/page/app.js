/** The page: its parts, put together. */

import { Api, ApiError, wordsOf } from "./api/http.js";
import { VectorsPanel } from "./vectors_panel.js";
import { DocumentPanel } from "./document_panel.js";
import { Recipes } from "./recipes.js";
import { ContinuePanel } from "./sessions/continue_panel.js";
import { DocumentSession } from "./sessions/document_session.js";
import { StatusWatch } from "./status.js";
import { WorkerClient } from "./vectors/worker_client.js";
import { byId, show } from "./view/dom.js";
import { QUESTIONS, SAMPLE_NAME, startDrop } from "./view/drop.js";
import { KeyView } from "./view/key_view.js";
import { Memory, savedKey, saveKey } from "./view/memory.js";
import { Notice } from "./view/notice.js";
import { RanksView } from "./view/ranks_view.js";
import { startTabs } from "./view/tabs.js";
import { startTheme } from "./view/theme.js";

startTheme();
const openTab = startTabs();
const key = savedKey();
const api = new Api(key);
const memory = await Memory.of(key);
const worker = new WorkerClient();
const recipes = new Recipes(location.origin, Boolean(key));
/** The model that writes, if one does, and the one that reads documents: the same, unless an encoder stands beside it. @type {any} */
let writer = null;
/** @type {any} */
let reader = null;
const writes = (/** @type {any} */ model) => Boolean(model?.capabilities.includes("completions"));
const keys = new KeyView((chosen) => {
  saveKey(chosen);
  location.reload();
});
const documentPanel = new DocumentPanel(api, memory, worker, recipes);
const writing = new ContinuePanel(api, memory, recipes, () => writer);
const reading = new DocumentSession(api, memory, recipes);
const vectors = new VectorsPanel(api, documentPanel, worker, recipes, {
  goOn: (text) => {
    openTab("continue");
    writing.guarded(async () => {
      await writing.open(null);
      byId("prompt").value = text.trim();
      byId("prompt").focus();
    });
  },
  isEncoder: () => Boolean(reader) && !writes(reader),
  examples: () => (documentPanel.name === SAMPLE_NAME ? QUESTIONS : []),
});
const ranks = new RanksView();
const notice = new Notice(byId("page-notice"));
let asked = false;
/** Whether the document or the session says this already. @param {string} words */
const isSaid = (words) => ["document-notice", "write-notice", "carry", "found"].some((id) => byId(id).textContent.includes(words));

const watch = new StatusWatch(
  () => api,
  (status, error) => {
    const state = byId("service-state");
    if (error instanceof ApiError && error.status === 401) {
      state.className = "state away";
      state.textContent = key ? "Key refused" : "Key needed";
      if (!asked) keys.open(key ? "The service does not know this key." : "This service asks for a key. It stays in this tab and goes with it.");
      asked = true;
      return;
    }
    ranks.show(documentPanel.busy && !error ? status : null);
    const ready = !error && (status?.ready ?? true);
    const many = status?.ranks?.length;
    const names = [...new Set([writer?.id ?? status?.model, reader?.id])].filter(Boolean).join(" and ");
    state.title = many ? `${many} ${many === 1 ? "process computes" : "processes compute"} (ranks)` : "";
    state.className = `state ${ready ? "ready" : "away"}`;
    state.textContent = error ? "Not reached" : ready ? names : "Not ready";
    const words = error ? wordsOf(error) : "";
    if (words && !isSaid(words)) notice.say("wait", words);
    else if (error) notice.clear();
    else if (!ready) notice.say("wait", `The engine is not ready: ${status.reason}. Work that was begun goes on by itself.`);
    else notice.clear();
  },
);

/** What the session of the document reads; its length is that of the writer's own tokens, as far as it is known. */
async function documentToRead() {
  const { text, at, name } = documentPanel;
  const file = text?.id ?? "";
  if (writer === reader) return { file, name, tokens: at.tokens };
  const plan = await api.json("/v1/estimate", { method: "POST", json: { file_id: file, model: writer.id } });
  return { file, name, tokens: plan.tokens.value };
}

let question = ""; // that is asked as soon as the sample is read
documentPanel.addEventListener("changed", () => {
  const { phase, busy } = documentPanel;
  watch.hurry(busy);
  if (!busy) ranks.show(null);
  show(byId("to-session"), phase === "done" && Boolean(writer));
  if (phase === "empty" || phase === "sending") reading.forget();
  if (phase !== "done") return;
  // A state that grows with the text may be large: then the text is read when somebody wants to go on with it.
  if (writer && !writer.state_token_bytes && !writer.max_model_len) documentToRead().then((document) => reading.begin(document), () => undefined);
  if (question) vectors.search.ask(question);
  question = "";
});
byId("to-session").addEventListener("click", () => {
  const { text, at, name } = documentPanel;
  if (!text) return;
  openTab("continue");
  writing.read(name, async (signal, tell) => reading.whole(await documentToRead(), signal, tell), () => text.blob(0, at.size));
});
startDrop(
  (file) => {
    openTab("document");
    if (documentPanel.busy) notice.say("note", "Stop the document that is under way first.");
    else documentPanel.open(file);
  },
  (sample, words) => {
    question = words;
    documentPanel.read(sample);
  },
);
// With a key a link cannot open the reference: a browser sends none along.
show(byId("docs-link").parentElement, !key);

watch.look();
try {
  const models = (await api.json("/v1/models")).data;
  writer = models.find(writes) ?? null; // the one that writes stands first, the one that reads documents last
  reader = models.at(-1);
  const card = (/** @type {any} */ model) => JSON.stringify({ ...model, id: "" });
  if (writer && card(writer) === card(reader)) reader = writer; // under another of its names
  watch.look(); // which can name them now
  documentPanel.longest = reader.max_model_len ?? Infinity;
  show(byId("tab-continue"), Boolean(writer));
  await documentPanel.resume();
  if (writer) await writing.resume();
} catch (error) {
  if (!(error instanceof ApiError) || error.status !== 401) notice.say("error", error instanceof Error ? error.message : String(error));
}
document.documentElement.dataset.ready = "true";
