"use strict";

// The shortest and the longest time span of a chart, in seconds.
const LEAST_PAST_S = 20, PAST_S = 120;

const Charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function draw(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function make(name, className, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Returns the top of the value axis: a round number, not below the value, whose half is round as well.
  function roof(value) {
    if (!(value > 0)) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
  }

  function ago(seconds) {
    return seconds >= 90 ? `${+(seconds / 60).toFixed(1)} min ago` : `${Math.round(seconds)} s ago`;
  }

  // Draws lines over the last two minutes: `series` are {label, look, values: [[seconds, value], …]}.
  function lines(place, series, nowS, unit, format) {
    const width = Math.max(220, place.clientWidth), height = 168, left = 44, right = 8, top = 10, bottom = 22;
    const drawn = series.filter((one) => one.values.length);
    const top_value = roof(Math.max(0, ...drawn.flatMap((one) => one.values.map(([, value]) => value))));
    const past = Math.min(PAST_S, Math.max(LEAST_PAST_S, ...drawn.map((one) => nowS - one.values[0][0])));
    const x = (s) => left + (width - left - right) * (1 + (s - nowS) / past);
    const y = (value) => height - bottom - (height - top - bottom) * (value / top_value);
    const said = drawn.map((one) => `${one.label} ${format(one.values.at(-1)[1])}`).join(", ");
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said || "nothing yet" });
    for (const share of [0, 0.5, 1]) {
      const at = y(share * top_value);
      svg.append(draw("line", { x1: left, x2: width - right, y1: at, y2: at, class: share ? "grid" : "axis" }));
      const number = share * top_value;
      svg.append(draw("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, share === 1 ? `${+number.toPrecision(3)} ${unit}` : +number.toPrecision(3)));
    }
    for (const [s, label, anchor] of [[past, ago(past), "start"], [past / 2, ago(past / 2), "middle"], [0, "now", "end"]])
      svg.append(draw("text", { x: x(nowS - s), y: height - 5, "text-anchor": anchor }, label));
    for (const one of drawn) {
      const points = one.values.filter(([s]) => s >= nowS - past);
      const path = points.map(([s, value], i) => `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      svg.append(draw("path", { d: path, class: one.look }));
    }
    const legend = make("ul", "legend");
    for (const one of drawn) {
      const item = make("li");
      const key = draw("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" });
      key.append(draw("path", { d: "M1 4H21", class: one.look }));
      item.append(key, `${one.label} `, make("strong", "", format(one.values.at(-1)[1])));
      legend.append(item);
    }
    place.replaceChildren(svg, legend);
  }

  // Draws for each stage a bar up to p50 with marks at p95 and p99, all on one scale.
  function stages(body, rows) {
    const most = Math.max(1e-9, ...rows.map((row) => row.p99));
    body.replaceChildren(...rows.map((row) => {
      const line = make("tr", row.total ? "total" : "");
      const head = make("th", "", row.label);
      head.scope = "row";
      if (row.what) head.append(make("small", "", row.what));
      const svg = draw("svg", { viewBox: "0 0 100 16", preserveAspectRatio: "none", "aria-hidden": "true" });
      const at = (value) => 99 * value / most;
      svg.append(draw("rect", { x: 0, y: 3, width: 100, height: 10, class: "track" }));
      svg.append(draw("rect", { x: 0, y: 3, width: at(row.p50), height: 10, class: "fill" }));
      for (const [value, look] of [[row.p95, "at95"], [row.p99, "at99"]])
        if (value > 0) svg.append(draw("rect", { x: at(value), y: 0, width: 0.9, height: 16, class: look }));
      const bar = make("td", "bar");
      bar.append(svg);
      const number = (value) => (row.none ? "–" : value.toFixed(value < 99.95 ? 1 : 0));
      line.append(head, bar, ...["p50", "p95", "p99"].map((name) => make("td", "n", number(row[name]))));
      return line;
    }));
  }

  function drops(place, rows) {
    if (!rows.length) {
      place.replaceChildren(make("p", "nothing", "Nothing has been dropped."));
      return;
    }
    const most = Math.max(...rows.map((row) => row.count));
    place.replaceChildren(...rows.map((row) => {
      const drop = make("div", "drop"), what = make("div", "what");
      what.append(make("span", "", row.cause), make("span", "", `${row.count.toLocaleString("en")} · ${row.perSecond.toFixed(1)}/s now`));
      const svg = draw("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
      svg.append(draw("rect", { x: 0, y: 0, width: 100, height: 10, class: "track" }));
      svg.append(draw("rect", { x: 0, y: 0, width: 100 * row.count / most, height: 10, class: "at95" }));
      drop.append(what, svg);
      return drop;
    }));
  }

  return { lines, stages, drops, make };
})();
