// Connects the parts of the page: list, conversation, engine view, settings and model.

import { listModels } from "./api.js";
import { Chat } from "./chat.js";
import * as conversations from "./conversations.js";
import { $, make } from "./dom.js";
import * as engine from "./engine.js";
import * as settings from "./settings.js";
import { drawList } from "./sidebar.js";

const MODEL = "redline.model";
const chat = new Chat({ changed: save, model: () => $("model").value });
// Conversations that were deleted while they were open: what is still being answered must not bring them back.
const deleted = new Set();
let retryTimer = 0;

function save(conversation) {
  if (deleted.has(conversation.id)) return;
  if (!conversations.save(conversation)) notice("This browser's storage is full: delete conversations, or this one will be lost.");
  showList();
}

function showList() {
  drawList(chat.conversation, {
    open: (id) => { const found = current(id) ?? conversations.load(id); if (found) openConversation(found); },
    changed: (id, title) => {
      // The open conversation is also held in memory.
      const held = current(id);
      if (held && title !== null) held.title = title;
      if (conversations.load(id)) deleted.delete(id);
      else {
        deleted.add(id);
        if (chat.running?.conversation.id === id) chat.stop();
        if (chat.conversation.id === id) openConversation(conversations.create());
      }
      showTitle();
      showList();
    },
  });
}

// Returns the conversation with this id if it is in memory, so that an answer in progress is not lost.
function current(id) {
  return [chat.conversation, chat.running?.conversation].find((one) => one?.id === id) ?? null;
}

function openConversation(conversation) {
  chat.conversation = conversation;
  showView("chat");
  closeMenu();
  chat.show();
  showList();
  if (matchMedia("(min-width: 760px)").matches) $("question").focus();
}

function showTitle() {
  const isEngine = !$("engine").hidden, title = isEngine ? "Engine" : conversations.titleOf(chat.conversation);
  $("title").textContent = title;
  document.title = `${title} · Redline`;
}

function showView(name) {
  const isEngine = name === "engine";
  $("engine").hidden = !isEngine;
  $("chat").hidden = isEngine;
  $("show-engine").setAttribute("aria-pressed", String(isEngine));
  if (isEngine) engine.open();
  else engine.close();
  showTitle();
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

async function showModels() {
  clearTimeout(retryTimer);
  try {
    const names = await listModels(settings.apiKey());
    const chosen = conversations.store.getItem(MODEL);
    $("model").replaceChildren(...names.map((name) => make("option", { value: name, selected: name === chosen }, name)));
    $("model").disabled = names.length < 2;
    notice(names.length ? "" : "The server has no model.");
  } catch (error) {
    notice(error.message);
    if (error.isKey) $("notice").append(" ", make("button", { type: "button", className: "small", onclick: () => settings.open("set-key") }, "Open settings"));
    // A wrong key stays wrong until the settings change.
    else retryTimer = setTimeout(showModels, 3000);
  }
}

function openMenu() {
  $("sidebar").classList.add("open");
  $("veil").hidden = false;
  $("menu").setAttribute("aria-expanded", "true");
  $("new-chat").focus();
}

function closeMenu() {
  if (!$("sidebar").classList.contains("open")) return;
  $("sidebar").classList.remove("open");
  $("veil").hidden = true;
  $("menu").setAttribute("aria-expanded", "false");
  $("menu").focus();
}

async function send() {
  const text = $("question").value.trim();
  if (!text || chat.isAnswering) return;
  $("question").value = "";
  fit();
  const answering = chat.ask(text);
  showTitle();
  await answering;
}

// Makes the field as high as its text, up to a limit of the style sheet.
function fit() {
  const field = $("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
  $("send").disabled = !field.value.trim();
}

$("composer").onsubmit = (event) => { event.preventDefault(); send(); };
$("question").oninput = fit;
$("question").onkeydown = (event) => {
  // While an input method composes a character, Enter chooses it.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
$("stop").onclick = () => { chat.stop(); $("question").focus(); };
$("new-chat").onclick = () => openConversation(conversations.create());
$("show-engine").onclick = () => { showView($("engine").hidden ? "engine" : "chat"); closeMenu(); };
$("show-settings").onclick = () => { closeMenu(); settings.open(); };
$("menu").onclick = openMenu;
$("veil").onclick = closeMenu;
$("model").onchange = () => { try { conversations.store.setItem(MODEL, $("model").value); } catch { /* Full. */ } };
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if ($("sidebar").classList.contains("open")) closeMenu();
  else if (chat.isAnswering) chat.stop();
});
// What was answered so far is kept if the page is closed.
addEventListener("pagehide", () => { if (chat.running) save(chat.running.conversation); });
conversations.onChange(showList);

settings.start(showModels);
openConversation(conversations.list()[0] ?? conversations.create());
fit();
showModels();
