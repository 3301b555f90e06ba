// One conversation: its messages, and the answer that is being written.

import { ApiError, streamChat } from "./api.js";
import { $, copyButton, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import * as settings from "./settings.js";

const NEAR_THE_END_PX = 80;

export class Chat {
  // `changed(conversation)` is called when a conversation has to be saved, `model()` returns the model's name.
  constructor({ changed, model }) {
    Object.assign(this, { changed, model, conversation: null, running: null });
  }

  show() {
    this.draw();
    $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  get isAnswering() {
    return this.running?.conversation === this.conversation;
  }

  ask(text) {
    this.conversation.messages.push({ role: "user", content: text });
    return this.answer();
  }

  // Replaces the message at an index and everything after it.
  edit(index, text) {
    this.conversation.messages.length = index;
    return this.ask(text);
  }

  retry() {
    if (this.conversation.messages.at(-1)?.role === "assistant") this.conversation.messages.pop();
    return this.answer();
  }

  stop() {
    this.running?.controller.abort();
  }

  async answer() {
    this.stop();
    const conversation = this.conversation, message = { role: "assistant", content: "" };
    const running = { conversation, message, controller: new AbortController(), frame: 0 };
    const asked = answered(conversation.messages);
    if (settings.system()) asked.unshift({ role: "system", content: settings.system() });
    const body = { model: this.model(), messages: asked, ...settings.sampling() };
    conversation.messages.push(message);
    conversation.updated = Date.now();
    this.running = running;
    $("said").textContent = "Answering.";
    this.changed(conversation);
    this.draw();
    $("scroll").scrollTop = $("scroll").scrollHeight;
    try {
      await this.read(streamChat(body, settings.apiKey(), running.controller.signal), running);
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else Object.assign(message, { error: error instanceof ApiError ? error.message : `The page failed: ${error.message}`, needsKey: Boolean(error.isKey) });
    }
    // Told at its end: a screen reader that reads an answer as it grows would never finish a sentence.
    $("said").textContent = message.error || message.stopped ? "The answer has ended." : "The answer is complete.";
    cancelAnimationFrame(running.frame);
    if (this.running === running) this.running = null;
    this.changed(conversation);
    if (this.conversation === conversation) this.draw();
  }

  async read(stream, running) {
    const { message } = running, began = performance.now();
    let first = 0, last = 0, chunks = 0, tokens = null;
    for await (const { text, reasoning, finish, usage } of stream) {
      if (text || reasoning) {
        last = performance.now();
        first ||= last;
        chunks += 1;
        message.content += text;
        if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      }
      if (finish) message.finish = finish;
      tokens = usage?.completion_tokens ?? tokens;
      // Without usage, chunks are an estimate of the tokens.
      if (first) message.stats = { tokens: tokens ?? chunks, isEstimate: tokens === null, firstMs: first - began, restMs: last - first };
      if (!running.frame) running.frame = requestAnimationFrame(() => { running.frame = 0; this.update(running); });
    }
  }

  // Draws the growing answer, and follows it if the end was in view.
  update(running) {
    if (this.conversation !== running.conversation || !this.live) return;
    const scroll = $("scroll"), isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_THE_END_PX;
    this.live.update(running.message);
    if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  }

  draw() {
    const { messages } = this.conversation;
    $("empty").hidden = messages.length > 0;
    this.live = null;
    $("messages").replaceChildren(...messages.map((message, index) => {
      if (message.role === "user") return this.drawQuestion(message, index);
      const isLive = this.isAnswering && message === this.running.message;
      const answer = new AnswerView(message, isLive);
      if (isLive) this.live = answer;
      else answer.actions.append(...(message.content ? [copyButton(() => message.content)] : []), ...(index === messages.length - 1 ? [this.button("Retry", () => this.retry())] : []));
      return answer.element;
    }));
    const isAnswering = this.isAnswering;
    $("stop").hidden = !isAnswering;
    $("send").hidden = isAnswering;
    $("messages").setAttribute("aria-busy", String(isAnswering));
  }

  button(label, onclick) {
    return make("button", { type: "button", className: "small", onclick }, label);
  }

  drawQuestion(message, index) {
    const text = make("div", { className: "bubble" }, message.content);
    const edit = this.button("Edit", () => this.drawEditor(item, message, index));
    const item = make("li", { className: "message user" }, make("h3", { className: "hidden-label" }, "You"), text, make("div", { className: "actions" }, copyButton(() => message.content), edit));
    return item;
  }

  drawEditor(item, message, index) {
    const area = make("textarea", { value: message.content, rows: 3, "aria-label": "Edit the message" });
    const send = () => { if (area.value.trim()) this.edit(index, area.value.trim()); };
    area.onkeydown = (event) => {
      if (event.key === "Escape") { event.stopPropagation(); this.draw(); }
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    };
    item.replaceChildren(area, make("div", { className: "actions" }, this.button("Send", send), this.button("Cancel", () => this.draw())));
    item.classList.add("editing");
    area.focus();
  }
}

class AnswerView {
  constructor(message, isLive) {
    this.body = make("div", { className: "answer" });
    this.markdown = new MarkdownView(this.body);
    this.reasoning = make("div", { className: "reasoning-text" });
    this.details = make("details", { className: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), this.reasoning);
    this.trouble = make("p", { className: "trouble", role: "alert", hidden: true });
    this.stats = make("span", { className: "stats" });
    this.actions = make("div", { className: "actions" }, this.stats);
    this.element = make("li", { className: "message assistant" }, make("h3", { className: "hidden-label" }, "Answer"), this.details, this.body, this.trouble, this.actions);
    this.element.classList.toggle("live", isLive);
    this.update(message);
  }

  update(message) {
    this.markdown.update(message.content);
    this.details.hidden = !message.reasoning;
    this.reasoning.textContent = message.reasoning ?? "";
    this.trouble.hidden = !message.error;
    this.trouble.textContent = message.error ?? "";
    if (message.needsKey) this.trouble.append(" ", make("button", { type: "button", className: "small", onclick: () => settings.open("set-key") }, "Open settings"));
    this.element.classList.toggle("waiting", !message.content && !message.reasoning && !message.error && !message.stopped && !message.finish);
    this.stats.textContent = describe(message);
  }
}

// Returns the messages for a request. A question without an answer is left out with it, because chat templates want
// questions and answers in turns; the last question is the one to answer.
function answered(messages) {
  const isUnanswered = (index) => messages[index]?.role === "assistant" && !messages[index].content;
  return messages.filter((_, index) => !isUnanswered(index) && !isUnanswered(index + 1)).map(({ role, content }) => ({ role, content }));
}

const ENDS = { length: "cut at the longest length", content_filter: "ended by a filter", tool_calls: "asked for a tool" };

function describe({ stats, stopped, finish }) {
  const parts = [];
  if (stats) {
    parts.push(`${stats.isEstimate ? "about " : ""}${stats.tokens.toLocaleString("en")} token${stats.tokens === 1 ? "" : "s"}`);
    if (stats.tokens > 1 && stats.restMs > 0) parts.push(`${three(1000 * (stats.tokens - 1) / stats.restMs)} tokens/s`);
    parts.push(`first after ${stats.firstMs < 1000 ? `${Math.round(stats.firstMs)} ms` : `${three(stats.firstMs / 1000)} s`}`);
  }
  if (stopped) parts.push("stopped");
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return parts.join(" · ");
}

function three(value) {
  return value >= 999.5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
}
