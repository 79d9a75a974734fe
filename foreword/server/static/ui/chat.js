// Conversations: written here, kept in this browser, answered by the server.

import { AnswerView, Choice } from "./answer.js";
import { ApiError, key, stream } from "./api.js";
import { announce, button, copy, download, fmt, h, icon, pickFiles, put, toast } from "./dom.js";
import { makeBody, randomSeed, settingsPanel, summarize } from "./settings.js";
import * as store from "./store.js";

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_FILE_BYTES = 2_000_000;
const EXAMPLES = [
  "What is speculative decoding?",
  "Does Foreword change the answer when it drafts?",
  "How do I start the server?",
];

/** The view of conversations. `app` has the models, and opens the dialog for a key. */
export class Chat {
  constructor(root, app) {
    this.app = app;
    this.conversations = [];
    this.current = null;
    this.runs = new Map(); // conversation id -> its answer in progress
    this.views = []; // AnswerViews of the conversation on the screen
    this.attached = { images: [], files: [] };
    this.sticks = true; // to the end of the conversation
    this.build(root);
    this.ready = store.loadAll().then(all => { this.conversations = all.map(revive); this.renderList(); });
  }

  build(root) {
    this.list = h("ul", { class: "conversations" });
    this.sidebar = h("aside", { class: "sidebar", id: "sidebar", "aria-label": "Conversations" },
      button("New conversation", "plus", () => this.open(null), { text: true, class: "btn wide" }),
      this.list,
      h("div", { class: "sidebar-foot" },
        button("Import", "up", () => this.import(), { text: true }),
        button("Export all", "down", () => this.export(this.conversations), { text: true })));
    this.log = h("div", { class: "log", tabindex: "0", role: "region", "aria-label": "Conversation" });
    // Text that grows below the visible part does not scroll: only a reader who goes up leaves the end.
    this.log.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.log;
      this.sticks = scrollHeight - scrollTop - clientHeight < 60 || (this.sticks && scrollTop >= this.scrolled);
      this.scrolled = scrollTop;
      this.toEnd.hidden = this.sticks;
    }, { passive: true });
    this.resized = new ResizeObserver(() => this.follow());
    this.toEnd = button("To the end", "down", () => { this.sticks = true; this.follow(); }, { class: "btn icon-only to-end", hidden: true });
    this.panel = h("aside", { class: "panel", id: "settings", "aria-label": "Settings" });
    this.buildComposer();
    this.center = h("div", { class: "center" }, this.log, this.toEnd, this.composer);
    root.append(this.sidebar, this.center, this.panel);
  }

  buildComposer() {
    this.input = h("textarea", {
      class: "input", rows: 1, dir: "auto", placeholder: "Ask something", "aria-label": "Message",
      onkeydown: event => this.onKey(event), oninput: () => this.grow(), onpaste: event => this.onPaste(event),
    });
    this.chips = h("div", { class: "chips" });
    this.summary = h("span", { class: "summary" });
    this.sendButton = button("Send", "up", () => this.send(), { class: "btn primary icon-only" });
    this.stopButton = button("Stop", "stop", () => this.stop(), { class: "btn primary icon-only", hidden: true });
    this.composer = h("form", { class: "composer", onsubmit: event => { event.preventDefault(); this.send(); } },
      this.chips, this.input,
      h("div", { class: "composer-bar" },
        button("Attach a picture or a text file", "clip", () => this.attach()),
        button("Settings", "tune", () => this.toggle("panel"), { "aria-controls": "settings" }),
        this.summary, this.stopButton, this.sendButton));
    for (const name of ["dragover", "dragleave", "drop"]) {
      this.composer.addEventListener(name, event => {
        event.preventDefault();
        this.composer.classList.toggle("dropping", name === "dragover");
        if (name === "drop") this.addFiles([...event.dataTransfer.files]);
      });
    }
  }

  // Navigation

  /** Show a conversation by its id, or an empty one with a prompt that is not sent. */
  async open(id, draft = {}) {
    await this.ready;
    const isFirst = !this.current;  // then the page may have been typed into already
    this.current = this.conversations.find(item => item.id === id) || null;
    if (!this.current) {
      const settings = { ...store.readSetting("settings", {}) };
      if (draft.system) settings.system = draft.system;
      this.current = { id: store.newId(), title: "", created: Date.now(), updated: Date.now(), settings, messages: [] };
      this.input.value = draft.prompt || (isFirst ? this.input.value : "");
    }
    this.toggle(null);
    this.sticks = true;
    this.render();
    this.renderPanel();
    this.renderList();
    this.grow();
    this.app.navigate(id && this.current.id === id ? `#/chat/${id}` : "#/", true);
    if (matchMedia("(min-width: 760px)").matches) this.input.focus({ preventScroll: true });
  }

  /** Open or close a drawer ("sidebar" or "panel"); null closes both. */
  toggle(name) {
    for (const each of ["sidebar", "panel"]) {
      this[each].classList.toggle("open", each === name && !this[each].classList.contains("open"));
    }
    if (name === "panel") {
      const wide = matchMedia("(min-width: 1180px)").matches;
      if (wide) this.panel.classList.toggle("closed");
      else if (this.panel.classList.contains("open")) this.panel.querySelector("textarea")?.focus();
    }
  }

  renderList() {
    put(this.list, this.conversations.map(item => h("li", { class: item === this.current ? "active" : null },
      h("a", { href: `#/chat/${item.id}`, "aria-current": item === this.current ? "page" : null, dir: "auto" },
        item.title || "Untitled", this.runs.has(item.id) && h("span", { class: "busy", title: "answering" })),
      h("span", { class: "row-actions" },
        button(`Export ${item.title}`, "down", () => this.export([item])),
        button(`Delete ${item.title}`, "trash", () => this.delete(item))))));
  }

  renderPanel() {
    if (!this.current) return; // open() comes
    const { settings } = this.current;
    put(this.panel, button("Close settings", "close", () => this.toggle("panel"), { class: "btn icon-only panel-close" }),
      settingsPanel(settings, this.app.card(), () => { this.renderSummary(); store.writeSetting("settings", keptSettings(settings)); this.keep(); }));
    this.renderSummary();
  }

  renderSummary() {
    const { settings } = this.current;
    put(this.summary, summarize(settings));
    this.summary.title = this.summary.textContent;
  }

  // Messages on the screen

  render() {
    this.views = [];
    const { messages } = this.current;
    put(this.log, messages.length ? h("div", { class: "thread" }, h("h1", { class: "visually-hidden" }, this.current.title), messages.map((message, index) => this.message(message, index))) : this.welcome());
    this.resized.disconnect();
    for (const box of [this.log, this.log.firstChild]) this.resized.observe(box);
    this.setBusy();
    this.follow();
  }

  welcome() {
    return h("div", { class: "welcome" },
      h("h1", null, "Ask, and see what was guessed"),
      h("p", null, "Tokens that a drafter proposed and the model confirmed are shaded and underlined by drafter. ",
        "They change nothing but the speed: replay an answer without them, and compare."),
      h("ul", null, EXAMPLES.map(text => h("li", null, h("button", { type: "button", class: "example", onclick: () => {
        this.input.value = text;
        this.send();
      } }, text)))));
  }

  message(message, index) {
    if (message.role === "assistant") return this.assistant(message, index);
    if (message.role === "tool") {
      return h("article", { class: "msg tool" }, h("h2", { class: "role" }, "Tool result"), h("pre", { tabindex: "0", dir: "auto" }, message.content));
    }
    const actions = h("div", { class: "actions" },
      button("Edit and resend", "edit", () => this.edit(index, article)),
      button("Copy", "copy", () => copy(message.content)),
      button("Copy a link to this prompt", "link", () => copy(this.linkTo(message), "Link copied")));
    const article = h("article", { class: "msg user" }, h("h2", { class: "role" }, "You"),
      h("div", { class: "bubble", dir: "auto" }, pictures(message.images), (message.files || []).map(fileChip), h("div", { class: "raw" }, message.content)), actions);
    return article;
  }

  assistant(message, index) {
    const run = this.runs.get(this.current.id), live = run && run.message === message;
    const many = message.choices.length > 1;
    const columns = message.choices.map((choice, number) => {
      const view = new AnswerView(choice, {
        plain: this.app.plain, live, after: () => this.follow(),
        onResults: index === this.current.messages.length - 1,
        actions: this.answerActions(message, index, number),
      });
      this.views.push(view);
      if (!live) view.finish();
      if (!many) return view.root;
      return h("section", { class: "choice", "aria-label": `Choice ${number + 1}` },
        h("label", { class: "choose" }, h("input", { type: "radio", name: `chosen-${index}`, checked: message.chosen === number,
          onchange: () => { message.chosen = number; this.keep(); } }), `Choice ${number + 1}`), view.root);
    });
    const calls = message.choices[message.chosen || 0]?.calls || [];
    const isLast = index === this.current.messages.length - 1;
    return h("article", { class: "msg assistant" },
      h("h2", { class: "role" }, message.model || "Answer"),
      h("div", { class: many ? "choices" : null }, columns),
      isLast && !live && calls.length > 0 && button("Send the results", "up", () => this.sendResults(message), { text: true, class: "btn primary" }));
  }

  answerActions(message, index, number) {
    const choice = message.choices[number];
    const act = (label, name, work, props) => button(label, name, work, props);
    return [
      act("Copy", "copy", () => this.views.find(view => view.choice === choice)?.copy()),
      act("Regenerate with the same seed", "redo", () => this.regenerate(index, message.seed)),
      act("Regenerate with a new seed", "dice", () => this.regenerate(index, randomSeed())),
      act("Replay without drafts", "replay", () => this.replay(message, index, choice), { text: true }),
    ];
  }

  /** Keep the end in sight, unless the reader scrolled away from it. */
  follow() {
    if (this.sticks) this.log.scrollTop = this.log.scrollHeight;
  }

  setBusy() {
    const busy = this.runs.has(this.current?.id);
    const focused = document.activeElement === this.sendButton || document.activeElement === this.stopButton;
    this.stopButton.hidden = !busy;
    this.sendButton.hidden = busy;
    if (focused) (busy ? this.stopButton : this.sendButton).focus();
  }

  // Writing

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    } else if (event.key === "Escape") {
      this.stop();
    } else if (event.key === "ArrowUp" && !this.input.value) {
      const index = this.current.messages.findLastIndex(message => message.role === "user");
      if (index >= 0) this.edit(index, this.log.querySelectorAll(".msg")[index]);
    }
  }

  grow() {
    this.input.style.setProperty("height", "auto");
    this.input.style.setProperty("height", `${Math.min(this.input.scrollHeight, innerHeight * 0.4)}px`);
  }

  onPaste(event) {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    this.addFiles(files);
  }

  async attach() {
    const sees = this.app.sees();
    this.addFiles(await pickFiles(`${sees ? `${IMAGES.join(",")},` : ""}text/*,.md,.json,.py,.js,.ts,.c,.cpp,.rs,.go,.yaml,.toml,.csv,.log`, true));
  }

  async addFiles(files) {
    for (const file of files) {
      if (file.size > MAX_FILE_BYTES && !file.type.startsWith("image/")) {
        toast(`${file.name} is larger than ${fmt.bytes(MAX_FILE_BYTES)}`, "bad");
      } else if (IMAGES.includes(file.type)) {
        if (this.app.sees()) this.attached.images.push(await dataUrl(file));
        else toast("This model takes no pictures", "bad");
      } else {
        const text = await file.text();
        if (text.includes("\0")) toast(`${file.name} is not a text`, "bad");
        else this.attached.files.push({ name: file.name, text });
      }
    }
    this.renderChips();
  }

  renderChips() {
    const { images, files } = this.attached;
    const drop = (list, item) => () => { list.splice(list.indexOf(item), 1); this.renderChips(); };
    put(this.chips,
      images.map(url => h("span", { class: "chip" }, h("img", { src: url, alt: "Attached picture" }), button("Remove the picture", "close", drop(images, url)))),
      files.map(file => h("span", { class: "chip" }, `${file.name}, ${fmt.plural(file.text.length, "character")}`, button(`Remove ${file.name}`, "close", drop(files, file)))));
  }

  send() {
    if (!this.current) return void setTimeout(() => this.send(), 50);  // no conversation is open yet
    const content = this.input.value.trim(), { images, files } = this.attached;
    if (this.runs.has(this.current.id) || !(content || images.length || files.length)) return;
    this.input.value = "";
    this.attached = { images: [], files: [] };
    this.renderChips();
    this.grow();
    this.add({ role: "user", content, images, files });
    this.answer(this.current);
  }

  add(message) {
    const conversation = this.current;
    conversation.messages.push(message);
    conversation.title ||= (message.content || "Attachment").slice(0, 80);
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.app.navigate(`#/chat/${conversation.id}`, true);
    this.keep();
  }

  sendResults(message) {
    for (const call of message.choices[message.chosen || 0].calls) {
      this.current.messages.push({ role: "tool", callId: call.id, content: call.result });
    }
    this.answer(this.current);
  }

  edit(index, article) {
    const message = this.current.messages[index];
    const field = h("textarea", { class: "edit", rows: 4, dir: "auto", value: message.content, "aria-label": "Edit the message" });
    const save = () => {
      this.stop();
      this.current.messages.splice(index, Infinity, { ...message, content: field.value });
      this.answer(this.current);
    };
    field.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
      if (event.key === "Escape") this.render();
    });
    put(article, h("h2", { class: "role" }, "You"), h("div", { class: "editing" }, field, h("div", { class: "row" },
      button("Send", "up", save, { text: true, class: "btn primary" }), button("Cancel", "close", () => this.render(), { text: true }))));
    field.focus();
  }

  regenerate(index, seed) {
    this.stop();
    this.current.messages.splice(index, Infinity);
    this.answer(this.current, seed);
  }

  // Answers

  /** The messages before `end`, in the form of the API. */
  messagesOf(conversation, end) {
    const { system } = conversation.settings;
    const messages = conversation.messages.slice(0, end).map(toApi);
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  /** Ask for an answer to the conversation, and show it as it comes. */
  async answer(conversation, seed = conversation.settings.seed ?? randomSeed()) {
    const message = { role: "assistant", model: this.app.model, chosen: 0, seed, choices: [] };
    let body;
    try {
      body = makeBody(conversation.settings, this.app.model, this.messagesOf(conversation), seed);
    } catch (error) {
      return void toast(error.message, "bad");
    }
    message.choices = Array.from({ length: body.n || 1 }, (_, index) => new Choice({ seed: seed + index, speculation: body.speculation?.method }));
    conversation.messages.push(message);
    const run = { message, controller: new AbortController() };
    this.runs.set(conversation.id, run);
    this.sticks = true;
    this.show(conversation);
    await this.receive(body, message.choices, run.controller.signal, () => this.update(message), name => { message.model = name; });
    if (this.runs.get(conversation.id) === run) this.runs.delete(conversation.id);
    conversation.updated = Date.now();
    this.keep(conversation);
    this.show(conversation, message);
    announce("The answer is complete");
    this.app.refreshModels();
  }

  /** Receive a stream into choices, which also record how it ended. */
  async receive(body, choices, signal, changed, told = null) {
    const sent = performance.now();
    const onEvents = events => {
      const now = (performance.now() - sent) / 1000;
      for (const event of events) {
        if (event.comment) { for (const view of this.views) if (choices.includes(view.choice)) view.comment = event.comment; continue; }
        if (event.model && told) told(event.model);
        const [chunk] = event.choices || [];
        if (!chunk) continue;
        const choice = choices[chunk.index];
        choice.take(chunk, now);
        if (event.usage) choice.tokens = event.usage.completion_tokens;
      }
      changed();
    };
    try {
      await stream("v1/chat/completions", body, onEvents, signal);
    } catch (error) {
      for (const choice of choices) {
        if (choice.finish) continue;
        if (error.name === "AbortError") choice.finish = "stopped";
        else choice.error = explain(error);
      }
      if (error instanceof ApiError && error.status === 401) this.app.askKey(error.message);
      if (error instanceof ApiError && error.status === 0) this.app.checkHealth();
      if (!(error instanceof ApiError) && error.name !== "AbortError") console.error(error);
    }
    for (const choice of choices) choice.seconds ??= (performance.now() - sent) / 1000;
  }

  /** Update the views of a message in the next frame, once for all events until then. */
  update(message) {
    if (this.updating) return;
    this.updating = requestAnimationFrame(() => {
      this.updating = null;
      for (const view of this.views) if (message.choices.includes(view.choice)) view.update();
      this.follow();
    });
  }

  /** Show a conversation after a change, if it is the one on the screen. */
  show(conversation, finished = null) {
    this.renderList();
    if (this.current !== conversation) return;
    const views = this.views.filter(view => finished && finished.choices.includes(view.choice));
    if (views.length && !finished.choices.some(choice => choice.calls.length)) {
      for (const view of views) view.finish();
      this.setBusy();
    } else {
      this.render();
    }
  }

  stop() {
    this.runs.get(this.current?.id)?.controller.abort();
  }

  /** Ask for the same answer without drafts, and compare. */
  async replay(message, index, choice) {
    const { settings } = this.current;
    const view = this.views.find(each => each.choice === choice);
    const body = { ...makeBody({ ...settings, method: "off", draft_tokens: undefined }, message.model || this.app.model, this.messagesOf(this.current, index), choice.seed), n: 1 };
    const again = new Choice();
    choice.replay = { running: true, tokens: 0 };
    const conversation = this.current;
    const controller = new AbortController();
    const tell = () => { choice.replay.tokens = again.tokens; view.showComparison(); this.follow(); };
    tell();
    let frame = null;
    await this.receive(body, [again], controller.signal, () => { frame ||= requestAnimationFrame(() => { frame = null; tell(); }); });
    if (frame) cancelAnimationFrame(frame);
    const [first, second] = [choice.transcript, again.transcript];
    const equal = first === second;
    choice.replay = again.error ? { error: again.error } : {
      seconds: again.seconds, first: again.first, metrics: again.metrics, tokens: again.tokens, equal, together: message.choices.length,
      length: choice.content.length + choice.reasoning.length, at: equal ? null : difference(choice.content.text, again.content.text),
    };
    view.showComparison();
    view.comparison.scrollIntoView({ block: "nearest" });
    this.keep(conversation);
  }

  // Keeping

  async keep(conversation = this.current) {
    if (!conversation || !conversation.messages.length) return;
    try {
      await store.save(JSON.parse(JSON.stringify(conversation)));
    } catch {
      toast("The browser's storage is full: export conversations and delete some", "bad");
    }
  }

  async delete(conversation) {
    this.runs.get(conversation.id)?.controller.abort();
    this.conversations = this.conversations.filter(item => item !== conversation);
    await store.remove(conversation.id);
    if (this.current === conversation) this.open(null);
    else this.renderList();
    const undo = button("Undo", "redo", async () => {
      this.conversations.unshift(conversation);
      await this.keep(conversation);
      this.renderList();
    }, { text: true });
    toast(["Conversation deleted. ", undo]);
  }

  export(conversations) {
    if (!conversations.length) return void toast("There is no conversation yet");
    const name = conversations.length === 1 ? (conversations[0].title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) : "conversations";
    download(`${name}.json`, store.exportText(conversations));
  }

  async import() {
    for (const file of await pickFiles("application/json,.json")) {
      try {
        const read = store.parseExport(await file.text());
        for (const item of read) {
          const conversation = revive({ ...item, id: this.conversations.some(other => other.id === item.id) ? store.newId() : item.id });
          this.conversations.unshift(conversation);
          await this.keep(conversation);
        }
        toast(`${fmt.plural(read.length, "conversation")} imported`);
      } catch (error) {
        toast(`${file.name}: ${error.message}`, "bad");
      }
    }
    this.renderList();
  }

  linkTo(message) {
    const fields = new URLSearchParams({ prompt: message.content });
    if (this.current.settings.system) fields.set("system", this.current.settings.system);
    return `${location.href.split("#")[0]}#/new?${fields}`;
  }
}

