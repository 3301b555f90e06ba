"use strict";

const $ = (id) => document.getElementById(id);
const STAGES = {
  capture: ["Capture", "until it is queued"], wait: ["Wait", "in the queue"], copy_in: ["Copy in", "to the device"],
  compute: ["Compute", "the model"], copy_out: ["Copy out", "from the device"], display: ["Display", "to the hand-over"],
};
// The stages between the server's output and the display on this page, as [label, description].
const PAGE_STAGES = [["Encode", "and send to this page"], ["Network", "half a round trip"], ["Browser", "from arrival to display"]];
const PING_EVERY_MS = 1000, LONGEST_WAIT_MS = 8000;

let socket = null, about = null, peer = null, camera = null, running = false, ended = false, waitMs = 500;
// Whether this page only shows the video while another page sends its camera.
let watching = false;
const trips = [], showings = [], WINDOW = 256;
const past = { p50: [], p95: [], p99: [], rate: [], process: [], gpu: [], held: [] };
let metrics = null, earlier = [];

function sendMessage(message) {
  if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function sendsCamera() {
  return Boolean(about?.source) && !watching;
}

function showError(text) {
  $("trouble").textContent = text || "";
  $("trouble").hidden = !text;
}

function setTitle(text) {
  if ($("title").textContent !== text) $("title").textContent = text;
}

// Opens the WebSocket to Redline, and reconnects with growing delays.
function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.onmessage = (event) => receive(JSON.parse(event.data));
  socket.onclose = () => {
    disconnect();
    $("start").disabled = $("watch").disabled = true;
    if (ended) return;
    setTitle("Not connected");
    showError(`No connection to Redline: trying again in ${Math.round(waitMs / 100) / 10} s.`);
    setTimeout(connect, waitMs);
    waitMs = Math.min(LONGEST_WAIT_MS, waitMs * 2);
  };
}

