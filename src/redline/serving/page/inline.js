// Turns the inline Markdown of a text into nodes: emphasis, code, links. HTML stays text.

import { make } from "./dom.js";

const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SCHEMES = ["http:", "https:", "mailto:"];
const BARE_LINK = /https?:\/\/[^\s<>"'`]+/y;
const MARKS = [["***", ["strong", "em"]], ["**", ["strong"]], ["__", ["strong"]], ["~~", ["del"]], ["*", ["em"]], ["_", ["em"]]];
const DEEPEST = 8;

export function inline(text, depth = 0) {
  const nodes = [], nowhere = new Set();
  let plain = "", at = 0;
  const flush = () => { if (plain) nodes.push(document.createTextNode(plain)); plain = ""; };
  const add = (node, end) => { flush(); nodes.push(node); at = end; };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && text[at + 1] === "\n") add(make("br"), at + 2);
    else if (char === "\\" && ESCAPABLE.test(text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; }
    else if (char === "\n") { plain = plain.trimEnd(); add(make("br"), at + 1); }
    else {
      const found = depth < DEEPEST ? span(text, at, depth, nowhere) : null;
      if (found) add(...found);
      else { plain += char; at += 1; }
    }
  }
  flush();
  return nodes;
}

// Returns the node that starts at a position and the position after it, or null. `nowhere` collects the marks that do
// not occur again, so that a text with many of them is not searched to its end for each.
function span(text, at, depth, nowhere) {
  switch (text[at]) {
    case "`": return code(text, at, nowhere);
    case "!": return text[at + 1] === "[" ? link(text, at + 1, depth, nowhere) : null;
    case "[": return link(text, at, depth, nowhere);
    case "<": return angle(text, at);
    case "h": return bare(text, at);
    case "*": case "_": case "~": return emphasis(text, at, depth, nowhere);
    default: return null;
  }
}

function code(text, at, nowhere) {
  const fence = /^`+/.exec(text.slice(at, at + 32))[0];
  if (text[at - 1] === "`" || nowhere.has(fence)) return null;
  let end = text.indexOf(fence, at + fence.length);
  while (end >= 0 && (text[end + fence.length] === "`" || text[end - 1] === "`")) {
    let after = end;
    while (text[after] === "`") after += 1;
    end = text.indexOf(fence, after);
  }
  if (end < 0) { nowhere.add(fence); return null; }
  const inner = text.slice(at + fence.length, end).replace(/\n/g, " ");
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return [make("code", {}, isPadded ? inner.slice(1, -1) : inner), end + fence.length];
}

// Returns the node of a link, or a text if its address is not one that a link may have.
export function linkTo(address, children) {
  let url;
  try { url = new URL(address); } catch { return null; }
  if (!SCHEMES.includes(url.protocol)) return null;
  return make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

// Images become links, because the page loads nothing from other hosts.
function link(text, at, depth, nowhere) {
  if (nowhere.has("](")) return null;
  if (text.indexOf("](", at) < 0) { nowhere.add("]("); return null; }
  let open = 0, end = at;
  for (; end < text.length && end < at + 1000; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") open += 1;
    else if (text[end] === "]" && (open -= 1) === 0) break;
  }
  if (text[end] !== "]" || text[end + 1] !== "(") return null;
  const target = /^\([ \t]*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:[ \t]+(?:"[^"\n]*"|'[^'\n]*'))?[ \t]*\)/.exec(text.slice(end + 1, end + 4000));
  if (!target) return null;
  const label = text.slice(at + 1, end);
  const node = linkTo((target[1] ?? target[2]).replace(/\\(.)/g, "$1"), inline(label || "image", DEEPEST - Math.min(2, DEEPEST - depth)));
  return node && [node, end + 1 + target[0].length];
}

function angle(text, at) {
  if (/^<br ?\/?>/i.test(text.slice(at, at + 6))) return [make("br"), text.indexOf(">", at) + 1];
  const found = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/.exec(text.slice(at, at + 2010));
  const node = found && linkTo(found[1], [found[1]]);
  return node ? [node, at + found[0].length] : null;
}

function bare(text, at) {
  if (/[\w/]/.test(text[at - 1] ?? "")) return null;
  BARE_LINK.lastIndex = at;
  const found = BARE_LINK.exec(text);
  if (!found) return null;
  // Punctuation at the end belongs to the sentence, and so does a bracket that was opened before the link.
  let address = found[0].replace(/[.,;:!?*_~]+$/, "");
  if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
  const node = linkTo(address, [address]);
  return node && [node, at + address.length];
}

function emphasis(text, at, depth, nowhere) {
  for (const [mark, names] of MARKS) {
    if (!text.startsWith(mark, at) || nowhere.has(mark) || !/\S/.test(text[at + mark.length] ?? "")) continue;
    if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) continue;
    const end = closing(text, at + mark.length, mark);
    if (end < 0) { nowhere.add(mark); continue; }
    const node = names.reduceRight((children, name) => [make(name, {}, children)], inline(text.slice(at + mark.length, end), depth + 1));
    return [node[0], end + mark.length];
  }
  return null;
}

// Returns where a mark is closed, not inside of code, or −1.
function closing(text, from, mark) {
  let isInCode = false;
  for (let at = from; at < text.length; at += 1) {
    if (text[at] === "\\") { at += 1; continue; }
    if (text[at] === "`") isInCode = !isInCode;
    if (isInCode || text[at] !== mark[0]) continue;
    let length = 1;
    while (text[at + length] === mark[0]) length += 1;
    const isAfterText = /\S/.test(text[at - 1]), isWordEnd = mark[0] !== "_" || !/\w/.test(text[at + length] ?? "");
    // A run that is longer than the mark closes inner emphasis first: the mark is its end.
    if (isAfterText && isWordEnd && at > from && (length === mark.length || (length === 3 && mark.length < 3))) return at + length - mark.length;
    at += length - 1;
  }
  return -1;
}
