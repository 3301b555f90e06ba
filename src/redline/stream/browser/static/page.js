"use strict";

const $ = (id) => document.getElementById(id);
const STAGES = {
  capture: ["Capture", "until it can be computed"], wait: ["Wait", "for the model to be free"], copy_in: ["Copy in", "to the device"],
  compute: ["Compute", "the model"], copy_out: ["Copy out", "from the device"], display: ["Display", "to the hand-over"],
};
// From the hand-over on to this screen.
const WAY_HERE = [["Encode", "for this page, and send"], ["Network", "half a round trip"], ["Browser", "received until shown"]];
const PING_EVERY_MS = 1000, LONGEST_WAIT_MS = 8000;

let socket = null, about = null, peer = null, camera = null, running = false, ended = false, waitMs = 500;
// Whether this page only watches what the camera of another page becomes.
let watching = false;
const trips = [], showings = [], WINDOW = 256;
const past = { p50: [], p95: [], p99: [], rate: [], process: [], gpu: [], held: [] };
let figures = null, earlier = [];

function say(message) {
  if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function sends() {
  return Boolean(about?.source) && !watching;
}

function complain(text) {
  $("trouble").textContent = text || "";
  $("trouble").hidden = !text;
}

function title(text) {
  if ($("title").textContent !== text) $("title").textContent = text;
}

// The connection to Redline, opened again ever more slowly when it is lost.
function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.onmessage = (event) => hear(JSON.parse(event.data));
  socket.onclose = () => {
    hangUp();
    $("start").disabled = $("watch").disabled = true;
    if (ended) return;
    title("Not connected");
    complain(`No connection to Redline: trying again in ${Math.round(waitMs / 100) / 10} s.`);
    setTimeout(connect, waitMs);
    waitMs = Math.min(LONGEST_WAIT_MS, waitMs * 2);
  };
}

