// The settings: what is asked of the model, and how the page looks.

import { byId, element } from "./dom.js";
import { keepSettings, settings } from "./keep.js";

const FIELDS = [
  { name: "instructions", label: "Instructions", kind: "area", rows: 3, note: "They stand before every conversation." },
  {
    name: "thinking",
    label: "Thinking",
    kind: "choice",
    choices: [
      ["", "As the model does"],
      ["on", "Always"],
      ["off", "Never"],
    ],
  },
  { name: "temperature", label: "Temperature", kind: "number", most: 2, step: 0.1, half: true },
  { name: "topP", label: "Top p", kind: "number", most: 1, step: 0.05, half: true },
  {
    name: "longest",
    label: "Longest answer, in tokens",
    kind: "number",
    least: 1,
    step: 1,
    note: "Whatever is empty is left to the model.",
  },
  {
    name: "tools",
    label: "Tools",
    kind: "area",
    rows: 3,
    note: "A JSON list of functions, as /v1/chat/completions takes them.",
  },
  {
    name: "look",
    label: "Look",
    kind: "choice",
    choices: [
      ["", "As the system"],
      ["light", "Light"],
      ["dark", "Dark"],
    ],
  },
  {
    name: "key",
    label: "Key",
    kind: "password",
    note: "Only if this server asks for one. It is kept in this browser.",
  },
];

/** Opens with `open`. `changed` is told when something was saved, `forget` when all conversations are to go. */
export class SettingsDialog {
  constructor(changed, forget) {
    this._dialog = byId("settings");
    this._inputs = {};
    for (const field of FIELDS) byId("settings-fields").append(this._field(field));
    byId("settings-form").addEventListener("input", () => (byId("settings-fault").textContent = ""));
    byId("settings-cancel").addEventListener("click", () => this._dialog.close());
    byId("forget").addEventListener("click", () => {
      if (!confirm("Delete all conversations? Nobody can bring them back.")) return;
      this._dialog.close();
      forget();
    });
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const values = this._values();
      const fault = faultOf(values);
      byId("settings-fault").textContent = fault;
      if (fault) return;
      this._dialog.close();
      changed(values, keepSettings(values));
    });
  }

  open(fault = "") {
    const now = settings();
    for (const [name, input] of Object.entries(this._inputs)) input.value = now[name];
    byId("settings-fault").textContent = fault;
    this._dialog.showModal();
    if (fault) this._inputs.key.focus();
  }

  _values() {
    const entered = Object.entries(this._inputs).map(([name, input]) => [name, input.value.trim()]);
    return { ...settings(), ...Object.fromEntries(entered) };
  }

  _field({ name, label, kind, rows, choices, note, least = 0, most, step, half }) {
    const id = `setting-${name}`;
    const about = note ? `${id}-note` : null;
    const input =
      kind === "area"
        ? element("textarea", { id, rows, "aria-describedby": about, spellcheck: "false" })
        : kind === "choice"
          ? element(
              "select",
              { id },
              choices.map(([value, text]) => element("option", { value }, text)),
            )
          : element("input", {
              id,
              type: kind,
              min: kind === "number" ? least : null,
              max: most,
              step,
              "aria-describedby": about,
              autocomplete: "off",
            });
    this._inputs[name] = input;
    return element(
      "div",
      { class: half ? "field half" : "field" },
      element("label", { for: id }, label),
      input,
      note ? element("p", { class: "hint", id: about }, note) : null,
    );
  }
}

function faultOf(values) {
  if (!values.tools) return "";
  try {
    if (Array.isArray(JSON.parse(values.tools))) return "";
  } catch {
    // The same words do.
  }
  return "Tools: expected a JSON list, found something else.";
}

export function showLook(look) {
  document.documentElement.dataset.look = look;
}

/** The fields of a request that the settings say. */
export function askedOf(values) {
  const asked = {};
  if (values.temperature !== "") asked.temperature = Number(values.temperature);
  if (values.topP !== "") asked.top_p = Number(values.topP);
  if (values.longest !== "") asked.max_completion_tokens = Number(values.longest);
  if (values.thinking) asked.chat_template_kwargs = { enable_thinking: values.thinking === "on" };
  if (values.tools) asked.tools = JSON.parse(values.tools);
  return asked;
}
