// Shows Markdown as nodes. No text is ever parsed as HTML, so that an answer cannot run scripts or load anything.

import { parseBlocks } from "./blocks.js";
import { copyButton, make } from "./dom.js";
import { inline } from "./inline.js";

// A view of a text that grows: only the blocks that have changed are drawn again.
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  update(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].source) same += 1;
    const shown = [...this.element.children];
    // Growing code keeps its element, so that a selection and the place in a long line are kept as well.
    if (same < blocks.length && blocks[same].kind === "code" && shown[same]?.dataset.language === blocks[same].language) {
      shown[same].querySelector("code").textContent = blocks[same].text;
      this.sources[same] = blocks[same].source;
      same += 1;
    }
    shown.slice(same).forEach((element) => element.remove());
    for (const block of blocks.slice(same)) this.element.append(drawBlock(block));
    this.sources = blocks.map((block) => block.source);
  }
}

function drawBlock(block) {
  switch (block.kind) {
    case "heading": return make(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text));
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, block.blocks.map(drawBlock));
    case "code": return drawCode(block);
    case "list": return drawList(block);
    case "table": return drawTable(block);
    default: return make("p", {}, inline(block.text));
  }
}

function drawCode({ language, text }) {
  const code = make("code", {}, text);
  const head = make("figcaption", {}, make("span", {}, language || "text"), copyButton(() => code.textContent));
  const figure = make("figure", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
  figure.dataset.language = language;
  return figure;
}

function drawList({ isOrdered, start, items }) {
  const list = make(isOrdered ? "ol" : "ul", isOrdered && start !== 1 ? { start } : {});
  for (const { checked, blocks } of items) {
    const item = make("li");
    if (checked !== null) item.append(make("input", { type: "checkbox", checked, disabled: true, "aria-label": checked ? "done" : "to do" }), " ");
    // The text of an item without blank lines is not a paragraph of its own.
    const [first, ...others] = blocks;
    const nodes = first?.kind === "paragraph" ? inline(first.text) : first ? [drawBlock(first)] : [];
    for (const node of [...nodes, ...others.map(drawBlock)]) item.append(node);
    list.append(item);
  }
  return list;
}

function drawTable({ header, align, rows }) {
  const cell = (name, text, index) => make(name, { className: `to-${align[index] ?? "left"}` }, inline(text));
  const head = make("tr", {}, header.map((text, index) => cell("th", text, index)));
  const body = rows.map((row) => make("tr", {}, row.map((text, index) => cell("td", text, index))));
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, body));
  return make("div", { className: "table", tabIndex: 0 }, table);
}
