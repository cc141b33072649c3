// The page: conversations on the left, messages in the middle, the engine on the right.

import { Conversation } from "./conversation.js";
import { button, byId, element } from "./dom.js";
import { conversations, forget, forgetAll, keep, keepSettings, settings } from "./keep.js";
import { MessageView } from "./message.js";
import { Server } from "./server.js";
import { askedOf, SettingsDialog, showLook } from "./settings.js";
import { Side } from "./side.js";

const NARROW = matchMedia("(max-width: 62rem)");
const SAVE_EVERY = 1000;

class Page {
  constructor() {
    this.values = settings();
    this.server = new Server(this.values.key);
    this.side = new Side(this.server);
    this.model = "";
    this.now = new Conversation();
    this.views = [];
    this.answering = null; // { stop } while an answer comes
    this.atEnd = true; // nobody has scrolled up to read
    this.dialog = new SettingsDialog(
      (values, kept) => this.changed(values, kept),
      () => this.forgetAll(),
    );
    showLook(this.values.look);
    this.listen();
    this.show();
    this.showList();
    this.showSide(this.values.side && !NARROW.matches);
    this.greet();
  }

  listen() {
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.answering) this.stop();
      else this.send();
    });
    const ask = byId("ask");
    ask.addEventListener("input", () => fit(ask));
    ask.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.answering) this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("settings").open) return;
      if (this.closeDrawers()) return;
      this.stop();
    });
    byId("new").addEventListener("click", () => this.open(new Conversation()));
    byId("settings-open").addEventListener("click", () => this.dialog.open());
    byId("shelf-open").addEventListener("click", () => this.showShelf(true));
    byId("shelf-close").addEventListener("click", () => this.closeDrawers());
    byId("side-toggle").addEventListener("click", () => this.toggleSide());
    byId("side-close").addEventListener("click", () => this.toggleSide());
    byId("veil").addEventListener("click", () => this.closeDrawers());
    byId("scroll").addEventListener("scroll", ({ target }) => {
      this.atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 60;
    });
    NARROW.addEventListener("change", () => {
      this.showShelf(false);
      this.showSide(this.values.side && !NARROW.matches);
    });
    addEventListener("storage", () => this.showList());
    addEventListener("pagehide", () => this.answering && this.save());
  }

  async greet() {
    try {
      const { data } = await (await this.server.get("/v1/models")).json();
      this.model = data[0].id;
      byId("model").textContent = this.model;
      await this.side.look();
    } catch (error) {
      this.refused(error);
    }
  }

  // ---- Conversations -------------------------------------------------------------------------------------------

  open(conversation) {
    this.stop();
    this.now = conversation;
    this.show();
    this.showList();
    this.showShelf(false);
    byId("ask").focus();
  }

  save(conversation = this.now) {
    if (!conversation.gone && !keep(conversation))
      this.say("The browser has no room for more. Delete a conversation that you no longer need.");
  }

  forgetAll() {
    forgetAll();
    this.now.gone = true; // what its answer still says is not kept
    this.open(new Conversation());
  }

  showList() {
    const rows = conversations().map((each) => {
      const current = each.id === this.now.id;
      const name = each.title || "Conversation";
      return element(
        "li",
        { class: current ? "current" : "" },
        button(name, () => (current ? this.showShelf(false) : this.open(each)), {
          "aria-current": current ? "true" : null,
          class: "title",
        }),
        button("✕", () => this.delete(each), { class: "quiet small", "aria-label": `Delete ${name}` }),
      );
    });
    byId("conversations").replaceChildren(...rows);
  }

  delete(conversation) {
    if (!confirm(`Delete “${conversation.title}”?`)) return;
    forget(conversation);
    if (conversation.id !== this.now.id) return this.showList();
    this.now.gone = true;
    this.open(new Conversation());
  }

  // ---- Messages ------------------------------------------------------------------------------------------------

  show() {
    const path = this.now.path();
    const answered = new Set(path.filter((each) => each.role === "tool").map((each) => each.call));
    this.views = path.map((message, at) => {
      const last = path.slice(at + 1).every((each) => each.role === "tool");
      const acts = {
        edit: (old, text) => this.ask(old.parent, text),
        again: (old) => this.answer(old.parent),
        choose: (other) => this.choose(other),
        answered: (call) => answered.has(call.id),
        result: last ? (of, call, text) => this.give(of, call, text) : null,
      };
      return new MessageView(message, this.now.beside(message), acts);
    });
    byId("messages").replaceChildren(...this.views.map((view) => view.node));
    byId("welcome").hidden = path.length > 0;
    byId("title").textContent = this.now.title || "New conversation";
    document.title = this.now.title ? `${this.now.title} – moeflux` : "moeflux";
    this.toEnd();
  }

  choose(message) {
    this.stop();
    this.now.choose(message);
    this.save();
    this.show();
    byId("messages").querySelector(`[data-id="${message.id}"] .choices button:not(:disabled)`)?.focus();
  }

  send() {
    const ask = byId("ask");
    const text = ask.value;
    if (!text.trim()) return;
    ask.value = "";
    fit(ask);
    this.ask(this.now.path().at(-1)?.id ?? "", text);
  }

  ask(parent, text) {
    this.stop();
    const asked = this.now.add(parent, { role: "user", text });
    this.answer(asked.id);
  }

  /** A person says what a call gives. When all calls of the answer have that, the model goes on. */
  give(message, call, text) {
    const last = this.now.path().at(-1);
    const given = this.now.add(last.id, { role: "tool", call: call.id, text });
    const done = this.now
      .path()
      .filter((each) => each.role === "tool")
      .map((each) => each.call);
    if (message.calls.every((each) => done.includes(each.id))) this.answer(given.id);
    else {
      this.save();
      this.show();
    }
  }

  // ---- Answers -------------------------------------------------------------------------------------------------

  stop() {
    this.answering?.stop.abort();
    this.answering = null;
  }

  async answer(parent) {
    this.stop();
    const conversation = this.now;
    const body = {
      model: this.model || "moeflux",
      messages: conversation.upTo(conversation.messages[parent], this.values.instructions),
      ...askedOf(this.values),
    };
    const message = conversation.add(parent, { role: "assistant", thought: "", calls: [], ending: null });
    const mine = { stop: new AbortController() };
    this.answering = mine;
    this.save();
    this.showList();
    this.show();
    this.busy(true);
    this.say("The model is answering.");
    const view = this.views.at(-1);
    const painter = new Painter(() => {
      view.update(this.answering === mine);
      if (this.atEnd) this.toEnd();
    });
    const saving = setInterval(() => this.save(conversation), SAVE_EVERY);
    const told = this.telling(message, view, painter);
    let usage = null;
    view.update(true);
    this.toEnd();
    try {
      this.side.begin();
      const result = await this.server.answer(body, told, mine.stop.signal);
      message.ending = result.ending;
      usage = result.usage;
    } catch (error) {
      if (error.name === "AbortError") message.ending = "stopped";
      else {
        message.fault = faultText(error);
        this.refused(error);
      }
    }
    clearInterval(saving);
    if (this.answering === mine) this.answering = null;
    painter.now();
    if (this.answering === null) this.busy(false);
    this.save(conversation);
    if (this.now === conversation && !this.answering) {
      this.say(message.fault ?? (message.ending === "stopped" ? "The answer was stopped." : "The answer is complete."));
    }
    if (!this.answering) await this.side.end(usage);
  }

  telling(message, view, painter) {
    const token = () => {
      this.side.token();
      painter.soon();
    };
    return {
      text: (part) => {
        message.text += part;
        token();
      },
      thought: (part) => {
        message.thought += part;
        token();
      },
      callBegins: (index, id, name) => {
        message.calls[index] = { id, name, arguments: "" };
        token();
      },
      callGoesOn: (index, part) => {
        message.calls[index].arguments += part;
        token();
      },
      reading: (read, of) => view.reading(read, of),
    };
  }

  busy(busy) {
    const send = byId("send");
    send.textContent = busy ? "Stop" : "Send";
    send.classList.toggle("stop", busy);
    byId("hint").textContent = busy ? "Escape stops the answer." : "Enter sends. Shift and Enter begin a new line.";
  }

  toEnd() {
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }

  say(words) {
    byId("status").textContent = words;
  }

  refused(error) {
    if (error.status === 401) this.dialog.open("This server asks for a key.");
    else this.say(faultText(error));
  }

  changed(values, kept) {
    const key = values.key !== this.server.key;
    this.values = values;
    this.server.key = values.key;
    showLook(values.look);
    if (!kept) this.say("The browser has no room for the settings.");
    if (key) this.greet();
  }

  // ---- What is at the sides ------------------------------------------------------------------------------------

  showShelf(open) {
    if (!NARROW.matches) open = false;
    byId("frame").classList.toggle("shelf-out", open);
    byId("shelf-open").setAttribute("aria-expanded", String(open));
    this.cover();
    if (open) byId("new").focus();
  }

  toggleSide() {
    const open = !byId("frame").classList.contains("side-out");
    this.showSide(open);
    (open ? byId("side-close") : byId("side-toggle")).focus();
    if (NARROW.matches) return;
    this.values = { ...this.values, side: open };
    keepSettings(this.values);
  }

  showSide(open) {
    byId("frame").classList.toggle("side-out", open);
    byId("side-toggle").setAttribute("aria-expanded", String(open));
    this.cover();
  }

  /** What lies under a drawer cannot be reached. */
  cover() {
    const frame = byId("frame").classList;
    byId("talk").inert = NARROW.matches && (frame.contains("shelf-out") || frame.contains("side-out"));
  }

  /** Whether there was one to close. */
  closeDrawers() {
    if (!NARROW.matches) return false;
    const frame = byId("frame").classList;
    const some = frame.contains("shelf-out") || frame.contains("side-out");
    const from = frame.contains("shelf-out") ? "shelf-open" : "side-toggle";
    this.showShelf(false);
    this.showSide(false);
    if (some) byId(from).focus();
    return some;
  }
}

/** Paints at most once a frame. */
class Painter {
  constructor(paint) {
    this._paint = paint;
    this._asked = 0;
  }

  soon() {
    this._asked ||= requestAnimationFrame(() => this.now());
  }

  now() {
    cancelAnimationFrame(this._asked);
    this._asked = 0;
    this._paint();
  }
}

function faultText(error) {
  return error.status === undefined ? "The server cannot be reached." : error.message;
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 240)}px`;
}

new Page();
