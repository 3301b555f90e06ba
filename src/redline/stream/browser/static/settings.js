"use strict";

const MIN_GAP_MS = 60;

// The form of settings. `say` and `complain` are defined in page.js.
const Settings = (() => {
  const inputs = {};
  let now = {}, waiting = {}, timer = 0;

  // A slider sends where it is at most every so often, and always where it came to rest.
  function change(changes) {
    waiting = { ...waiting, ...changes };
    if (!timer) timer = setTimeout(() => {
      timer = 0;
      complain("");
      say({ type: "settings", settings: waiting });
      waiting = {};
    }, MIN_GAP_MS);
  }

  function slider(name, label, why, min, max, step, send) {
    const box = Charts.make("div", "setting"), input = Charts.make("input");
    const caption = Charts.make("label", "", label), value = Charts.make("output");
    Object.assign(input, { type: "range", id: `set-${name}`, min, max, step });
    caption.htmlFor = value.htmlFor = input.id;
    input.setAttribute("aria-describedby", `why-${name}`);
    const hint = Charts.make("span", "why", why);
    hint.id = `why-${name}`;
    const put = (number) => { input.value = number; value.textContent = step < 1 ? (+number).toFixed(2) : String(number); };
    input.oninput = () => { value.textContent = step < 1 ? (+input.value).toFixed(2) : input.value; send(+input.value); };
    inputs[name] = { input, put };
    box.append(caption, value, input, hint);
    return box;
  }

  // Words are sent when they are finished: with Enter, or when the field is left.
  function words(name, label, why, send) {
    const box = Charts.make("div", "setting"), input = Charts.make("input");
    const caption = Charts.make("label", "", label), hint = Charts.make("span", "why", why);
    Object.assign(input, { type: "text", id: `set-${name}`, maxLength: 2000, autocomplete: "off", spellcheck: false });
    caption.htmlFor = input.id;
    hint.id = `why-${name}`;
    input.setAttribute("aria-describedby", hint.id);
    input.onchange = () => send(input.value);
    input.onkeydown = (event) => { if (event.key === "Enter") input.blur(); };
    inputs[name] = { input, put: (text) => { if (document.activeElement !== input) input.value = text; } };
    box.append(caption, input, hint);
    return box;
  }

  function build(said) {
    const form = $("settings");
    const seed = slider("seed", "Seed", "Another number, another noise.", 0, 9999, 1, (value) => change({ seed: value }));
    const another = Charts.make("button", "", "Another");
    another.type = "button";
    another.onclick = () => { const value = Math.floor(Math.random() * 10000); inputs.seed.put(value); change({ seed: value }); };
    const row = Charts.make("div", "row");
    row.append(seed.querySelector("input"), another);
    seed.insertBefore(row, seed.querySelector(".why"));
    form.replaceChildren(
      ...(said.takes_prompt ? [words("prompt", "Prompt", "What to show.", (value) => change({ prompt: value }))] : []),
      slider("strength", "Strength", "How far the output may go from the input.", 0, 1, 0.01, (value) => change({ strength: value })),
      slider("steps", "Steps", "More take longer.", 1, said.most_steps, 1, (value) => change({ steps: value })),
      seed,
      ...said.control_names.map((name, i) => slider(`control-${i}`, name, "Of the model’s control vector.", said.control_least[i], 1, 0.01, (value) => {
        now.control[i] = value;
        change({ control: now.control });
      })),
    );
    form.onsubmit = (event) => event.preventDefault();
    set(said.settings);
  }

  // What another page set is shown here, but not under the finger that moves a slider.
  function set(settings) {
    now = settings;
    const values = { strength: settings.strength, steps: settings.steps, seed: settings.seed, prompt: settings.prompt };
    settings.control.forEach((value, i) => { values[`control-${i}`] = value; });
    for (const [name, value] of Object.entries(values))
      if (inputs[name] && !inputs[name].input.matches(":active")) inputs[name].put(value);
  }

  return { build, set };
})();
