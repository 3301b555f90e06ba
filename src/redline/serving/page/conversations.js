// Conversations in localStorage, one entry each: { id, title, created, updated, messages }.

const PREFIX = "redline.chat.";

// Without localStorage (some browsers forbid it), conversations last as long as the page.
function storage() {
  try {
    localStorage.setItem(`${PREFIX}probe`, "1");
    localStorage.removeItem(`${PREFIX}probe`);
    return localStorage;
  } catch (error) {
    if (error.name === "QuotaExceededError") return localStorage;
    const kept = new Map();
    return {
      get length() { return kept.size; },
      key: (index) => [...kept.keys()][index],
      getItem: (key) => kept.get(key) ?? null,
      setItem: (key, value) => kept.set(key, value),
      removeItem: (key) => kept.delete(key),
    };
  }
}

export const store = storage();

export function create() {
  // Random ids instead of crypto.randomUUID, which only https pages and localhost have.
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", created: Date.now(), updated: Date.now(), messages: [] };
}

// Returns all conversations, the most recent first. Entries that cannot be read are skipped.
export function list() {
  const found = [];
  for (let index = 0; index < store.length; index += 1) {
    const key = store.key(index);
    const conversation = key.startsWith(PREFIX) ? load(key.slice(PREFIX.length)) : null;
    if (conversation) found.push(conversation);
  }
  return found.sort((one, other) => other.updated - one.updated);
}

export function load(id) {
  try {
    const found = JSON.parse(store.getItem(PREFIX + id));
    const isWhole = found && found.id === id && Array.isArray(found.messages)
      && found.messages.every((message) => typeof message?.content === "string" && ["user", "assistant"].includes(message.role));
    return isWhole ? { ...found, title: String(found.title ?? ""), updated: Number(found.updated) || 0 } : null;
  } catch {
    return null;
  }
}

// Returns whether the conversation could be saved; the browser's storage may be full.
export function save(conversation) {
  try {
    store.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  store.removeItem(PREFIX + id);
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content.trim().split("\n")[0] ?? "";
  return conversation.title || (first.length > 60 ? `${first.slice(0, 59)}…` : first) || "New chat";
}

// Calls `changed` when another tab has changed a conversation.
export function onChange(changed) {
  addEventListener("storage", (event) => { if (event.key === null || event.key.startsWith(PREFIX)) changed(); });
}
