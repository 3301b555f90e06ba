// Builds elements. Text is always set as text, never parsed as HTML.

export const $ = (id) => document.getElementById(id);

// Returns an element: `make("a", { className: "link", href: "…" }, "text", otherNode)`. A child may be an array of them,
// which unlike spread arguments may have any length.
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && !key.includes("-")) element[key] = value;
    else element.setAttribute(key, value);
  }
  for (const child of children.flat()) element.append(child);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(name, attributes = {}, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Returns a button that copies what `text()` returns, and says so for a moment.
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", className: "small" }, label);
  button.onclick = async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = label; }, 1500);
  };
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers give the clipboard only to https pages and localhost; the old way works on others.
    const area = make("textarea", { value: text, className: "hidden-label", readOnly: true });
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
