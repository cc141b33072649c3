// One message on the page: what it says, and what can be done with it.

import { button, copyButton, element } from "./dom.js";
import { codeBlock, Markdown } from "./markdown.js";

const ENDINGS = {
  length: "The answer ended here because it may be no longer.",
  stopped: "You stopped the answer here.",
};
const WHO = { user: "You", assistant: "Answer", tool: "Result of a call" };

/**
 * Shows a message. `acts` has edit, again, choose(message) and result(call, text); one that is missing is not offered.
 * `update` shows what has come since.
 */
export class MessageView {
  constructor(message, beside, acts) {
    this.message = message;
    this._acts = acts;
    this._thought = new Thought();
    this._prose = element("div", { class: "prose" });
    this._markdown = new Markdown(this._prose);
    this._calls = element("div", { class: "calls" });
    this._shownCalls = "";
    this._note = element("p", { class: "note" });
    this._actions = element("div", { class: "actions" }, this._choices(beside), this._buttons());
    this._body = element("div", { class: "body" }, this._thought.node, this._prose, this._calls, this._note);
    this.node = element(
      "li",
      { class: `message ${message.role}`, "data-id": message.id },
      element("h2", { class: "hidden" }, WHO[message.role]),
      this._body,
      this._actions,
    );
    this.update(false);
  }

  update(live) {
    const { message } = this;
    this.node.classList.toggle("live", live);
    this.node.setAttribute("aria-busy", String(live));
    this._thought.update(message.thought ?? "", live && !message.text && !message.calls?.length);
    if (message.role === "assistant") this._markdown.show(message.text);
    else this._prose.textContent = message.text;
    this._prose.hidden = !message.text;
    this._showCalls(live);
    const note = message.fault ?? ENDINGS[message.ending] ?? "";
    const empty = !live && message.role === "assistant" && !message.text && !message.calls?.length && !note;
    this._note.textContent = empty ? "The answer is empty." : note;
    this._note.classList.toggle("fault", Boolean(message.fault));
    this._note.hidden = this._note.textContent === "";
    this._actions.hidden = live;
  }

  reading(read, of) {
    this._note.hidden = false;
    this._note.textContent = `Reading what was written: ${read} of ${of} tokens`;
  }

  // ---- What can be done ----------------------------------------------------------------------------------------

  _choices(beside) {
    if (beside.length < 2) return null;
    const place = beside.indexOf(this.message);
    const step = (to, sign, label) =>
      button(sign, () => this._acts.choose(beside[to]), {
        class: "quiet small",
        "aria-label": label,
        disabled: to < 0 || to >= beside.length,
      });
    return element(
      "span",
      { class: "choices", role: "group", "aria-label": "Versions" },
      step(place - 1, "‹", "The version before"),
      element("span", {}, `${place + 1} of ${beside.length}`),
      step(place + 1, "›", "The next version"),
    );
  }

  _buttons() {
    const { message } = this;
    const made = [copyButton(() => message.text)];
    if (message.role === "user") made.push(button("Edit", () => this._edit(), { class: "quiet small" }));
    if (message.role === "assistant") {
      made.push(button("Try again", () => this._acts.again(message), { class: "quiet small" }));
    }
    return made;
  }

  _edit() {
    const area = element("textarea", { "aria-label": "Edit the message", rows: 3 });
    area.value = this.message.text;
    const leave = () => {
      editor.replaceWith(this._body);
      this._actions.hidden = false;
      this._actions.querySelector("button:last-child").focus();
    };
    const save = () => {
      if (area.value.trim()) this._acts.edit(this.message, area.value);
    };
    const editor = element(
      "div",
      { class: "editor" },
      area,
      element(
        "div",
        { class: "buttons" },
        element("span", { class: "hint" }, "The message as it was is kept beside it."),
        element("span", { class: "space" }),
        button("Cancel", leave, { class: "quiet" }),
        button("Send", save, { class: "send" }),
      ),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      else save();
      event.preventDefault();
      event.stopPropagation();
    });
    this._body.replaceWith(editor);
    this._actions.hidden = true;
    area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
    area.focus();
  }

  // ---- Calls of tools ------------------------------------------------------------------------------------------

  _showCalls(live) {
    const calls = this.message.calls ?? [];
    const now = JSON.stringify([calls, live]);
    if (now === this._shownCalls) return;
    this._shownCalls = now;
    this._calls.replaceChildren(...calls.map((call) => this._call(call, live)));
    this._calls.hidden = calls.length === 0;
  }

  _call(call, live) {
    const summary = element("summary", {}, "Calls ", element("code", {}, call.name));
    const shown = element(
      "details",
      { class: "call", open: true },
      summary,
      codeBlock(spaced(call.arguments), "arguments"),
    );
    if (!live && this._acts.result && !this._acts.answered(call)) {
      const area = element("textarea", {
        rows: 2,
        "aria-label": `Result of ${call.name}`,
        placeholder: "What the call gives",
      });
      shown.append(
        area,
        element(
          "div",
          { class: "buttons" },
          element("span", { class: "hint" }, "The page calls nothing by itself."),
          element("span", { class: "space" }),
          button("Send the result", () => this._acts.result(this.message, call, area.value), { class: "send" }),
        ),
      );
    }
    return shown;
  }
}

function spaced(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet, or cut
  }
}

/** Folded, with what it says behind a line. */
class Thought {
  constructor() {
    this._label = element("span", {}, "Thoughts");
    this._prose = element("div", { class: "prose" });
    this._markdown = new Markdown(this._prose);
    this._text = "";
    this.node = element(
      "details",
      { class: "thought", toggle: () => this._show() },
      element("summary", {}, this._label),
      this._prose,
    );
  }

  update(text, live) {
    this.node.hidden = !text;
    this._label.textContent = live ? "Thinking…" : "Thoughts";
    this._text = text;
    this._show();
  }

  _show() {
    if (this.node.open) this._markdown.show(this._text);
  }
}