function receive(message) {
  if (message.type === "hello") onHello(message);
  else if (message.type === "figures") showMetrics(message);
  else if (message.type === "settings") Settings.set(message.settings);
  else if (message.type === "pong") {
    const ms = performance.now() - message.sent;
    $("tile-trip").textContent = `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
    keepLast(trips, ms);
  } else if (message.type === "answer") peer?.setRemoteDescription({ type: "answer", sdp: message.sdp }).catch((error) => showError(error.message));
  else if (message.type === "error") {
    showError(message.text);
    if (message.settings) Settings.set(message.settings);
    if (message.about === "offer") stop();
    if (message.about === "page") ended = true;
  } else if (message.type === "closed") {
    disconnect();
    showError(message.text);
    if (running) setTimeout(() => running && !peer && call(), 1500);
  } else if (message.type === "ended") {
    ended = true;
    stop();
    setTitle(message.text);
    $("start").disabled = $("watch").disabled = true;
  }
}

function onHello(message) {
  about = message;
  waitMs = 500;
  showError("");
  for (const id of ["input", "output"]) $(id).style.setProperty("--ratio", message.width / message.height);
  const from = message.source ? "arrival" : "capture", to = message.sink ? "hand-over" : "output";
  $("busy-title").textContent = message.device === "cuda" ? "GPU utilization" : "CPU utilization";
  $("tile-span").textContent = `from ${from} to ${to}`;
  $("footer").textContent = (message.source
    ? "Latency counts from the arrival of a decoded frame, plus its delay compared with the fastest one. The time of the fastest one in camera, browser and network is not included."
    : "Latency counts from the capture of a frame.") + (message.sink
    ? " The row “Together” ends with the hand-over to the pages; the rows below it continue to this page. The display hardware is not included." : "");
  Settings.build(message);
  $("start").disabled = $("watch").disabled = false;
  sendMessage({ type: "ping", sent: performance.now() });
  if (running) start(watching);
  else if (message.sink && (!message.source || message.camera_taken)) start(message.source);
  else describe();
}

function describe() {
  const empty = (id, text) => { $(id).querySelector(".empty").textContent = text; };
  if (!about) return;
  empty("input", sendsCamera() ? (running ? "Waiting for the camera…" : "Press Start to send this camera.") : running ? "Waiting for the input…" : "Not started.");
  empty("output", !about.sink ? "The output goes elsewhere." : running ? "Waiting for the first frame…" : "Not started.");
  $("start").textContent = running ? "Stop" : "Start";
  $("start").classList.toggle("running", running);
  $("watch").hidden = running || !about.source || !about.sink;
}

async function start(watch) {
  if (peer) return;
  running = true;
  watching = watch;
  showError("");
  describe();
  if (sendsCamera() && !(await openCamera())) {
    stop();
    return;
  }
  if (running) await call();
}

function stop() {
  running = false;
  sendMessage({ type: "stop" });
  disconnect();
  camera?.getTracks().forEach((track) => track.stop());
  camera = null;
  watching = false;
  if (about?.source) $("input").querySelector("video").srcObject = null;
  describe();
}

async function openCamera() {
  if (camera?.active) return true;
  if (!navigator.mediaDevices) {
    showError("Browsers give a camera only to https pages and to localhost: open this page through one of them.");
    return false;
  }
  const wanted = { width: { ideal: about.width }, height: { ideal: about.height }, frameRate: { ideal: about.rate, max: Math.max(about.rate, 30) } };
  if ($("camera").value) wanted.deviceId = { exact: $("camera").value };
  try {
    camera = await navigator.mediaDevices.getUserMedia({ video: wanted });
  } catch (error) {
    showError({ NotAllowedError: "Camera access was denied: allow it for this page, and press Start.", NotFoundError: "This device has no camera.", NotReadableError: "The camera is in use by another program." }[error.name] || `The camera cannot be opened: ${error.message}.`);
    return false;
  }
  camera.getVideoTracks()[0].onended = () => { showError("The camera was disconnected."); stop(); };
  const cameras = (await navigator.mediaDevices.enumerateDevices()).filter((device) => device.kind === "videoinput");
  const used = camera.getVideoTracks()[0].getSettings().deviceId;
  $("cameras").hidden = cameras.length < 2;
  $("camera").replaceChildren(...cameras.map((device, i) => new Option(device.label || `Camera ${i + 1}`, device.deviceId, false, device.deviceId === used)));
  const video = $("input").querySelector("video");
  video.srcObject = camera;
  return true;
}

async function call() {
  peer = new RTCPeerConnection({ iceServers: [], bundlePolicy: "max-bundle" });
  const mine = peer, lines = [];
  // Offers only VP8, the one codec that the server supports, because a short offer is parsed faster.
  const codecs = (RTCRtpReceiver.getCapabilities("video")?.codecs || []).filter((codec) => /\/(vp8|rtx)$/i.test(codec.mimeType));
  const add = (name, trackOrKind, direction) => {
    const transceiver = peer.addTransceiver(trackOrKind, { direction, streams: direction === "sendonly" ? [camera] : [] });
    if (codecs.length) transceiver.setCodecPreferences?.(codecs);
    lines.push(name);
    if (direction === "recvonly") {
      if ("jitterBufferTarget" in transceiver.receiver) transceiver.receiver.jitterBufferTarget = 0;
      $(name).querySelector("video").srcObject = new MediaStream([transceiver.receiver.track]);
    }
  };
  // Discards the display times of the previous connection.
  showings.length = 0;
  if (sendsCamera()) add("camera", camera.getVideoTracks()[0], "sendonly");
  if (about.sink) add("output", "video", "recvonly");
  if (!sendsCamera()) add("input", "video", "recvonly");
  await peer.setLocalDescription();
  if (mine === peer) sendMessage({ type: "offer", sdp: peer.localDescription.sdp, lines });
}

function disconnect() {
  peer?.close();
  peer = null;
  for (const id of sendsCamera() ? ["output"] : ["input", "output"]) $(id).querySelector("video").srcObject = null;
}

function keepRecent(list, atS, value) {
  list.push([atS, value]);
  while (list.length && list[0][0] < atS - PAST_S) list.shift();
}

function keepLast(list, value) {
  list.push(value);
  if (list.length > WINDOW) list.shift();
}

function percentiles(list) {
  const sorted = [...list].sort((a, b) => a - b);
  return [0.5, 0.95, 0.99].map((share) => sorted[Math.round(share * (sorted.length - 1))]);
}

// Returns the latency percentiles of each stage and of the total (approximated by their sums), or null before the first frame.
function pageLatency() {
  const view = metrics.views.output;
  if (!view?.ages_s || !trips.length || !showings.length) return null;
  const ms = (list) => list.map((s) => 1000 * s);
  const network = percentiles(trips).map((trip) => trip / 2), browser = percentiles(showings);
  const age = ms(view.ages_s).map((sent, i) => sent + network[0] + browser[i]);
  return { stages: [ms(view.sendings_s), network, browser], age };
}

function bytes(number) {
  return number >= 2 ** 30 ? `${(number / 2 ** 30).toFixed(2)} GiB` : `${(number / 2 ** 20).toFixed(0)} MiB`;
}

function showMetrics(message) {
  const { report, memory, at_s: now } = message;
  earlier.push({ at: now, frames: report.frames, drops: report.drops });
  while (earlier.length > 1 && now - earlier[1].at >= 1) earlier.shift();
  metrics = message;
  const before = earlier[0], seconds = now - before.at;
  const rate = seconds > 0 ? (report.frames - before.frames) / seconds : 0;
  if (seconds > 0) keepRecent(past.rate, now, rate);
  const ms = (s) => 1000 * s;
  for (const name of ["p50", "p95", "p99"]) if (report.frames) keepRecent(past[name], now, ms(report.latency[`${name}_s`]));
  keepRecent(past.process, now, memory.process_bytes);
  if ("gpu_bytes" in memory) { keepRecent(past.gpu, now, memory.gpu_bytes); keepRecent(past.held, now, memory.gpu_held_bytes); }

  const dropped = Object.values(report.drops).reduce((sum, count) => sum + count, 0);
  const label = (value) => `${value.toFixed(value < 99.95 ? 1 : 0)} ms`;
  if (!ended && socket.readyState === WebSocket.OPEN)
    setTitle(rate > 0 ? `Live at ${rate.toFixed(rate < 9.95 ? 1 : 0)} frames per second` : report.frames ? "Waiting for frames" : "Ready");
  $("tile-rate").textContent = rate.toFixed(1);
  $("tile-p50").textContent = report.frames ? label(ms(report.latency.p50_s)) : "–";
  $("tile-p99").textContent = report.frames ? label(ms(report.latency.p99_s)) : "–";
  $("tile-jitter").textContent = report.frames ? `jitter ${label(ms(report.jitter_s))}` : "jitter –";
  $("tile-drops").textContent = dropped.toLocaleString("en");
  $("tile-busy").textContent = message.busy_share === null ? "–" : `${Math.round(100 * message.busy_share)} %`;
  $("tile-made").textContent = `${report.frames.toLocaleString("en")} frames were computed`;
  $("stages-lead").textContent = report.window ? `In milliseconds, of the last ${report.window.toLocaleString("en")} frames.` : "No frame was computed yet.";
  for (const [name, image] of Object.entries(message.images)) describeImage(name, image);
  describeView(message.views.output);
  drawCharts();
}

function describeImage(name, image) {
  if (!image) return;
  // A difference of one pixel is ignored, because an odd side is padded by one pixel.
  const differs = Math.max(Math.abs(image.shown_height - image.height), Math.abs(image.shown_width - image.width)) > 1;
  const shown = differs ? `, shown at ${image.shown_width} × ${image.shown_height}` : "";
  $(name).querySelector(".detail").textContent = `${image.width} × ${image.height}${shown}`;
  $(name).style.setProperty("--ratio", image.shown_width / image.shown_height);
}

function describeView(view) {
  const age = pageLatency()?.age;
  $("age").textContent = age ? `${age[0].toFixed(1)} · ${age[1].toFixed(1)} ms` : "–";
  $("skipped").textContent = view ? view.skipped.toLocaleString("en") : "–";
}

function drawCharts() {
  if (!metrics) return;
  const { report, at_s: now } = metrics;
  const row = (spread, names) => ({ label: names[0], what: names[1], none: !report.frames, p50: 1000 * spread.p50_s, p95: 1000 * spread.p95_s, p99: 1000 * spread.p99_s });
  const rows = Object.entries(report.stages).map(([name, spread]) => row(spread, STAGES[name] || [name, ""]));
  const here = pageLatency();
  const pageRow = (ms, [label, what]) => ({ label, what, p50: ms[0], p95: ms[1], p99: ms[2] });
  const onward = here ? [...here.stages.map((ms, i) => pageRow(ms, PAGE_STAGES[i])), { ...pageRow(here.age, ["Shown here", "about"]), total: true }] : [];
  Charts.stages($("stages"), [...rows, { ...row(report.latency, ["Together", ""]), total: true }, ...onward]);
  const asMs = (value) => `${value.toFixed(1)} ms`;
  Charts.lines($("latency-chart"), ["p50", "p95", "p99"].map((name) => ({ label: name, look: name, values: past[name] })), now, "ms", asMs);
  Charts.lines($("rate-chart"), [{ label: "in the last second", look: "p50", values: past.rate }], now, "/s", (value) => value.toFixed(1));
  const inMiB = (list) => list.map(([s, value]) => [s, value / 2 ** 20]);
  Charts.lines($("memory-chart"), [
    { label: "process", look: "p50", values: inMiB(past.process) }, { label: "GPU, in use", look: "p95", values: inMiB(past.gpu) },
    { label: "GPU, held", look: "p99", values: inMiB(past.held) },
  ], now, "MiB", (value) => bytes(value * 2 ** 20));
  const before = earlier[0], seconds = Math.max(1e-3, now - before.at);
  Charts.drops($("drops"), Object.entries(report.drops).sort((a, b) => b[1] - a[1]).map(([cause, count]) => ({
    cause, count, perSecond: (count - (before.drops[cause] || 0)) / seconds,
  })));
}

// Metrics that only the browser can measure: frames shown, time in the jitter buffer, decoding time.
let shown = 0, shownBefore = 0, shownSince = performance.now(), statsBefore = null;

function countShown() {
  const video = $("output").querySelector("video");
  if (!video.requestVideoFrameCallback) return;
  const count = (now, frame) => {
    shown += 1;
    if (frame.receiveTime) keepLast(showings, Math.max(0, frame.expectedDisplayTime - frame.receiveTime));
    video.requestVideoFrameCallback(count);
  };
  video.requestVideoFrameCallback(count);
}

async function measurePage() {
  const now = performance.now();
  $("shown").textContent = shown.toLocaleString("en");
  $("shown-rate").textContent = ((shown - shownBefore) / ((now - shownSince) / 1000)).toFixed(1);
  [shownBefore, shownSince] = [shown, now];
  sendMessage({ type: "ping", sent: performance.now() });
  const at = peer?.getReceivers().find((one) => one.track === $("output").querySelector("video").srcObject?.getTracks()[0]);
  const stats = at ? [...(await at.getStats()).values()].find((one) => one.type === "inbound-rtp") : null;
  const per = (sum, count) => {
    const times = stats && statsBefore ? stats[count] - statsBefore[count] : 0;
    return times > 0 ? `${(1000 * (stats[sum] - statsBefore[sum]) / times).toFixed(1)} ms` : "–";
  };
  $("buffer").textContent = per("jitterBufferDelay", "jitterBufferEmittedCount");
  $("decoding").textContent = per("totalDecodeTime", "framesDecoded");
  statsBefore = stats;
}

for (const id of ["input", "output"]) {
  const video = $(id).querySelector("video");
  video.addEventListener("playing", () => $(id).classList.add("playing"));
  video.addEventListener("emptied", () => { if (!video.srcObject) $(id).classList.remove("playing"); });
}
$("start").onclick = () => (running ? stop() : start(false));
$("watch").onclick = () => start(true);
$("camera").onchange = () => { stop(); start(false); };
addEventListener("resize", drawCharts);
setInterval(measurePage, PING_EVERY_MS);
countShown();
connect();
