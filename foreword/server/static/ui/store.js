// Conversations in IndexedDB, settings in localStorage; in memory where the browser refuses both.

const STORE = "conversations";
const memory = new Map();
let opened = null;

function open() {
  opened ||= new Promise(resolve => {
    let asked;
    try { asked = indexedDB.open("foreword", 1); } catch { return resolve(null); }
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = asked.onblocked = () => resolve(null);
  });
  return opened;
}

async function run(mode, work) {
  const db = await open();
  if (db === null) return null;
  return new Promise((resolve, reject) => {
    const asked = work(db.transaction(STORE, mode).objectStore(STORE));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** All conversations, the newest first. */
export async function loadAll() {
  const all = (await run("readonly", store => store.getAll())) || [...memory.values()];
  return all.sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation. Throws if the browser's storage is full. */
export async function save(conversation) {
  memory.set(conversation.id, conversation);
  await run("readwrite", store => store.put(conversation));
}

export async function remove(id) {
  memory.delete(id);
  await run("readwrite", store => store.delete(id));
}

export const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;

export function readSetting(name, fallback) {
  try {
    const text = localStorage.getItem(`foreword.${name}`);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function writeSetting(name, value) {
  try { localStorage.setItem(`foreword.${name}`, JSON.stringify(value)); } catch { /* lasts as long as the page */ }
}

const FORMAT = "foreword-conversations";

export const exportText = conversations => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);

/** The conversations of an exported file. Throws Error with a sentence for anything else. */
export function parseExport(text) {
  let data;
  try { data = JSON.parse(text); } catch { throw new Error("the file is not JSON"); }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error("the file holds no conversations of Foreword");
  }
  return data.conversations.filter(isConversation).map(item => ({ ...item, id: String(item.id || newId()) }));
}

const isConversation = item => item !== null && typeof item === "object" && Array.isArray(item.messages)
  && item.messages.every(message => typeof message?.role === "string");