/** A kept or imported conversation, with every field in its type: a file may hold anything. */
function revive(data) {
  const text = value => typeof value === "string" ? value : "";
  const messages = data.messages.map(message => message.role === "assistant"
    ? { role: "assistant", model: text(message.model), seed: Number(message.seed) || 0,
      choices: (Array.isArray(message.choices) && message.choices.length ? message.choices : [{}]).map(choice => new Choice(choice || {})),
      chosen: Number(message.chosen) || 0 }
    : { role: message.role === "tool" ? "tool" : "user", content: text(message.content), callId: text(message.callId),
      images: (Array.isArray(message.images) ? message.images : []).filter(isPicture),
      files: (Array.isArray(message.files) ? message.files : []).map(file => ({ name: text(file?.name), text: text(file?.text) })) });
  return { id: text(data.id) || store.newId(), title: text(data.title), created: Number(data.created) || 0,
    updated: Number(data.updated) || 0, settings: data.settings && typeof data.settings === "object" ? data.settings : {}, messages };
}

const isPicture = url => typeof url === "string" && /^data:image\/[\w.+-]+;base64,/.test(url);

/** Settings for the next conversation: not the seed, the schema and the tools of this one. */
function keptSettings({ seed, schema, tools, other, system, ...rest }) {
  return rest;
}

