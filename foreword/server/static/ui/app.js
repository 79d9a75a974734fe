// The page: chooses the view, and holds the state that views share.

import { mountTips } from "./answer.js";
import { ApiError, getJson } from "./api.js";
import { Chat } from "./chat.js";
import { button, h, put } from "./dom.js";
import { Shell, setting } from "./shell.js";

const shell = new Shell("chat");
const main = document.getElementById("main");
const roots = { chat: h("div", { class: "view chat" }), server: h("div", { class: "view server", hidden: true }) };
main.append(roots.chat, roots.server);

const app = {
  models: [],
  model: "",
  plain: setting.get("plain", false),
  card: () => app.models.find(card => card.id === app.model) || null,
  /** Whether the model takes pictures; one that is not loaded does not say, and the server decides. */
  sees: () => app.models.length > 0 && (app.card().status !== "loaded" || app.card().input_modalities.includes("image")),
  /** Read again which of several models are loaded: an answer may have loaded one, and unloaded others. */
  refreshModels: () => app.models.length > 1 && loadModels(),
  navigate(hash, replace) {
    if (location.hash === hash) return;
    if (replace) history.replaceState(null, "", hash);
    else location.hash = hash;
  },
  askKey: reason => shell.askKey(reason),
  checkHealth: () => shell.checkHealth(),
};

const chat = new Chat(roots.chat, app);
let server = null;

const models = h("select", { "aria-label": "Model", hidden: true, onchange: () => { app.model = models.value; setting.set("model", app.model); chat.renderPanel(); } });
const modelName = h("span", { class: "model-name" });
const marks = h("button", { type: "button", class: "btn toggle", "aria-pressed": "true", title: "Shade and underline drafted tokens", onclick: () => showMarks(!setting.get("marks", true)) }, "Drafts");
const plain = h("button", { type: "button", class: "btn toggle", "aria-pressed": String(app.plain), title: "The model's text as it is, without formatting", onclick: () => {
  app.plain = !app.plain;
  setting.set("plain", app.plain);
  plain.setAttribute("aria-pressed", String(app.plain));
  chat.render();
} }, "Plain text");
const drawer = button("Conversations", "list", () => chat.toggle("sidebar"), { class: "btn icon-only drawer", "aria-controls": "sidebar" });
document.getElementById("top").prepend(drawer);
shell.extra.append(models, modelName, marks, plain);

function showMarks(on) {
  setting.set("marks", on);
  marks.setAttribute("aria-pressed", String(on));
  document.body.classList.toggle("unmarked", !on);
}

let shownCard = "";

async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    // Neither encoders, which embed texts, nor second names of a model.
    app.models = data.filter(card => "sampling_defaults" in card && (card.parent || card.root === card.id));
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) shell.askKey(error.message);
    return;
  }
  const kept = setting.get("model", "");
  app.model = app.models.some(card => card.id === kept) ? kept : app.models[0]?.id ?? "";
  put(models, app.models.map(card => h("option", { value: card.id }, card.status === "loaded" ? card.id : `${card.id} (${card.status})`)));
  models.value = app.model;
  models.hidden = app.models.length < 2;
  modelName.textContent = app.models.length < 2 ? app.model : "";
  const card = JSON.stringify(app.card());
  if (card !== shownCard) chat.renderPanel();
  shownCard = card;
}

async function route() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const view = path === "/server" ? "server" : "chat";
  for (const [name, root] of Object.entries(roots)) root.hidden = name !== view;
  shell.activate(view);
  shell.extra.hidden = drawer.hidden = view !== "chat";
  document.title = view === "server" ? "Server · Foreword" : "Foreword";
  if (view === "server") {
    server ||= new (await import("./server.js")).ServerView(roots.server, app);
    server.start();
    return;
  }
  if (server?.running) app.refreshModels();
  server?.stop();
  const id = /^\/chat\/([\w-]+)$/.exec(path)?.[1] || null;
  if (id && chat.current?.id === id) return;
  const fields = new URLSearchParams(query);
  await chat.open(id, { prompt: fields.get("prompt"), system: fields.get("system") });
}

showMarks(setting.get("marks", true));
mountTips();
addEventListener("hashchange", route);
shell.onReady(loadModels);
route();