function hear(said) {
  if (said.type === "hello") welcome(said);
  else if (said.type === "figures") show(said);
  else if (said.type === "settings") Settings.set(said.settings);
  else if (said.type === "pong") {
    const ms = performance.now() - said.sent;
    $("tile-trip").textContent = `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
    remember(trips, ms);
  } else if (said.type === "answer") peer?.setRemoteDescription({ type: "answer", sdp: said.sdp }).catch((error) => complain(error.message));
  else if (said.type === "error") {
    complain(said.text);
    if (said.settings) Settings.set(said.settings);
    if (said.about === "offer") stop();
    if (said.about === "page") ended = true;
  } else if (said.type === "closed") {
    hangUp();
    complain(said.text);
    if (running) setTimeout(() => running && !peer && call(), 1500);
  } else if (said.type === "ended") {
    ended = true;
    stop();
    title(said.text);
    $("start").disabled = $("watch").disabled = true;
  }
}

function welcome(said) {
  about = said;
  waitMs = 500;
  complain("");
  for (const id of ["input", "output"]) $(id).style.setProperty("--ratio", said.width / said.height);
  const from = said.source ? "arrival" : "capture", to = said.sink ? "hand-over" : "the sink";
  $("busy-title").textContent = said.device === "cuda" ? "GPU at work" : "Processor at work";
  $("tile-span").textContent = `from ${from} to ${to}`;
  $("footer").textContent = (said.source
    ? "Latency counts from a frame’s arrival here, decoded, and adds what it was later than the quickest one. What that one took, in camera, browser and network, is not in it."
    : "Latency begins when the source captured a frame.") + (said.sink
    ? " Together ends when the frame is handed over to the pages; the rows below it go on to this screen. What the screen itself takes is not in them." : "");
  Settings.build(said);
  $("start").disabled = $("watch").disabled = false;
  say({ type: "ping", sent: performance.now() });
  if (running) start(watching);
  else if (said.sink && (!said.source || said.camera_taken)) start(said.source);
  else describe();
}

function describe() {
  const empty = (id, text) => { $(id).querySelector(".empty").textContent = text; };
  if (!about) return;
  empty("input", sends() ? (running ? "Waiting for the camera…" : "Press Start to send this camera.") : running ? "Waiting for the input…" : "Not started.");
  empty("output", !about.sink ? "The output goes elsewhere." : running ? "Waiting for the first frame…" : "Not started.");
  $("start").textContent = running ? "Stop" : "Start";
  $("start").classList.toggle("running", running);
  $("watch").hidden = running || !about.source || !about.sink;
}

async function start(watch) {
  if (peer) return;
  running = true;
  watching = watch;
  complain("");
  describe();
  if (sends() && !(await openCamera())) {
    stop();
    return;
  }
  if (running) await call();
}

function stop() {
  running = false;
  say({ type: "stop" });
  hangUp();
  camera?.getTracks().forEach((track) => track.stop());
  camera = null;
  watching = false;
  if (about?.source) $("input").querySelector("video").srcObject = null;
  describe();
}

async function openCamera() {
  if (camera?.active) return true;
  if (!navigator.mediaDevices) {
    complain("A browser gives its camera only to https pages and to localhost: open this page so.");
    return false;
  }
  const wanted = { width: { ideal: about.width }, height: { ideal: about.height }, frameRate: { ideal: about.rate, max: Math.max(about.rate, 30) } };
  if ($("camera").value) wanted.deviceId = { exact: $("camera").value };
  try {
    camera = await navigator.mediaDevices.getUserMedia({ video: wanted });
  } catch (error) {
    complain({ NotAllowedError: "The camera was not allowed: allow it for this page, and press Start.", NotFoundError: "This device has no camera.", NotReadableError: "The camera is in use by another program." }[error.name] || `The camera cannot be opened: ${error.message}.`);
    return false;
  }
  camera.getVideoTracks()[0].onended = () => { complain("The camera is gone."); stop(); };
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
  // VP8 is what the other end speaks, and a short offer is read quickly.
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
  // What was shown over another connection is not compared with this one.
  showings.length = 0;
  if (sends()) add("camera", camera.getVideoTracks()[0], "sendonly");
  if (about.sink) add("output", "video", "recvonly");
  if (!sends()) add("input", "video", "recvonly");
  await peer.setLocalDescription();
  if (mine === peer) say({ type: "offer", sdp: peer.localDescription.sdp, lines });
}

function hangUp() {
  peer?.close();
  peer = null;
  for (const id of sends() ? ["output"] : ["input", "output"]) $(id).querySelector("video").srcObject = null;
}

function keep(list, atS, value) {
  list.push([atS, value]);
  while (list.length && list[0][0] < atS - PAST_S) list.shift();
}

function remember(list, value) {
  list.push(value);
  if (list.length > WINDOW) list.shift();
}

function percentiles(list) {
  const sorted = [...list].sort((a, b) => a - b);
  return [0.5, 0.95, 0.99].map((share) => sorted[Math.round(share * (sorted.length - 1))]);
}

// In milliseconds; sums of percentiles, so about. Nothing before a picture was shown.
function wayHere() {
  const view = figures.views.output;
  if (!view?.ages_s || !trips.length || !showings.length) return null;
  const ms = (list) => list.map((s) => 1000 * s);
  const network = percentiles(trips).map((trip) => trip / 2), browser = percentiles(showings);
  const age = ms(view.ages_s).map((sent, i) => sent + network[0] + browser[i]);
  return { stages: [ms(view.sendings_s), network, browser], age };
}

function bytes(number) {
  return number >= 2 ** 30 ? `${(number / 2 ** 30).toFixed(2)} GiB` : `${(number / 2 ** 20).toFixed(0)} MiB`;
}

function show(said) {
  const { report, memory, at_s: now } = said;
  earlier.push({ at: now, frames: report.frames, drops: report.drops });
  while (earlier.length > 1 && now - earlier[1].at >= 1) earlier.shift();
  figures = said;
  const before = earlier[0], seconds = now - before.at;
  const rate = seconds > 0 ? (report.frames - before.frames) / seconds : 0;
  if (seconds > 0) keep(past.rate, now, rate);
  const ms = (s) => 1000 * s;
  for (const name of ["p50", "p95", "p99"]) if (report.frames) keep(past[name], now, ms(report.latency[`${name}_s`]));
  keep(past.process, now, memory.process_bytes);
  if ("gpu_bytes" in memory) { keep(past.gpu, now, memory.gpu_bytes); keep(past.held, now, memory.gpu_held_bytes); }

  const dropped = Object.values(report.drops).reduce((sum, count) => sum + count, 0);
  const label = (value) => `${value.toFixed(value < 99.95 ? 1 : 0)} ms`;
  if (!ended && socket.readyState === WebSocket.OPEN)
    title(rate > 0 ? `Live at ${rate.toFixed(rate < 9.95 ? 1 : 0)} frames a second` : report.frames ? "Waiting for frames" : "Ready");
  $("tile-rate").textContent = rate.toFixed(1);
  $("tile-p50").textContent = report.frames ? label(ms(report.latency.p50_s)) : "–";
  $("tile-p99").textContent = report.frames ? label(ms(report.latency.p99_s)) : "–";
  $("tile-jitter").textContent = report.frames ? `jitter ${label(ms(report.jitter_s))}` : "jitter –";
  $("tile-drops").textContent = dropped.toLocaleString("en");
  $("tile-busy").textContent = said.busy_share === null ? "–" : `${Math.round(100 * said.busy_share)} %`;
  $("tile-made").textContent = `${report.frames.toLocaleString("en")} frames were made`;
  $("stages-lead").textContent = report.window ? `In milliseconds, of the last ${report.window.toLocaleString("en")} frames.` : "No frame was made yet.";
  for (const [name, picture] of Object.entries(said.pictures)) describePicture(name, picture);
  describeView(said.views.output);
  drawCharts();
}

function describePicture(name, picture) {
  if (!picture) return;
  // A side that is odd is shown one pixel longer.
  const differs = Math.max(Math.abs(picture.shown_height - picture.height), Math.abs(picture.shown_width - picture.width)) > 1;
  const shown = differs ? `, shown at ${picture.shown_width} × ${picture.shown_height}` : "";
  $(name).querySelector(".detail").textContent = `${picture.width} × ${picture.height}${shown}`;
  $(name).style.setProperty("--ratio", picture.shown_width / picture.shown_height);
}

function describeView(view) {
  const age = wayHere()?.age;
  $("age").textContent = age ? `${age[0].toFixed(1)} · ${age[1].toFixed(1)} ms` : "–";
  $("skipped").textContent = view ? view.skipped.toLocaleString("en") : "–";
}

function drawCharts() {
  if (!figures) return;
  const { report, at_s: now } = figures;
  const row = (spread, names) => ({ label: names[0], what: names[1], none: !report.frames, p50: 1000 * spread.p50_s, p95: 1000 * spread.p95_s, p99: 1000 * spread.p99_s });
  const rows = Object.entries(report.stages).map(([name, spread]) => row(spread, STAGES[name] || [name, ""]));
  const here = wayHere();
  const rowHere = (ms, [label, what]) => ({ label, what, p50: ms[0], p95: ms[1], p99: ms[2] });
  const onward = here ? [...here.stages.map((ms, i) => rowHere(ms, WAY_HERE[i])), { ...rowHere(here.age, ["Shown here", "about"]), total: true }] : [];
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

// What only the browser knows: how many pictures it showed, how long they waited in it, and how long decoding took.
let shown = 0, shownBefore = 0, shownSince = performance.now(), statsBefore = null;

function countShown() {
  const video = $("output").querySelector("video");
  if (!video.requestVideoFrameCallback) return;
  const count = (now, frame) => {
    shown += 1;
    if (frame.receiveTime) remember(showings, Math.max(0, frame.expectedDisplayTime - frame.receiveTime));
    video.requestVideoFrameCallback(count);
  };
  video.requestVideoFrameCallback(count);
}

async function measureHere() {
  const now = performance.now();
  $("shown").textContent = shown.toLocaleString("en");
  $("shown-rate").textContent = ((shown - shownBefore) / ((now - shownSince) / 1000)).toFixed(1);
  [shownBefore, shownSince] = [shown, now];
  say({ type: "ping", sent: performance.now() });
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
setInterval(measureHere, PING_EVERY_MS);
countShown();
connect();
