"""Markdown of answers becomes the right nodes, and nothing in it can run a script or load anything."""

import json
import re
from typing import Any

import pytest

from patience import HANGS_S
from serving.fake_server import FakeServer
from serving.page.conftest import Page
from stream.browser.chromium import PROGRAM, Chromium

pytestmark = [
    pytest.mark.timeout(2 * HANGS_S),
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed"),
]
# The HTML of a text, in whole and as it grows by a character at a time, without the buttons of code.
SHOW = """async (text) => {
  const { MarkdownView } = await import("./markdown.js");
  const show = (view) => view.element.innerHTML.replaceAll(/<figcaption>.*?<\\/figcaption>/gs, "");
  const [whole, growing] = ["div", "div"].map((name) => new MarkdownView(document.createElement(name)));
  whole.update(text);
  for (let end = 1; end <= text.length; end += 1) growing.update(text.slice(0, end));
  return [show(whole), show(growing)];
}"""
CODE = '<figure class="code" data-language="{}"><pre tabindex="0"><code>{}</code></pre></figure>'
LINK = '<a href="{}" target="_blank" rel="noopener noreferrer nofollow">{}</a>'
CASES = {
    "plain *em* **strong**": "<p>plain <em>em</em> <strong>strong</strong></p>",
    "***both*** ~~gone~~": "<p><strong><em>both</em></strong> <del>gone</del></p>",
    "1. x\n    - y\n        - z": "<ol><li>x<ul><li>y<ul><li>z</li></ul></li></ul></li></ol>",
    "a_b_c 2 * 3 * 4 **": "<p>a_b_c 2 * 3 * 4 **</p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# Head #\n## Next": "<h3>Head</h3><h4>Next</h4>",
    "`a ** b` ``x ` y``": "<p><code>a ** b</code> <code>x ` y</code></p>",
    "```py\nx = '<b>'\n\ny\n```\nend": CODE.format("py", "x = '&lt;b&gt;'\n\ny") + "<p>end</p>",
    "~~~\nopen": CODE.format("", "open"),
    "- a\n- b\n  - c\n    d\n- e": "<ul><li>a</li><li>b<ul><li>c<br>d</li></ul></li><li>e</li></ul>",
    "3. a\n\n4. b\n\ntext": '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>',
    "1. a\n\n   ```\n   x\n   ```\n2. b": "<ol><li>a" + CODE.format("", "x") + "</li><li>b</li></ol>",
    "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "[a](https://x.org/b_(c) \"t\")": "<p>" + LINK.format("https://x.org/b_(c)", "a") + "</p>",
    "(see https://x.org/a_b).": "<p>(see " + LINK.format("https://x.org/a_b", "https://x.org/a_b") + ").</p>",
    r"\*a\* \<b\>": "<p>*a* &lt;b&gt;</p>",
    "| a | b |\n|:-:|--:|\n| `x|y` | 1\\|2 |": '<div class="table" tabindex="0"><table><thead><tr>'
    '<th class="to-center">a</th><th class="to-right">b</th></tr></thead><tbody><tr>'
    '<td class="to-center"><code>x|y</code></td><td class="to-right">1|2</td></tr></tbody></table></div>',
}  # fmt: skip
ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'><svg onload=window.hit=1>",
    "```html\n<script>window.hit = 1</script></code></pre><img src=x onerror=window.hit=1>\n```",
    "```\"><img/src=x/onerror=window.hit=1>\nx\n```",
    "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1)",
    "[c](java\tscript:window.hit=1) [d](\x01javascript:window.hit=1) [e](<java\nscript:window.hit=1>)",
    "[a](data:text/html,<script>window.hit=1</script>) [b](vbscript:x) [c](file:///etc/passwd) [d](blob:x)",
    "<javascript:window.hit=1> [a]( javascript&colon;window.hit=1) [x](https://x.org\" onclick=\"window.hit=1)",
    "![a](https://evil.example/pixel.png) ![b](//evil.example/x.png) [c](//evil.example)",
    "| <img src=x onerror=window.hit=1> | b |\n|-|-|\n| <script>window.hit=1</script> | [a](javascript:window.hit=1) |",
    "# <iframe srcdoc='<script>parent.hit=1</script>'>\n> <form action=javascript:window.hit=1><button>",
    "- <style>@import 'https://evil.example/x.css'</style>\n- [ ] <object data=javascript:window.hit=1>",
    "&lt;script&gt;window.hit = 1&lt;/script&gt; <a href=\"javascript:window.hit=1\">a</a>",
]  # fmt: skip
CHECK = """async (text) => {
  const { MarkdownView } = await import("./markdown.js");
  const view = new MarkdownView(document.body.appendChild(document.createElement("div")));
  view.update(text);
  const all = [...view.element.querySelectorAll("*")];
  // A harmless link would open a tab; a link with a script runs it.
  const stay = (event) => { if (/^(https?|mailto):/.test(event.target.href)) event.preventDefault(); };
  view.element.addEventListener("click", stay);
  all.forEach((one) => one.click?.());
  await new Promise((done) => setTimeout(done, 20));
  const found = {
    names: [...new Set(all.map((one) => one.localName))],
    handlers: all.flatMap((one) => one.getAttributeNames()).filter((name) => name.startsWith("on")),
    links: all.filter((one) => one.matches("a")).map((one) => one.protocol),
    text: view.element.textContent, hit: window.hit ?? null,
  };
  view.element.remove();
  return found;
}"""
ENDLESS = ("*a ", "[", "[a](", "`", "> ", "**a_", "- ", "|", "`a``", "![a")
TIME = """async (text) => {
  const { MarkdownView } = await import("./markdown.js");
  const began = performance.now();
  new MarkdownView(document.createElement("div")).update(text.repeat(20000));
  return performance.now() - began;
}"""
HARMLESS = re.compile(
    "p|br|a|strong|em|del|code|pre|figure|figcaption|span|button|ul|ol|li|input|h[3-6]|hr|blockquote|div|table|thead|"
    "tbody|tr|th|td"
)


def test_markdown_becomes_nodes(page: Page) -> None:
    async def test(browser: Chromium) -> None:
        for text, html in CASES.items():
            whole, growing = await browser.run(f"({SHOW})({json.dumps(text)})")
            assert whole == html, text
            assert growing == whole, text

    page.run(test, FakeServer())


def test_nothing_in_an_answer_runs_or_loads(page: Page) -> None:
    async def test(browser: Chromium) -> None:
        for text in ATTACKS:
            found: Any = await browser.run(f"({CHECK})({json.dumps(text)})")
            assert found["hit"] is None and found["handlers"] == [], text
            assert all(map(HARMLESS.fullmatch, found["names"])), text
            assert set(found["links"]) <= {"http:", "https:", "mailto:"}, text
            if "<script>" in text:
                assert "<script>" in found["text"], text
        assert browser.console == [], "the policy had nothing to refuse"

    page.run(test, FakeServer())


def test_long_texts_are_parsed_once(page: Page) -> None:
    """Searching these again from each of their marks would take minutes."""

    async def test(browser: Chromium) -> None:
        for text in ENDLESS:
            took_ms = await browser.run(f"({TIME})({json.dumps(text)})")
            assert float(str(took_ms)) < 5000, text

    page.run(test, FakeServer())