function toApi(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  if (message.role === "assistant") {
    const choice = message.choices[message.chosen || 0] || message.choices[0];
    const calls = choice.calls.map(call => ({ id: call.id, type: call.type,
      [call.type]: { name: call.name, [call.type === "custom" ? "input" : "arguments"]: call.arguments.text } }));
    return { role: "assistant", content: choice.content.text, ...(choice.reasoning.length ? { reasoning_content: choice.reasoning.text } : {}),
      ...(calls.length ? { tool_calls: calls } : {}) };
  }
  const files = (message.files || []).map(file => `File ${file.name}:\n\`\`\`\n${file.text}\n\`\`\`\n`);
  const content = [...files, message.content].join("\n");
  if (!message.images?.length) return { role: "user", content };
  return { role: "user", content: [...message.images.map(url => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }] };
}

function explain(error) {
  if (!(error instanceof ApiError)) return `The page failed: ${error.message}`;
  const id = error.requestId ? ` (request ${error.requestId})` : "";
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  return error.status === 401 && !key.get() ? "This server wants an API key." : `${message}${error.status ? `; status ${error.status}${id}` : ""}.`;
}

function difference(a, b) {
  let at = 0;
  while (at < a.length && a[at] === b[at]) at += 1;
  return at;
}

const pictures = urls => (urls || []).filter(isPicture).map(url => h("img", { class: "picture", src: url, alt: "Attached picture" }));
const fileChip = file => h("details", { class: "file" }, h("summary", null, icon("clip"), `${file.name}, ${fmt.plural(file.text.length, "character")}`), h("pre", { tabindex: "0" }, file.text));

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
