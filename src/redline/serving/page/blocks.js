// Parses the blocks of Markdown: paragraphs, headings, lists, quotes, tables, code. Returns plain data.

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|)$/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
// Deeper lists and quotes become text, so that no input can exhaust the stack.
const DEEPEST = 12;

const indentation = (line) => line.length - line.trimStart().length;

// Returns the blocks of a text; the `source` of each has its lines, so that a view can tell which ones have changed.
export function parseBlocks(text, depth = 0) {
  const lines = Array.isArray(text) ? text : text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [block, end] = parseBlock(lines, at, depth);
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

// Returns the block that starts at a line, and the index of the line after it.
function parseBlock(lines, at, depth) {
  const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
  if (fence) return parseCode(lines, at, fence);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: (heading[2] ?? "").replace(/(^|[ \t]+)#+[ \t]*$/, "").trim() }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return parseQuote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return parseList(lines, at, depth);
  if (isTable(lines, at)) return parseTable(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((one) => one.trimStart()).join("\n") }, end];
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, at);
}

// A fence that is not closed yet goes to the end: its text is still being written.
function parseCode(lines, at, [, indent, fence, info]) {
  let end = at + 1;
  const isEnd = (line) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length) && indentation(line) < 4;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent.length, indentation(line))));
  return [{ kind: "code", language: info.trim().split(/\s/)[0], text: code.join("\n") }, Math.min(end + 1, lines.length)];
}

function parseQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [{ kind: "quote", blocks: parseBlocks(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1) }, end];
}

function parseList(lines, at, depth) {
  const first = ITEM.exec(lines[at]), isOrdered = /\d/.test(first[2]);
  const list = { kind: "list", isOrdered, start: isOrdered ? parseInt(first[2], 10) : 1, items: [] };
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || /\d/.test(item[2]) !== isOrdered || RULE.test(lines[end]) || item[1].length < first[1].length) break;
    const inner = item[1].length + item[2].length + Math.min(item[3]?.length ?? 1, 4);
    const [own, next] = itemLines(lines, end, inner, item[4] ?? "");
    list.items.push(parseItem(own, depth));
    end = next;
    // Blank lines between two items belong to the list.
    let after = end;
    while (after < lines.length && !lines[after].trim()) after += 1;
    if (after < lines.length && ITEM.test(lines[after])) end = after;
  }
  return [list, end];
}

// Returns the lines of an item without their indentation, and the index of the line after it.
function itemLines(lines, at, inner, first) {
  const own = [first];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      let after = end;
      while (after < lines.length && !lines[after].trim()) after += 1;
      if (after === lines.length || indentation(lines[after]) < inner) break;
      for (; end < after; end += 1) own.push("");
    } else if (indentation(line) >= inner) {
      own.push(line.slice(inner));
      end += 1;
    } else if (indentation(line) >= 2 && ITEM.test(line) && indentation(line) > indentation(lines[at])) {
      // A nested list whose author indented it by too little.
      own.push(line.trimStart());
      end += 1;
    } else if (!startsBlock(lines, end) && own.at(-1).trim()) {
      own.push(line.trimStart());
      end += 1;
    } else break;
  }
  return [own, end];
}

function parseItem(own, depth) {
  const task = /^\[([ xX])\] +/.exec(own[0]);
  if (task) own[0] = own[0].slice(task[0].length);
  return { checked: task ? task[1] !== " " : null, blocks: parseBlocks(own, depth + 1) };
}

function isTable(lines, at) {
  return at + 1 < lines.length && lines[at].includes("|") && lines[at + 1].includes("-") && DELIMITERS.test(lines[at + 1])
    && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function parseTable(lines, at) {
  const header = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  let end = at + 2;
  const rows = [];
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) {
    rows.push(header.map((_, index) => cells(lines[end])[index] ?? ""));
    end += 1;
  }
  return [{ kind: "table", header, align, rows }, end];
}

// Splits a row at its bars, except those with a backslash before them or inside of code.
function cells(line) {
  const found = [""];
  let inCode = false;
  const text = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "`") inCode = !inCode;
    if (text[at] === "\\" && text[at + 1] === "|") { found[found.length - 1] += "|"; at += 1; }
    else if (text[at] === "|" && !inCode) found.push("");
    else found[found.length - 1] += text[at];
  }
  return found.map((cell) => cell.trim());
}
