// The settings: system prompt, sampling, API key and appearance. They apply to the next answer.

import { store } from "./conversations.js";
import { $ } from "./dom.js";

const SETTINGS = "redline.settings", KEY = "redline.key";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

let values = { system: "", theme: "auto", numbers: {} };

export const system = () => values.system.trim();

// Returns the options of a request; those that are not set are left out.
export const sampling = () => ({ ...values.numbers });

export function apiKey() {
  // The key of a tab is forgotten with it, unless the user wants it kept.
  try {
    return sessionStorage.getItem(KEY) ?? store.getItem(KEY) ?? "";
  } catch {
    return store.getItem(KEY) ?? "";
  }
}

export function start(changed) {
  read();
  for (const name of NUMBERS) $(`set-${name}`).onchange = () => setNumber(name, changed);
  $("set-system").onchange = () => { values.system = $("set-system").value; write(); };
  $("set-theme").onchange = () => { values.theme = $("set-theme").value; write(); showTheme(); };
  for (const id of ["set-key", "set-keep-key"]) $(id).onchange = () => { setKey(); changed(); };
  $("reset-settings").onclick = () => { values = { ...values, system: "", numbers: {} }; write(); show(); };
  // A click on the backdrop closes the dialog.
  $("settings").onclick = (event) => { if (event.target === $("settings")) $("settings").close(); };
  show();
}

export function open(id = "set-system") {
  $("settings").showModal();
  $(id).focus();
}

function setNumber(name) {
  const input = $(`set-${name}`);
  if (!input.reportValidity()) return;
  if (input.value === "") delete values.numbers[name];
  else values.numbers[name] = Number(input.value);
  write();
}

function setKey() {
  const key = $("set-key").value.trim(), isKept = $("set-keep-key").checked;
  store.removeItem(KEY);
  try { sessionStorage.removeItem(KEY); } catch { /* Forbidden: the key is kept nowhere else. */ }
  if (!key) return;
  if (isKept) store.setItem(KEY, key);
  else try { sessionStorage.setItem(KEY, key); } catch { store.setItem(KEY, key); }
}

function read() {
  try {
    const found = JSON.parse(store.getItem(SETTINGS)) ?? {};
    const numbers = Object.fromEntries(NUMBERS.map((name) => [name, found.numbers?.[name]]).filter(([, value]) => Number.isFinite(value)));
    const theme = ["light", "dark"].includes(found.theme) ? found.theme : "auto";
    values = { system: String(found.system ?? ""), theme, numbers };
  } catch { /* Damaged settings are replaced at the next change. */ }
}

function write() {
  try { store.setItem(SETTINGS, JSON.stringify(values)); } catch { /* Full: the settings last as long as the page. */ }
}

function show() {
  for (const name of NUMBERS) $(`set-${name}`).value = values.numbers[name] ?? "";
  $("set-system").value = values.system;
  $("set-theme").value = values.theme;
  $("set-key").value = apiKey();
  $("set-keep-key").checked = store.getItem(KEY) !== null;
  showTheme();
}

function showTheme() {
  document.documentElement.dataset.theme = values.theme;
}
