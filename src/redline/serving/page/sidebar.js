// The list of conversations: open, rename, delete and undo.

import * as conversations from "./conversations.js";
import { $, make } from "./dom.js";

const TOAST_MS = 8000;
let toastTimer = 0;

// `open(id)` shows a conversation; `changed()` is called after a rename or a deletion.
export function drawList(current, { open, changed }) {
  const rows = conversations.list().map((conversation) => {
    const title = conversations.titleOf(conversation), isCurrent = conversation.id === current?.id;
    const name = make("button", { type: "button", className: "name", title, onclick: () => open(conversation.id) }, title);
    if (isCurrent) name.setAttribute("aria-current", "true");
    const small = (label, icon, onclick) => make("button", { type: "button", className: "icon small", "aria-label": `${label}: ${title}`, title: label, onclick }, icon);
    const row = make("li", { className: isCurrent ? "current" : "" }, name,
      small("Rename", "✎", () => rename(row, conversation, changed)), small("Delete", "✕", () => remove(conversation, changed)));
    return row;
  });
  $("conversations").replaceChildren(...rows);
}

function rename(row, conversation, changed) {
  const input = make("input", { value: conversations.titleOf(conversation), maxLength: 80, "aria-label": "Title of the conversation" });
  let isDone = false;
  const end = (isKept) => {
    if (isDone) return;
    isDone = true;
    const stored = conversations.load(conversation.id);
    if (isKept && stored) conversations.save({ ...stored, title: input.value.trim() });
    changed(conversation.id, isKept ? input.value.trim() : null);
  };
  input.onkeydown = (event) => {
    if (event.key === "Enter") end(true);
    else if (event.key === "Escape") { event.stopPropagation(); end(false); }
  };
  input.onblur = () => end(true);
  row.replaceChildren(input);
  input.select();
}

function remove(conversation, changed) {
  const stored = conversations.load(conversation.id) ?? conversation;
  conversations.remove(conversation.id);
  changed(conversation.id, null);
  toast("The conversation was deleted.", "Undo", () => { conversations.save(stored); changed(conversation.id, null); });
}

export function toast(text, label, act) {
  const button = make("button", { type: "button", className: "small", onclick: () => { $("toast").hidden = true; act(); } }, label);
  $("toast").replaceChildren(text, " ", button);
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { $("toast").hidden = true; }, TOAST_MS);
}
