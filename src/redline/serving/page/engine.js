// The engine view: live charts from /metrics while it is open.

import { readMetrics } from "./api.js";
import { forget, lines } from "./charts.js";
import { $, make } from "./dom.js";
import { byLabel, parseMetrics, percentile, rate, total } from "./metrics.js";
import { apiKey } from "./settings.js";

const EVERY_MS = 1000, WINDOW_S = 10;

const readings = [];
const past = { running: [], waiting: [], output: [], prompt: [], first50: [], first95: [], between50: [], between95: [], cache: [] };
let timer = 0, controller = null;

const number = (value) => (value === null ? "–" : value >= 99.5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3)));
const time = (seconds) => (seconds === null ? "–" : seconds < 1 ? `${+(1000 * seconds).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`);
const percent = (share) => (share === null ? "–" : `${+(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`);

export function open() {
  if (!timer) poll();
}

export function close() {
  clearTimeout(timer);
  timer = 0;
  controller?.abort();
}

async function poll() {
  // Set before the request, so that a second call does not start a second loop.
  timer = -1;
  controller = new AbortController();
  const { signal } = controller;
  try {
    take(parseMetrics(await readMetrics(apiKey(), signal)));
    $("engine-trouble").hidden = true;
  } catch (error) {
    if (signal.aborted) return;
    $("engine-trouble").textContent = error.message;
    $("engine-trouble").hidden = false;
  }
  if (!signal.aborted) timer = setTimeout(poll, EVERY_MS);
}

function take(metrics) {
  const nowS = performance.now() / 1000;
  readings.push({ nowS, metrics });
  while (readings.length > 2 && nowS - readings[1].nowS >= WINDOW_S) readings.shift();
  const before = readings[0], seconds = nowS - before.nowS;
  const keep = (name, value) => { past[name].push([nowS, value]); forget(past[name], nowS); return value; };
  const perSecond = (name) => rate(before.metrics, metrics, name, seconds);
  const at = (name, share) => percentile(before.metrics, metrics, name, share);

  $("tile-running").textContent = number(keep("running", total(metrics, "num_requests_running")));
  $("tile-waiting").textContent = number(keep("waiting", total(metrics, "num_requests_waiting")));
  const cache = total(metrics, "kv_cache_usage_perc");
  $("tile-cache").textContent = percent(keep("cache", cache));
  $("tile-tokens").textContent = number(keep("output", perSecond("generation_tokens")));
  keep("prompt", perSecond("prompt_tokens"));
  keep("first50", at("time_to_first_token_seconds", 0.5));
  $("tile-first").textContent = time(keep("first95", at("time_to_first_token_seconds", 0.95)));
  keep("between50", at("inter_token_latency_seconds", 0.5));
  keep("between95", at("inter_token_latency_seconds", 0.95));
  const asked = total(metrics, "prefix_cache_queries"), hits = total(metrics, "prefix_cache_hits");
  $("tile-hits").textContent = percent(asked ? hits / asked : null);
  drawAll(nowS);
  drawTotals(metrics);
}

function drawAll(nowS) {
  const line = (label, look, name) => ({ label, look, points: past[name] });
  lines($("chart-requests"), [line("running", "c0", "running"), line("waiting", "c1", "waiting")], nowS, number);
  lines($("chart-tokens"), [line("output", "c0", "output"), line("prompt", "c1", "prompt")], nowS, number);
  lines($("chart-first"), [line("p50", "c0", "first50"), line("p95", "c2", "first95")], nowS, time);
  lines($("chart-between"), [line("p50", "c0", "between50"), line("p95", "c2", "between95")], nowS, time);
  lines($("chart-cache"), [line("in use", "c0", "cache")], nowS, percent, 1);
}

function drawTotals(metrics) {
  const ends = Object.entries(byLabel(metrics, "request_success", "finished_reason")).filter(([, count]) => count > 0);
  const rows = [
    ["Prompt tokens", total(metrics, "prompt_tokens")], ["Output tokens", total(metrics, "generation_tokens")],
    ["Preemptions", total(metrics, "num_preemptions")], ...ends.map(([reason, count]) => [`Requests ended: ${reason || "any reason"}`, count]),
  ];
  $("totals").replaceChildren(...rows.filter(([, value]) => value !== null).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value.toLocaleString("en")))));
}
