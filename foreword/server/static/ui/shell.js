// The frame of both pages: navigation, theme, API key, and the health of the server.

import { getHealth, getJson, key } from "./api.js";
import { button, h, mountMessages, put } from "./dom.js";
import { readSetting, writeSetting } from "./store.js";

const THEMES = ["", "light", "dark"]; // "": the system's
const STATES = {
  ok: "ready", loading: "loading", restarting: "restarting the engine", unresponsive: "unresponsive",
  draining: "shutting down", dead: "engine gone", offline: "offline",
};

export class Shell {
  constructor(active) {
    this.listeners = [];
    this.health = null;
    this.state = h("span", { class: "state", role: "status" });
    this.banner = h("div", { class: "banner", role: "status", hidden: true });
    this.extra = h("div", { class: "top-extra" });
    const home = active === "docs" ? "./" : "";
    const item = (name, href, label) => h("a", { href, "data-view": name, "aria-current": name === active ? "page" : null }, label);
    this.nav = h("nav", { "aria-label": "Pages" }, item("chat", `${home}#/`, "Chat"), item("server", `${home}#/server`, "Server"), item("docs", "docs", "API"));
    const top = document.getElementById("top");
    top.append(this.nav, this.extra, this.state,
      button("API key", "key", () => this.askKey()), button("Theme", "sun", () => this.nextTheme()));
    top.after(this.banner);
    mountMessages();
    document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(this.timer) : this.checkHealth());
    this.checkHealth();
  }

  activate(name) {
    for (const link of this.nav.children) {
      if (link.dataset.view === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  /** Call `listener` when the server becomes ready, and now if it is. */
  onReady(listener) {
    this.listeners.push(listener);
    if (this.health?.status === "ok") listener();
  }

  /** Ask for the server's health; again soon while it is not well, and never while nobody looks. */
  async checkHealth() {
    clearTimeout(this.timer);
    const before = this.health?.status;
    this.health = (await getHealth()) || { status: "offline" };
    const { status, progress, detail } = this.health;
    const share = progress === null || progress === undefined ? "" : ` ${Math.round(progress * 100)} %`;
    this.state.dataset.status = status;
    put(this.state, h("i", { "aria-hidden": "true" }), `${STATES[status] || status}${share}`);
    const text = {
      offline: "The server cannot be reached. Your conversations are here; this page tries again every two seconds.",
      loading: `The model is loading${share}.`,
      restarting: "The engine is being replaced. Open answers go on by themselves.",
      draining: "The server is shutting down: open answers are finished, new ones are refused.",
      dead: "The engine is gone and could not be replaced; see the server's log.",
      unresponsive: "The engine does not answer.",
    }[status];
    this.banner.hidden = !text;
    put(this.banner, text && h("p", null, text, detail && detail !== text ? h("small", null, ` ${detail}`) : null),
      status === "loading" && progress ? h("progress", { value: progress, max: 1, "aria-label": "Progress of loading" }) : null);
    if (status === "ok" && before !== "ok") for (const listener of this.listeners) listener();
    if (!document.hidden) this.timer = setTimeout(() => this.checkHealth(), status === "ok" ? 15000 : 2000);
  }

  nextTheme() {
    const theme = THEMES[(THEMES.indexOf(readTheme()) + 1) % THEMES.length];
    try {
      if (theme) localStorage.setItem("foreword.theme", theme);
      else localStorage.removeItem("foreword.theme");
    } catch { /* lasts as long as the page */ }
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  }

  /** Ask for the API key; it stays in the browser. */
  askKey(reason = "") {
    if (this.dialog) return;
    const field = h("input", { type: "password", autocomplete: "off", spellcheck: "false", value: key.get(), "aria-label": "API key" });
    const keep = h("input", { type: "checkbox", checked: key.kept });
    const said = h("p", { class: reason ? "note bad" : "note" }, reason || "Sent to this server alone, as the header Authorization.");
    const save = async event => {
      event.preventDefault();
      key.set(field.value.trim(), keep.checked);
      try {
        await getJson("v1/models");
        dialog.close();
        for (const listener of this.listeners) listener();
      } catch (error) {
        said.className = "note bad";
        said.textContent = error.message;
      }
    };
    const dialog = this.dialog = h("dialog", { class: "dialog", "aria-label": "API key", onclose: () => { dialog.remove(); this.dialog = null; } },
      h("form", { onsubmit: save }, h("h2", null, "API key"), said, field,
        h("label", { class: "check" }, keep, "Keep it in this browser; else until the tab is closed"),
        h("div", { class: "row" }, h("button", { class: "btn primary", type: "submit" }, "Use this key"),
          button("Cancel", "close", () => dialog.close(), { text: true }))));
    document.body.append(dialog);
    dialog.showModal();
    field.select();
  }
}

const readTheme = () => document.documentElement.dataset.theme || "";

export const setting = { get: readSetting, set: writeSetting };
