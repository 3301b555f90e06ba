// Line charts of the last minutes.

import { draw, make } from "./dom.js";

const LEAST_PAST_S = 30, PAST_S = 180;
const HEIGHT = 150, LEFT = 52, RIGHT = 6, TOP = 10, BOTTOM = 22;

// Returns the top of the value axis: a round number that is not below the value.
function roof(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}

const ago = (seconds) => (seconds >= 90 ? `${+(seconds / 60).toFixed(1)} min ago` : `${Math.round(seconds)} s ago`);

// Removes points that are too old to be shown.
export function forget(points, nowS) {
  while (points.length && points[0][0] < nowS - PAST_S) points.shift();
}

// Draws lines: `series` are { label, look, points: [[seconds, value or null], …] }; a null value is a gap.
export function lines(place, series, nowS, format, top = null) {
  const width = Math.max(230, place.clientWidth);
  const values = series.flatMap(({ points }) => points.map(([, value]) => value).filter((value) => value !== null));
  const highest = top ?? roof(Math.max(0, ...values));
  const starts = series.flatMap(({ points }) => points.slice(0, 1).map(([s]) => nowS - s));
  const past = Math.min(PAST_S, Math.max(LEAST_PAST_S, ...starts));
  const x = (s) => LEFT + (width - LEFT - RIGHT) * (1 + (s - nowS) / past);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * Math.min(1, value / highest);
  const latest = ({ points }) => { const value = points.at(-1)?.[1] ?? null; return value === null ? "–" : format(value); };
  const said = series.map((one) => `${one.label} ${latest(one)}`).join(", ");
  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": said });
  for (const share of [0, 0.5, 1]) {
    const at = y(share * highest);
    svg.append(draw("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at, class: share ? "grid" : "axis" }));
    svg.append(draw("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, format(share * highest)));
  }
  for (const [s, text, anchor] of [[past, ago(past), "start"], [0, "now", "end"]])
    svg.append(draw("text", { x: x(nowS - s), y: HEIGHT - 5, "text-anchor": anchor }, text));
  for (const { points, look } of series) {
    let path = "", isGap = true;
    for (const [s, value] of points) {
      if (value !== null && s >= nowS - past) path += `${isGap ? "M" : "L"}${x(s).toFixed(1)} ${y(value).toFixed(1)}`;
      isGap = value === null || s < nowS - past;
    }
    svg.append(draw("path", { d: path, class: look }));
  }
  const legend = make("ul", { className: "legend" }, ...series.map((one) => {
    const key = draw("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" });
    key.append(draw("path", { d: "M1 4H21", class: one.look }));
    return make("li", {}, key, `${one.label} `, make("strong", {}, latest(one)));
  }));
  place.replaceChildren(svg, legend);
}
