/** The page: its parts, put together. */

import { Api, ApiError, wordsOf } from "./api/http.js";
import { VectorsPanel } from "./vectors_panel.js";
import { DocumentPanel } from "./document_panel.js";
import { Recipes } from "./recipes.js";
import { ContinuePanel } from "./sessions/continue_panel.js";
import { StatusWatch } from "./status.js";
import { WorkerClient } from "./vectors/worker_client.js";
import { byId, show } from "./view/dom.js";
import { startDrop } from "./view/drop.js";
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
/** @type {any} */
let model = null;
const keys = new KeyView((chosen) => {
  saveKey(chosen);
  location.reload();
});
const documentPanel = new DocumentPanel(api, memory, worker, recipes);
const writing = new ContinuePanel(api, memory, recipes, () => model);
new VectorsPanel(api, documentPanel, worker, recipes, (text) => {
  openTab("continue");
  writing.guarded(async () => {
    await writing.open(null);
    byId("prompt").value = text.trim();
    byId("prompt").focus();
  });
}, () => model?.capabilities.includes("completions") ?? true);
const ranks = new RanksView();
const notice = new Notice(byId("page-notice"));
let asked = false;
/** Whether the document or the session says this already. @param {string} words */
const isSaid = (words) => ["document-notice", "write-notice"].some((id) => byId(id).textContent.includes(words));

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
    state.className = `state ${ready ? "ready" : "away"}`;
    state.textContent = error ? "Not reached" : ready ? [model?.id ?? status?.model, many && `${many} ${many === 1 ? "rank" : "ranks"}`].filter(Boolean).join(" · ") : "Not ready";
    const words = error ? wordsOf(error) : "";
    if (words && !isSaid(words)) notice.say("wait", words);
    else if (error) notice.clear();
    else if (!ready) notice.say("wait", `The engine is not ready: ${status.reason}. Work that was begun goes on by itself.`);
    else notice.clear();
  },
);

documentPanel.addEventListener("changed", () => {
  watch.hurry(documentPanel.busy);
  if (!documentPanel.busy) ranks.show(null);
});
byId("to-session").addEventListener("click", () => {
  const { text, at, name } = documentPanel;
  if (!text) return;
  openTab("continue");
  writing.read(name, at.tokens, () => text.blob(0, at.size));
});
startDrop((file) => {
  openTab("document");
  if (documentPanel.busy) notice.say("note", "Stop the document that is under way first.");
  else documentPanel.open(file);
});
// With a key a link cannot open the reference: a browser sends none along.
show(byId("docs-link").parentElement, !key);

watch.look();
try {
  const models = (await api.json("/v1/models")).data; // the one that writes first, the one that encodes last
  model = models[0];
  documentPanel.longest = models.at(-1).max_model_len ?? Infinity;
  show(byId("tab-continue"), model.capabilities.includes("completions"));
  await documentPanel.resume();
  if (model.capabilities.includes("completions")) await writing.resume();
} catch (error) {
  if (!(error instanceof ApiError) || error.status !== 401) notice.say("error", error instanceof Error ? error.message : String(error));
}
document.documentElement.dataset.ready = "true";
