"use strict";

const MIN_GAP_MS = 60;

// The settings form. `sendMessage` and `showError` are defined in page.js.
const Settings = (() => {
  const inputs = {};
  let now = {}, waiting = {}, timer = 0;

  // Limits the rate of messages while a slider moves; its final position is always sent.
  function change(changes) {
    waiting = { ...waiting, ...changes };
    if (!timer) timer = setTimeout(() => {
      timer = 0;
      showError("");
      sendMessage({ type: "settings", settings: waiting });
      waiting = {};
    }, MIN_GAP_MS);
  }

  function field(name, label, why, properties, ...beside) {
    const box = Charts.make("div", "setting"), input = Charts.make("input");
    const caption = Charts.make("label", "", label), hint = Charts.make("span", "why", why);
    Object.assign(input, { id: `set-${name}`, ...properties });
    caption.htmlFor = input.id;
    hint.id = `why-${name}`;
    input.setAttribute("aria-describedby", hint.id);
    box.append(caption, ...beside, input, hint);
    return { box, input };
  }

  function slider(name, label, why, min, max, step, send) {
    const value = Charts.make("output"), { box, input } = field(name, label, why, { type: "range", min, max, step }, value);
    const show = (number) => { value.textContent = step < 1 ? (+number).toFixed(2) : String(number); };
    value.htmlFor = input.id;
    input.oninput = () => { show(input.value); send(+input.value); };
    inputs[name] = { input, put: (number) => { input.value = number; show(number); } };
    return box;
  }

  // Text is sent with Enter, or when the field loses focus.
  function words(name, label, why, send) {
    const { box, input } = field(name, label, why, { type: "text", maxLength: 2000, autocomplete: "off", spellcheck: false });
    input.onchange = () => send(input.value);
    input.onkeydown = (event) => { if (event.key === "Enter") input.blur(); };
    inputs[name] = { input, put: (text) => { if (document.activeElement !== input) input.value = text; } };
    return box;
  }

  function build(message) {
    const form = $("settings");
    const seed = slider("seed", "Seed", "Selects the noise.", 0, 9999, 1, (value) => change({ seed: value }));
    const another = Charts.make("button", "", "Another");
    another.type = "button";
    another.onclick = () => { const value = Math.floor(Math.random() * 10000); inputs.seed.put(value); change({ seed: value }); };
    const row = Charts.make("div", "row");
    row.append(seed.querySelector("input"), another);
    seed.insertBefore(row, seed.querySelector(".why"));
    form.replaceChildren(
      ...(message.takes_prompt ? [words("prompt", "Prompt", "What to show.", (value) => change({ prompt: value }))] : []),
      slider("strength", "Strength", "How far the output departs from the input.", 0, 1, 0.01, (value) => change({ strength: value })),
      slider("steps", "Steps", "More steps take longer.", 1, message.most_steps, 1, (value) => change({ steps: value })),
      seed,
      ...message.control_names.map((name, i) => slider(`control-${i}`, name, "Of the model’s control vector.", message.control_least[i], 1, 0.01, (value) => {
        now.control[i] = value;
        change({ control: now.control });
      })),
    );
    form.onsubmit = (event) => event.preventDefault();
    set(message.settings);
  }

  // Shows the settings that the server sent, except on a slider that is being moved.
  function set(settings) {
    now = settings;
    const values = { strength: settings.strength, steps: settings.steps, seed: settings.seed, prompt: settings.prompt };
    settings.control.forEach((value, i) => { values[`control-${i}`] = value; });
    for (const [name, value] of Object.entries(values))
      if (inputs[name] && !inputs[name].input.matches(":active")) inputs[name].put(value);
  }

  return { build, set };
})();
